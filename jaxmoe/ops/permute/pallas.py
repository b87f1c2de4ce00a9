"""Moving rows by Pallas Mosaic GPU kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.errors import BackendUnavailable
from jaxmoe.ops import mosaic
from jaxmoe.ops.permute.reference import take_scales
from jaxmoe.quant.tensors import QuantizedRows

Array = jax.Array

STAGE = 14336
"""Bytes of rows that a block of the copying kernel has in shared memory at once."""

COLUMNS = 1024
"""Columns that a block of the summing kernel takes of a row; 512 took 308 µs, 1024 take 246 (8192 tokens of 7168)."""

_SHARED = 200 * 1024


def copy_rows(x: Array, slots: Array, source: Array) -> Array:
    """See :func:`jaxmoe.ops.permute.reference.copy_rows`. Every row that has a slot is read once.

    Raises:
      BackendUnavailable: no Hopper or data-centre Blackwell GPU, or rows that the copy engine cannot take.
    """
    mosaic.require_gpu()
    return copy_kernel(x, slots, source, STAGE)


def copy_quantized(x: QuantizedRows, slots: Array, source: Array, row_shape: tuple[int, ...]) -> QuantizedRows:
    """See :func:`jaxmoe.ops.permute.reference.copy_quantized`; the scales are XLA's to move. Raises as above."""
    values = copy_rows(x.values, slots, source).reshape(*row_shape, x.values.shape[1])
    return QuantizedRows(values, take_scales(x.scales, x.quant, source, row_shape), x.quant)


@functools.partial(jax.jit, static_argnames="stage")
def copy_kernel(x: Array, slots: Array, source: Array, stage: int) -> Array:
    """The copying kernel with a stage of one's choice, on whatever device the program is for."""
    _check(x, source)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise BackendUnavailable(f"rows of {x.dtype} are not moved, floats only are; use backend='reference'")
    row = x.shape[1] * x.dtype.itemsize
    if row % 128 or row > _SHARED or x.shape[1] > 256 * mosaic.UNIT:
        raise BackendUnavailable(
            f"rows of {x.shape[1]} {x.dtype} are {row} bytes; the copy engine takes multiples of 128 up to {_SHARED}; "
            "use backend='reference'"
        )
    from jaxmoe.ops import mosaic_move  # heavy to import

    return mosaic_move.scatter(x, slots, source.shape[0], stage)


def sum_rows(
    rows: Array, slots: Array, weights: Array | None, add: Array | None, *, scale: float, out_dtype: Any
) -> Array:
    """See :func:`jaxmoe.ops.permute.reference.sum_rows`.

    Raises:
      BackendUnavailable: no Hopper or data-centre Blackwell GPU, W no multiple of 64, or dtypes but bf16
        and f32.
    """
    mosaic.require_gpu()
    return sum_kernel(rows, slots, weights, add, scale=scale, out_dtype=jnp.dtype(out_dtype), columns=COLUMNS)


@functools.partial(jax.jit, static_argnames=("scale", "out_dtype", "columns"))
def sum_kernel(
    rows: Array,
    slots: Array,
    weights: Array | None,
    add: Array | None,
    *,
    scale: float,
    out_dtype: Any,
    columns: int,
) -> Array:
    """The summing kernel with tiles of one's choice, on whatever device the program is for."""
    _check(rows, slots)
    dtypes = [rows.dtype, jnp.dtype(out_dtype), *([] if add is None else [add.dtype])]
    if any(d not in (jnp.bfloat16, jnp.float32) for d in dtypes):
        raise BackendUnavailable(f"sums are for bfloat16 and float32, not {dtypes}; use backend='reference'")
    from jaxmoe.ops import mosaic_sum  # heavy to import

    return mosaic_sum.gather_sum(rows, slots, weights, scale, add, out_dtype, columns)


def _check(rows: Array, index: Array) -> None:
    if 0 in rows.shape or 0 in index.shape:
        raise BackendUnavailable(
            f"there is nothing to move for rows {list(rows.shape)} and places {list(index.shape)}; "
            "use backend='reference'"
        )
    if rows.shape[1] % mosaic.UNIT:
        raise BackendUnavailable(
            f"the width, {rows.shape[1]}, must be a multiple of {mosaic.UNIT}; use backend='reference'"
        )
