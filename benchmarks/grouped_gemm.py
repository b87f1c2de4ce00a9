"""Grouped GEMM: jaxmoe's kernels beside what a JAX or torch user would pick, on one GPU, in one run.

    python -m benchmarks.grouped_gemm [--quick] [--models deepseek-v3 ...] [--json FILE]

Per case: time of the kernel inside a jitted program, TFLOP/s (prefill) or GB/s of weights read (decode), and the ratio
of each peer's time to ours in the same run. Then: bits and time against the torch package, host time per call.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers
from jaxmoe.bench import timing
from jaxmoe.bench.trace import device_seconds
from jaxmoe.cuda import cubin_cache, target
from jaxmoe.ops.grouped_gemm import grouped_gemm
from jaxmoe.ops.grouped_gemm.deepgemm import gemm_call
from jaxmoe.ops.quantize import quantize
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.ops.shapes import MODELS, Spread, group_sizes
from jaxmoe.quant import quantize_weight
from jaxmoe.quant.formats import BF16, FP8Block, WeightFormat
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows

ALIGNMENT = 128
GEMMS = ("gate_up", "down")
TOKENS = {"prefill": 4096, "decode": 128}
RANKS = {"deepseek-v3": 8, "deepseek-v4-like": 8}  # expert-parallel ranks; the rest on one GPU


@dataclasses.dataclass(frozen=True)
class Case:
    """One GEMM of one layer."""

    model: str
    gemm: str
    phase: str
    spread: Spread

    @property
    def sizes(self) -> tuple[int, int, int]:
        """El, N, K."""
        shape = MODELS[self.model]
        e = shape.num_experts // RANKS.get(self.model, 1)
        return (
            (e, 2 * shape.intermediate, shape.hidden)
            if self.gemm == "gate_up"
            else (e, shape.hidden, shape.intermediate)
        )

    @property
    def masked(self) -> bool:
        """Decode with even routing runs masked, everything else psum."""
        return self.phase == "decode" and self.spread == "even"

    @property
    def counts(self) -> np.ndarray:
        """Rows per expert: each rank sends and gets as many rows on average."""
        return group_sizes(self.spread, self.sizes[0], TOKENS[self.phase] * MODELS[self.model].top_k)


def grouping(counts: np.ndarray, layout: str) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Row shape of the buffer, what the layout's ``group`` is, and where each row of the tight buffer goes."""
    if layout == "masked":
        capacity = -(-int(counts.max()) // ALIGNMENT) * ALIGNMENT
        starts = np.arange(len(counts)) * capacity
        shape, group = (len(counts), capacity), counts
    else:
        padded = -(-counts // ALIGNMENT) * ALIGNMENT
        starts = np.cumsum(padded) - padded
        shape, group = (int(padded.sum()),), starts + counts
        if layout == "contiguous":
            group = np.full(shape[0], -1)
            for e, (start, count) in enumerate(zip(starts, counts, strict=True)):
                group[start : start + count] = e
    places = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    return shape, group.astype(np.int32), places.astype(np.int32)


def make_rows(tight: jax.Array, counts: np.ndarray, layout: str, fmt: WeightFormat) -> GroupedRows:
    """The tight bf16 rows in the given layout, quantised as the format takes them."""
    shape, group, places = grouping(counts, layout)
    total = int(np.prod(shape))
    rows = jnp.zeros((total, tight.shape[1]), tight.dtype).at[places].set(tight).reshape(*shape, -1)
    if fmt.activation is not None:
        rows = _quantize_rows(rows, fmt.activation)
    return GroupedRows(rows, jnp.asarray(group), layout, ALIGNMENT)  # pyright: ignore[reportArgumentType]


@functools.cache
def ours(expected_m: int, pdl: bool = False) -> Callable[[GroupedRows, GroupedWeight], jax.Array]:
    """The kernel, jitted."""
    options = {"expected_m": expected_m, "pdl": pdl, "backend": "deepgemm"}
    return jax.jit(lambda rows, weight: grouped_gemm(rows, weight, **options))


def rate(case: Case, weight: GroupedWeight, seconds: float) -> str:
    """What bounds the phase: arithmetic in prefill, reading the experts that have rows in decode."""
    e, n, k = case.sizes
    if case.phase == "prefill":
        return f"{2 * int(case.counts.sum()) * n * k / seconds / 1e12:.0f} TFLOP/s"
    return f"{weight.nbytes / e * int((case.counts > 0).sum()) / seconds / 1e9:.0f} GB/s"


def compile_kernels(cases: list[Case], against: list[Case]) -> None:
    """Compiles every kernel the cases need, side by side, before anything is timed."""
    found = set()
    wanted = [(case, "masked" if case.masked else "psum") for case in cases]
    wanted += [(case, "contiguous" if case.phase == "prefill" else "masked") for case in against]
    for case, layout in wanted:
        e, n, k = case.sizes
        shape, _, _ = grouping(case.counts, layout)
        for fmt in (BF16, FP8Block):
            call = gemm_call(fmt, layout, target.current(), alignment=ALIGNMENT, expected_m=expected(case))  # pyright: ignore[reportArgumentType]
            k = -(-k // fmt.k_multiple) * fmt.k_multiple
            a, b = jax.ShapeDtypeStruct((*shape, k), jnp.uint8), jax.ShapeDtypeStruct((e, n, k), jnp.uint8)
            planned = call.plan((a, None, b) if call.scaled else (a, b))
            found |= {source for source, _ in planned}
    cubin_cache.ensure(list(found), progress=sys.stderr.isatty())


def attempt(peer: Callable[..., float], *args: Any) -> float | None:
    """A peer's time, or None after saying once why there is none."""
    try:
        return peer(*args)
    except Exception as error:
        print(f"  {peer.__name__}: {type(error).__name__}: {str(error).splitlines()[0][:120]}", file=sys.stderr)
        return None


def expected(case: Case) -> int:
    """Rows per expert that the tile is chosen for."""
    return max(1, -(-int(case.counts.sum()) // case.sizes[0]))


def run_cases(cases: list[Case], deadline: float) -> list[dict[str, Any]]:
    """Ours in bf16 and fp8 against the JAX peers; a layer's weights are made once for its cases."""
    results = []
    weights: dict[Any, dict[WeightFormat, GroupedWeight]] = {}
    for case in cases:
        if time.monotonic() > deadline:
            print(f"out of time: {len(cases) - len(results)} of {len(cases)} cases were not run, from {case} on")
            break
        e, n, k = case.sizes
        if case.sizes not in weights:
            weights.clear()
            weights[case.sizes] = make_weights(e, n, k)
        tight = jax.random.normal(jax.random.key(0), (int(case.counts.sum()), k), jnp.bfloat16)
        layout = "masked" if case.masked else "psum"
        row = dataclasses.asdict(case) | {"layout": layout}
        for fmt, weight in weights[case.sizes].items():
            rows = make_rows(tight, case.counts, layout, fmt)
            row[fmt.name] = timing.kernel_seconds(ours(expected(case)), rows, weight)
            row[f"{fmt.name} rate"] = rate(case, weight, row[fmt.name])
        sizes = jnp.asarray(case.counts)
        for peer in (peers.ragged_dot, peers.mosaic, peers.tokamax):
            row[peer.__name__] = attempt(peer, tight, weights[case.sizes][BF16].values, sizes)
        results.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return results


def against_torch(cases: list[Case]) -> list[dict[str, Any]]:
    """Bits and time against the torch package, contiguous for prefill and masked for decode."""
    peer = peers.TorchDeepGEMM()
    results = []
    for case in cases:
        e, n, k = case.sizes
        layout = "contiguous" if case.phase == "prefill" else "masked"
        tight = jax.random.normal(jax.random.key(0), (int(case.counts.sum()), k), jnp.bfloat16)
        for fmt, weight in make_weights(e, n, k).items():
            rows = make_rows(tight, case.counts, layout, fmt)
            scales = rows.rows.scales if isinstance(rows.rows, QuantizedRows) else None
            run = ours(expected(case))
            mine = np.asarray(jax.lax.bitcast_convert_type(run(rows, weight), jnp.int16))
            call, out = peer.grouped(
                layout, rows.values, scales, weight.values, weight.scales, rows.group, expected(case)
            )
            call()
            count = case.counts[:, None]
            valid = np.arange(mine.shape[1]) < count if layout == "masked" else np.asarray(rows.group) >= 0
            same = bool(np.array_equal(mine[valid], peer.bytes_of(out)[valid]))
            # In turns, so that a drift of the clock meets both.
            pairs = [
                (timing.kernel_seconds(run, rows, weight, repeats=1), peer.seconds(call, repeats=1)) for _ in range(7)
            ]
            mine_s, torch_s = (float(np.median(column)) for column in zip(*pairs, strict=True))
            row = {"layout": layout, "format": fmt.name, "bit-equal": same, "ours": mine_s, "torch": torch_s}
            results.append(dataclasses.asdict(case) | row)
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return results


def make_weights(e: int, n: int, k: int) -> dict[WeightFormat, GroupedWeight]:
    """Random weights in both formats."""
    dense = jax.random.normal(jax.random.key(1), (e, n, k), jnp.bfloat16)
    return {BF16: GroupedWeight(dense, None, BF16, k), FP8Block: _quantize_weight(dense, FP8Block)}


_quantize_weight = jax.jit(quantize_weight, static_argnums=1)
_quantize_rows = jax.jit(quantize, static_argnums=1)


def decode_bar() -> dict[str, Any]:
    """E32, 8 rows each, N 4096, K 7168, masked fp8: how fast the weights are read in a chain of calls, without and with
    PDL, and by the profiler, between whose first and last instant no other call starts or ends.
    """
    e, n, k, counts = 32, 4096, 7168, np.full(32, 8, np.int32)
    weight = make_weights(e, n, k)[FP8Block]
    tight = jax.random.normal(jax.random.key(0), (int(counts.sum()), k), jnp.bfloat16)
    rows = make_rows(tight, counts, "masked", FP8Block)
    chain = functools.partial(timing.kernel_seconds, inner=16, repeats=9)
    figures = {}
    for name, pdl, measure in (
        ("in a chain", False, chain),
        ("in a chain with PDL", True, chain),
        ("alone", False, device_seconds),
    ):
        seconds = measure(ours(8, pdl), rows, weight)
        figures[name] = {"us": seconds * 1e6, "GB/s": weight.nbytes / seconds / 1e9}
    return figures


def host_microseconds() -> dict[str, float]:
    """Time of one call in a long chain of tiny ones inside one program, where the host is what bounds it."""
    x = jax.random.normal(jax.random.key(0), (128, 256), jnp.bfloat16)
    weight = GroupedWeight(jax.random.normal(jax.random.key(1), (1, 256, 256), jnp.bfloat16), None, BF16, 256)
    group = jnp.array([128], jnp.int32)

    def chain(length: int) -> Callable[..., jax.Array]:
        def run(x: jax.Array, weight: GroupedWeight, group: jax.Array) -> jax.Array:
            for _ in range(length):
                x = grouped_gemm(GroupedRows(x, group, "psum", 128), weight, backend="deepgemm")
            return x

        return jax.jit(run)

    short, long = (timing.seconds(chain(length), x, weight, group) for length in (16, 272))
    return {"us per call": (long - short) / 256 * 1e6}


def main() -> None:
    """Runs everything and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gemms", nargs="+", choices=GEMMS, default=list(GEMMS))
    parser.add_argument("--quick", action="store_true", help="even routing only")
    parser.add_argument("--no-torch", action="store_true", help="leave the torch package out")
    parser.add_argument("--seconds", type=float, default=3600, help="start no further case after this long")
    parser.add_argument("--json", help="write every figure to this file")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    spreads: tuple[Spread, ...] = ("even",) if options.quick else ("even", "skewed")
    cases = [Case(m, g, p, s) for g in options.gemms for m in options.models for p in TOKENS for s in spreads]
    against = [Case("deepseek-v3", g, p, "skewed" if p == "prefill" else "even") for g in GEMMS for p in TOKENS]
    figures: dict[str, Any] = {"machine": timing.machine()}
    print(figures["machine"])
    compile_kernels(cases, [] if options.no_torch else against)
    figures |= {
        "copy": timing.copy_rate(),
        "matmul": timing.matmul_rate(),
        "host": host_microseconds(),
        "decode": decode_bar(),
    }
    print(f"ceilings: copy {figures['copy'] / 1e9:.0f} GB/s, XLA bf16 matmul {figures['matmul'] / 1e12:.0f} TFLOP/s")
    print(f"host: {figures['host']['us per call']:.2f} µs per call in a chain inside jit")
    for name, decode in figures["decode"].items():
        rate = f"{decode['us']:.1f} µs, weights {decode['GB/s']:.0f} GB/s"
        print(f"masked fp8 decode, E32, 8 rows each, N4096, K7168, {name}: {rate}")
    if not options.no_torch:
        figures["torch"] = against_torch(against)
        print(torch_table(figures["torch"]))
    figures["cases"] = run_cases(cases, deadline)
    print(peer_table(figures["cases"]))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


def torch_table(rows: list[dict[str, Any]]) -> str:
    """Ours beside the torch package's."""
    header = ("case", "format", "layout", "bit-equal", "ours µs", "torch µs", "torch / ours")
    cells = [
        (label(r), r["format"], r["layout"], r["bit-equal"], r["ours"] * 1e6, r["torch"] * 1e6, r["torch"] / r["ours"])
        for r in rows
    ]
    return "\nagainst the torch package sgl-deep-gemm, same buffers\n" + timing.table(header, cells)


def peer_table(rows: list[dict[str, Any]]) -> str:
    """Ours, and how many times as long each JAX peer takes in bf16."""
    names = ("ragged_dot", "mosaic", "tokamax")
    header = ("case", "layout", "bf16 µs", "bf16 rate", "fp8 µs", "fp8 rate", *(f"{name} / bf16" for name in names))
    cells = []
    for r in rows:
        ours = [value for f in ("BF16", "FP8Block") for value in (r[f] * 1e6, r[f"{f} rate"])]
        cells.append(
            (label(r), r["layout"], *ours, *(None if r[name] is None else r[name] / r["BF16"] for name in names))
        )
    return "\nours, and each JAX peer's bf16 time over ours\n" + timing.table(header, cells)


def label(row: dict[str, Any]) -> str:
    """A case in a few words."""
    return f"{row['model']} {row['gemm']} {row['phase']} {row['spread']}"


if __name__ == "__main__":
    main()
