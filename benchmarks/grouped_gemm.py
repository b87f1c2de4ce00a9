"""Grouped GEMM: jaxmoe's kernels beside what a JAX or torch user would pick, on one GPU, in one run.

    python -m benchmarks.grouped_gemm [--quick] [--models deepseek-v3 ...] [--json FILE]

Per case: time of the kernel inside a jitted program, TFLOP/s (prefill) or GB/s of weights read (decode), and the ratio
of each peer's time to ours in the same run. Then: bits and time against the torch package, host time per call.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common, peers
from jaxmoe.ops.grouped_gemm import grouped_gemm
from jaxmoe.ops.quantize import quantize
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.ops.shapes import MODELS, Spread, group_sizes
from jaxmoe.quant import quantize_weight
from jaxmoe.quant.formats import BF16, FP8Block, WeightFormat
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows

ALIGNMENT = 128
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
        rows = jax.jit(quantize, static_argnums=1)(rows, fmt.activation)
    return GroupedRows(rows, jnp.asarray(group), layout, ALIGNMENT)  # pyright: ignore[reportArgumentType]


def ours(rows: GroupedRows, weight: GroupedWeight, expected_m: int) -> Callable[..., jax.Array]:
    """The GEMM as a function of its first operand, so that runs can be chained."""

    def run(first: Any, rest: Any, weight: GroupedWeight) -> jax.Array:
        data = QuantizedRows(first, rest[0], rows.rows.quant) if isinstance(rows.rows, QuantizedRows) else first
        grouped = GroupedRows(data, rest[1], rows.layout, rows.alignment)
        return grouped_gemm(grouped, weight, expected_m=expected_m, backend="deepgemm")

    return run


def operands(rows: GroupedRows, weight: GroupedWeight) -> tuple[Any, ...]:
    """What :func:`ours` takes."""
    scales = rows.rows.scales if isinstance(rows.rows, QuantizedRows) else None
    return rows.values, (scales, rows.group), weight


def rate(case: Case, weight: GroupedWeight, seconds: float) -> str:
    """What bounds the phase: arithmetic in prefill, reading the experts that have rows in decode."""
    e, n, k = case.sizes
    if case.phase == "prefill":
        return f"{2 * int(case.counts.sum()) * n * k / seconds / 1e12:.0f} TFLOP/s"
    return f"{weight.nbytes / e * int((case.counts > 0).sum()) / seconds / 1e9:.0f} GB/s"


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


def run_cases(cases: list[Case]) -> list[dict[str, Any]]:
    """Ours in bf16 and fp8 against the JAX peers; a layer's weights are made once for its cases."""
    results = []
    weights: dict[Any, tuple[GroupedWeight, GroupedWeight]] = {}
    for case in cases:
        e, n, k = case.sizes
        if case.sizes not in weights:
            weights.clear()
            dense = jax.random.normal(jax.random.key(1), (e, n, k), jnp.bfloat16)
            weights[case.sizes] = (
                GroupedWeight(dense, None, BF16, k),
                jax.jit(quantize_weight, static_argnums=1)(dense, FP8Block),
            )
        tight = jax.random.normal(jax.random.key(0), (int(case.counts.sum()), k), jnp.bfloat16)
        layout = "masked" if case.phase == "decode" and case.spread == "even" else "psum"
        row = dataclasses.asdict(case) | {"layout": layout}
        for fmt, weight in zip((BF16, FP8Block), weights[case.sizes], strict=True):
            rows = make_rows(tight, case.counts, layout, fmt)
            row[fmt.name] = common.kernel_seconds(ours(rows, weight, expected(case)), *operands(rows, weight), inner=8)
            row[f"{fmt.name} rate"] = rate(case, weight, row[fmt.name])
        sizes = jnp.asarray(case.counts)
        for peer in (peers.ragged_dot, peers.mosaic, peers.tokamax):
            row[peer.__name__] = attempt(peer, tight, weights[case.sizes][0].values, sizes)
        results.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return results


def against_torch(cases: list[Case]) -> list[dict[str, Any]]:
    """Bits and time against the torch package, contiguous for prefill and masked for decode."""
    torch_gemm = peers.TorchDeepGEMM()
    results = []
    for case in cases:
        e, n, k = case.sizes
        layout = "contiguous" if case.phase == "prefill" else "masked"
        dense = jax.random.normal(jax.random.key(1), (e, n, k), jnp.bfloat16)
        tight = jax.random.normal(jax.random.key(0), (int(case.counts.sum()), k), jnp.bfloat16)
        for fmt in (BF16, FP8Block):
            weight = (
                GroupedWeight(dense, None, BF16, k)
                if fmt is BF16
                else jax.jit(quantize_weight, static_argnums=1)(dense, fmt)
            )
            rows = make_rows(tight, case.counts, layout, fmt)
            args = operands(rows, weight)
            run = ours(rows, weight, expected(case))
            mine = np.asarray(jax.lax.bitcast_convert_type(jax.jit(run)(*args), jnp.int16))
            call, out = torch_gemm.grouped(
                layout, args[0], args[1][0], weight.values, weight.scales, rows.group, expected(case)
            )
            call()
            valid = (
                np.arange(mine.shape[1]) < case.counts[:, None] if layout == "masked" else np.asarray(rows.group) >= 0
            )
            same = bool(np.array_equal(mine[valid], torch_gemm.bytes_of(out)[valid]))
            chained = common.chained(run, 16)
            pairs = [
                (common.seconds(chained, *args, repeats=1) / 16, torch_gemm.seconds(call, repeats=1)) for _ in range(7)
            ]
            seconds, theirs = (float(np.median(column)) for column in zip(*pairs, strict=True))
            row = dataclasses.asdict(case) | {
                "layout": layout,
                "format": fmt.name,
                "bit-equal": same,
                "ours": seconds,
                "torch": theirs,
            }
            results.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return results


def decode_bar() -> dict[str, Any]:
    """E32, 8 rows each, N 4096, K 7168, masked fp8: how fast the weights are read."""
    e, n, k, counts = 32, 4096, 7168, np.full(32, 8, np.int32)
    weight = jax.jit(quantize_weight, static_argnums=1)(
        jax.random.normal(jax.random.key(1), (e, n, k), jnp.bfloat16), FP8Block
    )
    rows = make_rows(
        jax.random.normal(jax.random.key(0), (int(counts.sum()), k), jnp.bfloat16), counts, "masked", FP8Block
    )
    seconds = common.kernel_seconds(ours(rows, weight, 8), *operands(rows, weight), inner=32)
    return {"us": seconds * 1e6, "GB/s": weight.nbytes / seconds / 1e9}


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

    short, long = (common.seconds(chain(length), x, weight, group) for length in (16, 272))
    return {"us per call": (long - short) / 256 * 1e6}


def main() -> None:
    """Runs everything and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="even routing only")
    parser.add_argument("--no-torch", action="store_true", help="leave the torch package out")
    parser.add_argument("--json", help="write every figure to this file")
    options = parser.parse_args()
    print(common.machine())
    copy, matmul = common.copy_rate(), common.matmul_rate()
    print(f"ceilings measured here: copy {copy / 1e9:.0f} GB/s, XLA bf16 matmul {matmul / 1e12:.0f} TFLOP/s")
    figures: dict[str, Any] = {"machine": common.machine(), "copy": copy, "matmul": matmul}
    host, bar = host_microseconds(), decode_bar()
    print(f"host: {host['us per call']:.2f} µs per call in a chain inside jit")
    print(f"masked fp8 decode, E32, 8 rows each, N4096, K7168: {bar['us']:.1f} µs, weights at {bar['GB/s']:.0f} GB/s")
    figures |= {"host": host, "decode": bar}
    if not options.no_torch:
        some = [m for m in ("deepseek-v3", "qwen3-30b-a3b") if m in options.models]
        cases = [
            Case(m, g, p, "skewed" if p == "prefill" else "even")
            for m in some
            for g in ("gate_up", "down")
            for p in TOKENS
        ]
        rows = figures["torch"] = against_torch(cases)
        header = ("case", "format", "layout", "bit-equal", "ours µs", "torch µs", "torch / ours")
        print(
            "\nagainst the torch package sgl-deep-gemm, same buffers\n"
            + common.table(
                header,
                [
                    (
                        f"{r['model']} {r['gemm']} {r['phase']}",
                        r["format"],
                        r["layout"],
                        r["bit-equal"],
                        r["ours"] * 1e6,
                        r["torch"] * 1e6,
                        r["torch"] / r["ours"],
                    )
                    for r in rows
                ],
            )
        )
    spreads: tuple[Spread, ...] = ("even",) if options.quick else ("even", "skewed")
    cases = [Case(m, g, p, s) for m in options.models for g in ("gate_up", "down") for p in TOKENS for s in spreads]
    rows = figures["cases"] = run_cases(cases)
    names = ("ragged_dot", "mosaic", "tokamax")
    header = ("case", "layout", "bf16 µs", "bf16 rate", "fp8 µs", "fp8 rate", *(f"{name} / bf16" for name in names))
    print(
        "\nours, and each JAX peer's bf16 time over ours\n"
        + common.table(
            header,
            [
                (
                    f"{r['model']} {r['gemm']} {r['phase']} {r['spread']}",
                    r["layout"],
                    r["BF16"] * 1e6,
                    r["BF16 rate"],
                    r["FP8Block"] * 1e6,
                    r["FP8Block rate"],
                    *(None if r[name] is None else r[name] / r["BF16"] for name in names),
                )
                for r in rows
            ],
        )
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
