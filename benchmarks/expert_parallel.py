"""Tokens to experts on other GPUs and back, beside XLA's collectives and a plain copy between GPUs, in one run.

    python -m benchmarks.expert_parallel [--ranks R] [--tokens 128 1024 4096 8192] [--sms 16 24 32 64]
        [--model deepseek-v3] [--skewed] [--command-buffers] [--layer]

Rates count the bytes of rows that cross a link, per GPU and direction: a row per token and other rank it goes to. With
one GPU nothing crosses a link; rates are then of rows moved inside it. Combine returns bf16 whatever travelled there.
The last four columns are of DeepEP's kernels that use the link, alone: what they take, and their rate over that of a
plain copy from GPU to GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.bench import timing
from jaxmoe.bench.layer import random_params
from jaxmoe.bench.trace import trace
from jaxmoe.config import Execution, MoEConfig, RouterConfig
from jaxmoe.dispatch.all_to_all import AllToAll
from jaxmoe.dispatch.base import Dispatch
from jaxmoe.dispatch.deepep import DeepEP, EpContext
from jaxmoe.layer.pipeline import moe
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.ops.shapes import MODELS, Shape
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.quant.formats import BF16, FP8Block, WeightFormat

LAYOUT = ParallelLayout(tokens=P("d"), experts="d")


@dataclasses.dataclass(frozen=True)
class Data:
    """Inputs of all ranks of a model, ``tokens`` each, over the mesh, and the rows of rank 0 that go to other ranks."""

    shape: Shape
    tokens: int
    x: jax.Array
    ids: jax.Array
    weights: jax.Array
    remote: int
    sent: int


def make(mesh: Mesh, shape: Shape, tokens: int, skewed: bool) -> Data:
    """Skewed: each token draws its K experts by the Zipf-like shares of :func:`jaxmoe.ops.shapes.group_sizes`."""
    rng = np.random.default_rng(0)
    rows, e, k = mesh.size * tokens, shape.num_experts, shape.top_k
    liking = rng.permutation(-1.5 * np.log(np.arange(1, e + 1))) if skewed else np.zeros(e)
    ids = np.argsort(-(liking + rng.gumbel(size=(rows, e))), axis=1)[:, :k].astype(np.int32)
    to = (ids[:tokens, :, None] // (e // mesh.size) == np.arange(mesh.size)).any(1)
    cut = NamedSharding(mesh, P("d"))
    x = jax.random.normal(jax.random.key(0), (rows, shape.hidden), jnp.bfloat16)
    weights = np.full((rows, k), 1 / k, np.float32)
    arrays = (jax.device_put(a, cut) for a in (x, ids, weights))
    return Data(shape, tokens, *arrays, int(to[:, 1:].sum()), int(to.sum()))


def rooms(transport: Dispatch, experts: int, *, back: bool) -> Callable[..., Any]:
    """Dispatch, or dispatch and combine of rows y that are there already: nothing else touches what arrived."""

    def body(x: jax.Array, ids: jax.Array, weights: jax.Array, y: jax.Array) -> jax.Array:
        y, sent = lax.optimization_barrier((y, transport.dispatch(x, ids, weights, experts)))
        rows = sent.x.rows if isinstance(sent.x, GroupedRows) else sent.x
        values = rows if isinstance(rows, jax.Array) else rows.values
        used = values.reshape(sent.ids.shape[0], -1)[:1, :1].astype(jnp.float32) + sent.weights[:1, :1]
        return transport.combine(y, sent) + used if back else used

    return body


def arriving(mesh: Mesh, transport: Dispatch, data: Data) -> int:
    """Rows per rank that a transport hands to the experts, those of padding included."""
    counted = on(mesh, lambda *args: transport.dispatch(*args, data.shape.num_experts).ids)
    return jax.eval_shape(counted, data.x, data.ids, data.weights).shape[0] // mesh.size


def on(mesh: Mesh, body: Callable[..., Any]) -> Callable[..., Any]:
    return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))


def peer_rate(mesh: Mesh) -> float | None:
    """Bytes per second of a large copy from one GPU to another, by ``ppermute`` around all of them."""
    if mesh.size == 1:
        return None
    around = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]
    x = jax.device_put(jnp.zeros((mesh.size << 8, 1 << 20), jnp.bfloat16), NamedSharding(mesh, P("d")))
    run = jax.jit(on(mesh, lambda x: lax.ppermute(x, "d", around)))
    return x.nbytes / mesh.size / timing.seconds(run, x)


def ragged(mesh: Mesh, data: Data) -> float:
    """Seconds of ``ragged_all_to_all`` on the same rows: T·R slots, as many sent as go."""
    r, shape, tokens = mesh.size, data.shape, data.tokens
    ids = np.asarray(data.ids).reshape(r, tokens, shape.top_k)
    counts = (ids[..., None] // (shape.num_experts // r) == np.arange(r)).any(2).sum(1).astype(np.int32)  # [from, to]
    before = np.cumsum(counts, 1, dtype=np.int32) - counts
    into = np.cumsum(counts, 0, dtype=np.int32) - counts
    cut = NamedSharding(mesh, P("d"))
    arrays = [jax.device_put(a, cut) for a in (before, counts, into, np.ascontiguousarray(counts.T))]
    rows = jnp.zeros((r * tokens * r, shape.hidden), jnp.bfloat16, device=cut)

    def body(rows: jax.Array, *sizes: jax.Array) -> jax.Array:
        return lax.ragged_all_to_all(rows, jnp.zeros_like(rows), *(s[0] for s in sizes), axis_name="d")

    return timing.seconds(jax.jit(on(mesh, body)), rows, *arrays)


HEADER = ["", "T", "dispatch us", "both us", "dispatch GB/s", "both GB/s", "there us", "back us", "there", "back"]
KERNELS = ("::dispatch_impl", "::combine_impl")
Row = tuple[Any, ...]


def measure(mesh: Mesh, data: Data, peer: float | None, name: str, transport: Dispatch, row_bytes: int) -> Row:
    """Times and rates of one transport."""
    tokens, hidden, experts = data.tokens, data.shape.hidden, data.shape.num_experts
    crossing = data.remote if mesh.size > 1 else data.sent
    rows = mesh.size * arriving(mesh, transport, data)
    y = jnp.zeros((rows, hidden), jnp.bfloat16, device=NamedSharding(mesh, P("d")))
    # Enough exchanges in one program that the host's share of a call vanishes.
    timed = functools.partial(timing.kernel_seconds, inner=32 if tokens <= 512 else 4)
    there, both = (
        timed(on(mesh, rooms(transport, experts, back=back)), data.x, data.ids, data.weights, y)
        for back in (False, True)
    )
    rates = crossing * row_bytes / there / 1e9, crossing * (row_bytes + 2 * hidden) / both / 1e9
    alone: list[float | None] = [None] * 4
    if isinstance(transport, DeepEP):
        run = timing.repeated(on(mesh, rooms(transport, experts, back=True)))
        kernels = trace(run, [jnp.copy(data.x) for _ in range(8)], data.ids, data.weights, y, calls=1).kernels
        # The first one also waits until the other ranks have begun.
        times = [statistics.median([k.seconds for k in kernels if each in k.name][1:]) for each in KERNELS]
        alone = [1e6 * t for t in times]
        sizes = crossing * row_bytes, crossing * 2 * hidden
        alone += [None] * 2 if peer is None else [n / t / peer for n, t in zip(sizes, times, strict=True)]
    return name, tokens, there * 1e6, both * 1e6, *rates, *alone


def kernels(mesh: Mesh, data: Data, peer: float | None, sms: list[int], graphs: bool) -> Iterator[Row]:
    """DeepEP's transports; every format with the most SMs, one with fewer."""
    h = data.shape.hidden
    for fmt, wire, width in ((BF16, "bf16", 2 * h), (FP8Block, "fp8", h + h // 32)):
        for count in sorted(sms, reverse=True):
            sizes = {"tokens": data.tokens, "hidden": h, "num_experts": data.shape.num_experts}
            sizes |= {"top_k": data.shape.top_k, "weights": fmt, "num_sms": count}
            with EpContext(mesh, "d", timeout_seconds=20, command_buffers=graphs, **sizes) as context:
                formats = {
                    "v2": DeepEP(context),
                    "v2 any order": DeepEP(context, deterministic=False),
                    "v2_psum any order": DeepEP(context, "v2_psum", deterministic=False),
                }
                for name, transport in formats.items():
                    if count == max(sms) or name == "v2 any order":
                        yield measure(mesh, data, peer, f"{name} {wire}, {count} SMs", transport, width)


def collectives(mesh: Mesh, data: Data, peer: float | None) -> Iterator[Row]:
    """The same tokens by XLA's collectives."""
    width = 2 * data.shape.hidden
    yield measure(mesh, data, peer, "all_to_all bf16", AllToAll("d"), width)
    if mesh.size > 1:
        seconds = ragged(mesh, data)
        rate = data.remote * width / seconds / 1e9
        yield "ragged_all_to_all bf16, rows only", data.tokens, seconds * 1e6, None, rate, *[None] * 5


def layer(mesh: Mesh, shape: Shape, tokens: int, fmt: WeightFormat, experts: int) -> list[tuple[Any, ...]]:
    """The layer with ``experts`` on each rank, against one GPU with as many tokens and its own experts only."""
    router = RouterConfig(num_experts=experts * mesh.size, top_k=shape.top_k)
    config = MoEConfig(hidden=shape.hidden, intermediate=shape.intermediate, router=router, weights=fmt)
    one = dataclasses.replace(config, router=dataclasses.replace(router, num_experts=experts))
    x = jax.random.normal(jax.random.key(2), (mesh.size * tokens, shape.hidden), jnp.bfloat16)
    alone = timing.seconds(
        jax.jit(functools.partial(moe, config=one, execution=Execution())), random_params(one), x[:tokens]
    )
    rows = [("one GPU, its own experts only", tokens, alone * 1e6, 1.0)]
    sharded = shard_params(random_params(config), config, LAYOUT, mesh)
    x = jax.device_put(x, NamedSharding(mesh, P("d")))
    sizes = {"tokens": tokens, "hidden": shape.hidden, "num_experts": router.num_experts, "top_k": shape.top_k}
    with EpContext(mesh, "d", timeout_seconds=20, weights=fmt, **sizes) as context:
        ways: dict[str, Dispatch] = {
            "deepep v2": DeepEP(context),
            "deepep v2_psum any order": DeepEP(context, "v2_psum", deterministic=False),
            "all_to_all": AllToAll("d"),
        }
        for name, transport in ways.items():
            run = functools.partial(moe_parallel, config=config, layout=LAYOUT, mesh=mesh, transport=transport)
            seconds = timing.seconds(jax.jit(run), sharded, x)
            rows.append((f"{mesh.size} GPUs, {name}", tokens, seconds * 1e6, alone / seconds))
    return rows


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=len(jax.devices()))
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096, 8192])
    parser.add_argument("--sms", type=int, nargs="+", default=[16, 24, 32, 64])
    parser.add_argument(
        "--command-buffers", action="store_true", help="let XLA record exchanges into its command buffers"
    )
    parser.add_argument("--layer", action="store_true", help="whole layers, too")
    parser.add_argument("--experts", type=int, default=32, help="of a layer, per rank")
    parser.add_argument("--model", choices=MODELS, default="deepseek-v3", help="whose width and routing")
    parser.add_argument("--skewed", action="store_true", help="a few experts get most tokens; layers are always even")
    options = parser.parse_args()
    shape = MODELS[options.model]
    mesh = Mesh(np.array(jax.devices()[: options.ranks]), "d")
    peer = peer_rate(mesh)
    print(timing.machine())
    print(f"{options.model}: {shape}, {'skewed' if options.skewed else 'even'} routing")
    if peer is None:
        print(f"one rank: nothing crosses a link; copy inside the GPU {timing.copy_rate() / 1e9:.0f} GB/s read + write")
    else:
        print(f"copy from GPU to GPU {peer / 1e9:.0f} GB/s one way")
    for what in (functools.partial(kernels, sms=options.sms, graphs=options.command_buffers), collectives):
        for tokens in options.tokens:
            rows = []
            for row in what(mesh, make(mesh, shape, tokens, options.skewed), peer):
                print(*row, file=sys.stderr, flush=True)  # the table follows when all is measured
                rows.append(row)
            print(timing.table(HEADER, rows), flush=True)
    if options.layer:
        for fmt in (BF16, FP8Block):
            for tokens in (options.tokens[0], options.tokens[-1]):
                rows = layer(mesh, shape, tokens, fmt, options.experts)
                print(timing.table([fmt.name, "T", "us", "of one GPU"], rows), flush=True)


if __name__ == "__main__":
    main()
