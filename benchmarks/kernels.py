"""Kernels between the GEMMs beside XLA's fusion of the reference and the machine's copy rate, on one GPU, in one run.

    python -m benchmarks.kernels [--tiles]

Bytes are those that must move: every input read once, every output written once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.bench import timing
from jaxmoe.bench.trace import device_seconds
from jaxmoe.config import Activation
from jaxmoe.ops.gated_act import gated_act
from jaxmoe.ops.gated_act.pallas import gated_act_kernel
from jaxmoe.ops.mosaic import Tile
from jaxmoe.ops.quantize import quantize
from jaxmoe.ops.quantize.pallas import quantize_kernel
from jaxmoe.quant.formats import ActivationQuant

F32, PACKED, MX = ActivationQuant(128, "float32"), ActivationQuant(128, "ue8m0"), ActivationQuant(32, "ue8m0")
SHAPES = [(8192, 7168), (32768, 2048), (4096, 7168), (4096, 2880), (1024, 7168), (1024, 2048), (128, 7168), (16, 7168)]
ACTIVATIONS = [Activation(), Activation(kind="oai", limit=7.0), Activation(kind="situ")]
TILES = [Tile(r, u) for r, u in ((16, 2), (16, 4), (16, 8), (32, 2), (32, 4), (32, 8), (64, 2))]
TILES += [Tile(16, 8, staged=True), Tile(32, 4, staged=True), Tile(64, 4, staged=True)]
Row = tuple[Any, ...]


def moved(*trees: Any) -> int:
    """Bytes of arrays or their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))


def name(quant: ActivationQuant | None) -> str:
    """A column's worth of text."""
    return "bf16" if quant is None else f"1x{quant.block} {quant.scale}"


def compare(what: str, ours: Callable[..., Any], xla: Callable[..., Any], x: jax.Array, useful: float = 1.0) -> Row:
    """One row; ``useful`` is the share of the bytes that count."""
    nbytes = moved(x, jax.eval_shape(ours, x)) * useful
    # The host needs 20 µs a call, in which a device moves 80 MB.
    measure = timing.kernel_seconds if nbytes > 160e6 else device_seconds
    seconds, peer = (measure(f, x) for f in (ours, xla))
    rate = nbytes / seconds
    return what, seconds * 1e6, rate / 1e9, rate / timing.copy_rate(), peer * 1e6, peer / seconds


def random(*shape: int) -> jax.Array:
    """Normal bf16."""
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)


def quantize_row(m: int, k: int, quant: ActivationQuant, dtype: Any = jnp.bfloat16) -> Row:
    """The quantisation of all rows."""
    x = random(m, k).astype(dtype)
    ours, xla = (lambda x, b=b: quantize(x, quant, backend=b) for b in ("auto", "reference"))
    return compare(f"quantize {m}x{k} {x.dtype} to {name(quant)}", ours, xla, x)


def masked_row(m: int, k: int) -> Row:
    """Every second 128 rows are padding; the bytes of the padding's input do not count."""
    valid = jnp.arange(m) // 128 % 2 == 0
    ours, xla = (lambda x, b=b: quantize(x, F32, valid=valid, backend=b) for b in ("auto", "reference"))
    return compare(f"quantize {m}x{k}, half the rows padding", ours, xla, random(m, k), 2 / 3)


def gated_row(m: int, i: int, activation: Activation, quant: ActivationQuant | None) -> Row:
    """The activation of all rows."""
    ours, xla = (lambda h, b=b: gated_act(h, activation, quant=quant, backend=b) for b in ("auto", "reference"))
    return compare(f"{activation.kind} {m}x{2 * i} to {name(quant)}", ours, xla, random(m, 2 * i))


def tiles() -> list[Row]:
    """Every tile at 8192 x 7168."""
    rows = []
    x, h = random(8192, 7168), random(8192, 2 * 7168)
    for tile in TILES:
        runs = {
            "quantize": (lambda x, t=tile: quantize_kernel(x, F32, None, t), x),
            "silu": (lambda h, t=tile: gated_act_kernel(h, Activation(), F32, None, t), h),
        }
        for what, (f, operand) in runs.items():
            seconds = timing.kernel_seconds(f, operand)
            rate = moved(operand, jax.eval_shape(f, operand)) / seconds
            staged = ", staged" if tile.staged else ""
            line = f"{what}, {tile.rows} rows of {tile.units} units{staged}"
            rows.append((line, seconds * 1e6, rate / 1e9, rate / timing.copy_rate()))
    return rows


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tiles", action="store_true", help="compare what a warpgroup works on at once instead")
    arguments = parser.parse_args()
    print(timing.machine())
    print(f"copy rate {timing.copy_rate() / 1e9:.0f} GB/s")
    header = ["kernel", "us", "GB/s", "of copy"]
    if arguments.tiles:
        print(timing.table(header, tiles()))
        return
    rows = [quantize_row(m, k, F32) for m, k in SHAPES]
    rows += [quantize_row(8192, 7168, quant) for quant in (PACKED, MX)]
    rows += [quantize_row(8192, 7168, F32, jnp.float32), masked_row(8192, 7168)]
    rows += [gated_row(m, -(-k // 128) * 128, Activation(), F32) for m, k in SHAPES]
    rows += [gated_row(8192, 7168, a, q) for a in ACTIVATIONS for q in (None, MX)]
    print(timing.table([*header, "XLA us", "XLA / ours"], rows))


if __name__ == "__main__":
    main()
