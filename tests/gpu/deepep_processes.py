"""One of several processes of an expert-parallel layer: ``deepep_processes.py PORT RANK COUNT MODE``.

Each takes one GPU; processes share GPUs where there are fewer. MODE ``layer``: says "equal" if the layer gives what one
device gives, in every format. MODE ``absent``: the last rank never calls; the others say what their error says.
"""

from __future__ import annotations

import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.config import MoEConfig, RouterConfig
from jaxmoe.dispatch.deepep import DeepEP, EpContext
from jaxmoe.errors import EpFailure
from jaxmoe.layer.build import make_params
from jaxmoe.layer.params import MoEParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.parallel import ParallelLayout, moe_parallel
from jaxmoe.parallel.params import param_specs
from jaxmoe.quant.formats import BF16, FP8Block, WeightFormat
from jaxmoe.testing import calc_diff

START = time.time()
E, K, H, INTER, T = 16, 4, 512, 256, 48
LAYOUT = ParallelLayout(tokens=PartitionSpec("d"), experts="d")


def layer(fmt: WeightFormat) -> tuple[MoEConfig, MoEParams, np.ndarray]:
    """The same on every process."""
    rng = np.random.default_rng(3)
    shapes = {"gate": (E, INTER, H), "up": (E, INTER, H), "down": (E, H, INTER), "router_kernel": (H, E)}
    arrays = {n: (rng.normal(size=s) / np.sqrt(s[-1])).astype(np.float32) for n, s in shapes.items()}
    config = MoEConfig(
        hidden=H, intermediate=INTER, router=RouterConfig(num_experts=E, top_k=K), weights=fmt, partial_blocks=True
    )
    params = make_params(config, **{n: jnp.asarray(a) for n, a in arrays.items()})
    if fmt is BF16:
        params = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim == 3 else a, params)
    return config, params, rng.normal(size=(T, H)).astype(jnp.bfloat16)


def spread(tree: object, specs: object, mesh: Mesh) -> object:
    """Host arrays onto the mesh without asking the other processes whether theirs are equal."""

    def put(spec: PartitionSpec, part: object) -> object:
        where = NamedSharding(mesh, spec)
        return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, where, np.asarray(a).__getitem__), part)

    return jax.tree.map(put, specs, tree)


def say(*words: object) -> None:
    print(f"{time.time() - START:6.1f} s", *words, flush=True)


def run_layers(mesh: Mesh, count: int) -> int:
    done = 0
    for fmt, formats in ((BF16, ("v2",)), (FP8Block, ("v2_psum", "ll"))):
        config, params, x = layer(fmt)
        want = np.float32(jax.jit(lambda p, x, c=config: moe(p, x, c))(params, jnp.asarray(x)))
        say(fmt, "on one device")
        on_mesh = spread(params, param_specs(config, LAYOUT), mesh)
        tokens = spread(x, LAYOUT.tokens, mesh)
        sizes = {"tokens": T // count, "hidden": H, "num_experts": E, "top_k": K, "num_sms": 16}
        with EpContext(mesh, "d", weights=fmt, timeout_seconds=30, **sizes) as context:
            say(context)
            for format in formats:
                # Gathering ids takes XLA's collectives, which want a GPU per process.
                transport = DeepEP(context, format, deterministic=format == "v2")
                for i in range(3):
                    y = moe_parallel(on_mesh, tokens, config, LAYOUT, mesh, transport=transport)
                    jax.block_until_ready(y)
                    say(format, "call", i)
                for shard in y.addressable_shards:
                    worst = calc_diff(np.float32(shard.data), want[shard.index])
                    assert worst < 1e-4, (fmt, format, worst)
                    done += 1
    return done


def wait_for_absent(mesh: Mesh, rank: int, count: int) -> None:
    config, params, x = layer(BF16)
    on_mesh, tokens = spread(params, param_specs(config, LAYOUT), mesh), spread(x, LAYOUT.tokens, mesh)
    sizes = {"tokens": T // count, "hidden": H, "num_experts": E, "top_k": K, "num_sms": 16}
    context = EpContext(mesh, "d", timeout_seconds=3, **sizes)
    if rank == count - 1:
        time.sleep(30)
        return
    start = time.time()
    try:
        with context:
            y = moe_parallel(on_mesh, tokens, config, LAYOUT, mesh, transport=DeepEP(context))
            jax.block_until_ready(y)
        say("no error")
    except EpFailure as failure:
        say(f"failed after {time.time() - start:.0f} s: {failure}")


def main(port: str, rank: int, count: int, mode: str) -> None:
    visible = int(os.environ["JAXMOE_TEST_GPUS"])
    jax.distributed.initialize(
        f"127.0.0.1:{port}", count, rank, local_device_ids=[rank % visible], initialization_timeout=60
    )
    mesh = Mesh(np.array(jax.devices()), "d")
    say("process", rank, "of", count, mesh.devices.tolist())
    assert mesh.size == count, mesh
    if mode == "absent":
        wait_for_absent(mesh, rank, count)
        os._exit(0)  # the CUDA context is lost: nothing can be shut down in order
    say("equal", run_layers(mesh, count))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
