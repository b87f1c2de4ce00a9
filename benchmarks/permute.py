"""Rows into expert order and back, beside XLA's fusions of the reference and the copy rate, on one GPU, in one run.

    python -m benchmarks.permute [--tiles | --ways | --kernels]

Bytes are those that must move: permute reads every token that has a choice once and writes every real row once;
unpermute reads every real row once and writes every token once. Padding rows do not count, but for scales that are
moved alone: theirs are written, as 1, and the token of every row is read. Times are the profiler's, of the device.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.bench import timing
from jaxmoe.bench.trace import device_seconds
from jaxmoe.cuda import target
from jaxmoe.ops.permute import Grouping, group_tokens, permute, unpermute
from jaxmoe.ops.permute.cuda import Tiles, choose_tiles, copy_quantized_kernel, copy_scales_kernel
from jaxmoe.ops.permute.pallas import STAGE, copy_kernel, sum_kernel
from jaxmoe.ops.permute.reference import take_scales
from jaxmoe.ops.quantize import quantize
from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.tensors import QuantizedRows

F32 = ActivationQuant(128, "float32")
HEADER = ["op", "us", "GB/s", "of copy", "XLA us", "XLA / ours"]
Row = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """N tokens of W columns with K choices among ``routed`` experts, of which the first ``held`` are here."""

    n: int
    w: int
    k: int = 8
    routed: int = 256
    held: int = 256

    def __str__(self) -> str:
        here = "" if self.held == self.routed else f", {self.held} of {self.routed} experts"
        return f"{self.n}x{self.w} top-{self.k}{here}"

    def ids(self) -> jax.Array:
        """Distinct experts per token, -1 for those held elsewhere."""
        scores = jax.random.uniform(jax.random.key(1), (self.n, self.routed))
        ids = jax.lax.top_k(scores, self.k)[1].astype(jnp.int32)
        return jnp.where(ids < self.held, ids, -1)

    def grouping(self) -> Grouping:
        """Of the psum layout, as DeepGEMM takes it."""
        return jax.jit(lambda ids: group_tokens(ids, self.held, alignment=128))(self.ids())

    def rows(self) -> tuple[int, int]:
        """Tokens that have a choice, and choices."""
        wanted = self.ids() >= 0
        return int(wanted.any(1).sum()), int(wanted.sum())


CASES = [
    Case(8192, 7168),
    Case(8192, 7168, held=32),
    Case(8192, 2048, routed=128, held=128),
    Case(4096, 2880, k=4, routed=32, held=32),
    Case(1024, 7168),
    Case(128, 7168),
    Case(16, 7168),
    Case(1, 7168),
]


def random(n: int, w: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Normal numbers."""
    return jax.random.normal(jax.random.key(0), (n, w), dtype)


def moved_by_row(x: QuantizedRows) -> int:
    """Bytes of a row and its scales."""
    return x.values.shape[1] + 4 * x.scales.shape[0]


def line(what: str, nbytes: float, seconds: float, peer: float | None) -> Row:
    """One row of a table."""
    rate = nbytes / seconds
    ours = (what, seconds * 1e6, rate / 1e9, rate / timing.copy_rate())
    return (*ours, peer * 1e6, peer / seconds) if peer else ours


def permute_row(case: Case, quant: ActivationQuant | None, backend: str) -> Row:
    """Tokens into the psum buffer."""
    g, (tokens, real) = case.grouping(), case.rows()
    x: Any = random(case.n, case.w)
    row = 2 * case.w
    if quant is not None:
        x = jax.jit(lambda x: quantize(x, quant))(x)
        row = moved_by_row(x)
    ours, xla = (lambda x, g, b=b: permute(x, g, backend=b).rows for b in (backend, "reference"))
    times = [device_seconds(f, x, g) for f in (ours, xla)]
    what = f"permute {'bf16' if quant is None else 'e4m3'} {case}"
    return line(what, (tokens + real) * row, *times)


def unpermute_row(case: Case, out_dtype: Any, backend: str) -> Row:
    """Rows back to their tokens, weighted."""
    g, (_, real) = case.grouping(), case.rows()
    rows, weights = random(g.source.shape[0], case.w), random(case.n, case.k, jnp.float32)
    ours, xla = (
        lambda rows, slots, weights, b=b: unpermute(rows, slots, weights, out_dtype=out_dtype, backend=b)
        for b in (backend, "reference")
    )
    times = [device_seconds(f, rows, g.slots, weights) for f in (ours, xla)]
    nbytes = real * case.w * 2 + case.n * case.w * jnp.dtype(out_dtype).itemsize
    return line(f"unpermute {jnp.dtype(out_dtype)} {case}", nbytes, *times)


def group_row(case: Case, backend: str) -> Row:
    """Places from ids; time alone counts."""
    ours, xla = (
        lambda ids, b=b: group_tokens(ids, case.held, alignment=128, backend=b) for b in (backend, "reference")
    )
    seconds, peer = (device_seconds(f, case.ids()) for f in (ours, xla))
    return f"group {case}", seconds * 1e6, peer * 1e6, peer / seconds


def scales_row(case: Case) -> Row:
    """Scales of e4m3 rows alone."""
    g, (tokens, _) = case.grouping(), case.rows()
    q = jax.jit(lambda x: quantize(x, F32))(random(case.n, case.w))
    words, t = q.scales.shape[0], choose_tiles(q.values.shape, q.scales.shape, g.slots.shape[1], g.row_shape)
    move = copy_scales_kernel(target.current().name, g.row_shape, F32, t)
    ours = lambda scales, g: move(scales, g.source)  # noqa: E731
    xla = lambda scales, g: take_scales(scales, F32, g.source, g.row_shape)  # noqa: E731
    times = [device_seconds(f, q.scales, g) for f in (ours, xla)]
    return line(f"scales {case}", 4 * (words * tokens + (words + 1) * g.source.size), *times)


def ways(tokens: int, w: int = 7168) -> Row:
    """µs of e4m3 rows with scales: one launch; values by Pallas, scales by a launch or XLA. The best, of copy rate."""
    case, arch = Case(tokens, w), target.current().name
    g, (tokens, real) = case.grouping(), case.rows()
    q = jax.jit(lambda x: quantize(x, F32))(random(case.n, w))
    t = choose_tiles(q.values.shape, q.scales.shape, g.slots.shape[1], g.row_shape)
    move, scales = (make(arch, g.row_shape, F32, t) for make in (copy_quantized_kernel, copy_scales_kernel))

    def two(scales_by: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, g: (copy_kernel(q.values, g.slots, g.source, STAGE), scales_by(q.scales, g))

    runs = (
        lambda q, g: move(q.values, q.scales, g.slots, g.source),
        two(lambda s, g: scales(s, g.source)),
        two(lambda s, g: take_scales(s, F32, g.source, g.row_shape)),
    )
    times = [device_seconds(f, q, g) for f in runs]
    rate = (tokens + real) * moved_by_row(q) / min(times) / timing.copy_rate()
    return (str(case), *(1e6 * seconds for seconds in times), rate)


def quantised_tiles(q: QuantizedRows, g: Grouping) -> list[Tiles]:
    """The chosen tiles, and those with one thing changed."""
    best = choose_tiles(q.values.shape, q.scales.shape, g.slots.shape[1], g.row_shape)
    changes: list[dict[str, Any]] = [{"staged": n} for n in (1, 2, 4, 8)]
    changes += [{"words": n} for n in (1, 2, 4)]
    changes += [{"quads": n} for n in (256, best.quads // 2 // 256 * 256, 2 * best.quads) if n]
    changes += [{"shared": False}, {"through": not best.through}]
    return list(dict.fromkeys([best, *(dataclasses.replace(best, **change) for change in changes)]))


def tiles(case: Case) -> list[Row]:
    """What blocks of the kernels take at once."""
    g, (tokens, real) = case.grouping(), case.rows()
    x, arch = random(case.n, case.w), target.current().name
    q = jax.jit(lambda x: quantize(x, F32))(x)
    runs: list[tuple[str, Callable[..., Any], Any, float]] = []
    nbytes = (tokens + real) * case.w * 2
    filled = lambda x, g: jnp.full((real, case.w), x[0, 0])  # noqa: E731
    runs.append(("writing alone", filled, x, real * case.w * 2))
    for stage in (7168, 14336, 28672, 57344):
        push = lambda x, g, stage=stage: copy_kernel(x, g.slots, g.source, stage)  # noqa: E731
        runs.append((f"rows of {stage} bytes a block", push, x, nbytes))
    for t in quantised_tiles(q, g):
        push = copy_quantized_kernel(arch, g.row_shape, F32, t)
        quantised = lambda q, g, push=push: push(q.values, q.scales, g.slots, g.source)  # noqa: E731
        what = f"{t.staged} tokens, {t.words} words of {4 * t.quads} rows a block"
        what += "" if t.shared else ", not shared"
        what += ", through L2" if t.through else ""
        runs.append((f"quantised rows, {what}", quantised, q, (tokens + real) * moved_by_row(q)))
    rows, weights = random(g.source.shape[0], case.w), random(case.n, case.k, jnp.float32)
    for columns in (256, 512, 1024):
        options = {"scale": 1.0, "out_dtype": jnp.dtype(jnp.bfloat16), "columns": columns}
        back = lambda r, g, options=options: sum_kernel(r, g.slots, weights, None, **options)  # noqa: E731
        runs.append((f"sum, {columns} columns", back, rows, (real + case.n) * case.w * 2))
    lines = []
    for what, f, first, nbytes in runs:
        lines.append(line(f"{what}, {case}", nbytes, device_seconds(f, first, g), None))
    return lines


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tiles", action="store_true", help="compare what a block works on at once instead")
    parser.add_argument("--ways", action="store_true", help="compare the ways to move quantised rows instead")
    parser.add_argument("--kernels", action="store_true", help="never the reference, also where 'auto' takes it")
    arguments = parser.parse_args()
    plain, places = ("pallas", "cuda") if arguments.kernels else ("auto", "auto")
    runs = ((None, plain), (F32, "auto"))
    print(timing.machine())
    print(f"copy rate {timing.copy_rate() / 1e9:.0f} GB/s", flush=True)
    if arguments.tiles:
        print(timing.table(HEADER[:4], [row for case in (CASES[0], CASES[5]) for row in tiles(case)]))
        return
    if arguments.ways:
        header = ["e4m3 with scales, us", "one launch", "Pallas + launch", "Pallas + XLA", "best of copy"]
        for tokens in (16384, 8192, 4096, 2048, 1024, 512, 256, 128, 16, 1):
            print(timing.table(header, [ways(tokens)]), flush=True)
        return
    header = [HEADER[i] for i in (0, 1, 4, 5)]
    print(timing.table(header, [group_row(case, places) for case in CASES]), flush=True)
    print(timing.table(HEADER, [permute_row(case, quant, rows) for case in CASES for quant, rows in runs]), flush=True)
    print(timing.table(HEADER, [scales_row(case) for case in CASES]), flush=True)
    lines = [unpermute_row(case, jnp.bfloat16, plain) for case in CASES]
    print(timing.table(HEADER, [*lines, unpermute_row(CASES[0], jnp.float32, plain)]))


if __name__ == "__main__":
    main()
