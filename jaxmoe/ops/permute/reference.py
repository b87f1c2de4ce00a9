"""Moving rows in plain JAX."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.scale_layout import NEUTRAL_WORD
from jaxmoe.quant.tensors import QuantizedRows
from jaxmoe.sizes import round_up

Array = jax.Array

_MANY_ROWS = 65536
"""From here on transposing scales first is faster, 22 against 29 µs; see ``benchmarks/RESULTS.md``."""


def copy_rows(x: Array, slots: Array, source: Array) -> Array:
    """Rows of x [N, W] at the places ``slots`` [N, K] of a buffer, whose ``source`` [M] they are.

    Returns:
      [M, W]; rows without a source are 0 here and hold anything in other backends.
    """
    del slots
    return take(x, source)


def copy_quantized(x: QuantizedRows, slots: Array, source: Array, row_shape: tuple[int, ...]) -> QuantizedRows:
    """Like :func:`copy_rows` for quantised rows, with scales in their layout, 1 for rows without a source.

    Args:
      row_shape: the buffer's leading shape, M in all.
    """
    values = copy_rows(x.values, slots, source).reshape(*row_shape, x.values.shape[1])
    return QuantizedRows(values, take_scales(x.scales, x.quant, source, row_shape), x.quant)


def take(x: Array, index: Array) -> Array:
    """``x[index]`` along the first axis, 0 where the index is -1."""
    if not x.shape[0]:
        return jnp.zeros((*index.shape, *x.shape[1:]), x.dtype)
    taken = x[jnp.maximum(index, 0)]
    return jnp.where((index >= 0).reshape(*index.shape, *[1] * (x.ndim - 1)), taken, jnp.zeros((), x.dtype))


def take_scales(scales: Array, quant: ActivationQuant, source: Array, row_shape: tuple[int, ...]) -> Array:
    """Scales of the rows of a buffer, in the layout of :class:`QuantizedRows`.

    Args:
      scales: [S, Na] or packed [⌈S/4⌉, Na], of the rows that ``source`` [M] counts.
      row_shape: the buffer's leading shape, M in all.

    Returns:
      [..., S, Ma], 1 where there is no source.
    """
    *lead, rows = row_shape
    index = source.reshape(row_shape)
    spare = [(0, 0)] * len(lead) + [(0, round_up(rows, 4) - rows)]
    index = jnp.pad(index, spare, constant_values=-1).reshape(math.prod(lead), round_up(rows, 4))
    neutral = jnp.asarray(1 if quant.scale == "float32" else NEUTRAL_WORD, dtype=scales.dtype)
    if not scales.shape[1]:
        return jnp.full((*lead, scales.shape[0], index.shape[1]), neutral)
    if source.size >= _MANY_ROWS:
        # Whole rows of a transposed copy: all words of a sector are used where else one is.
        table = lax.optimization_barrier(scales.T)
        taken = jnp.where(index[..., None] >= 0, table[jnp.maximum(index, 0)], neutral)
        return jnp.swapaxes(taken, -1, -2).reshape(*lead, scales.shape[0], index.shape[1])
    taken = scales[jnp.arange(scales.shape[0])[:, None], jnp.maximum(index, 0)[:, None, :]]
    taken = jnp.where(index[:, None, :] >= 0, taken, neutral)
    return taken.reshape(*lead, *taken.shape[1:])


def sum_rows(
    rows: Array, slots: Array, weights: Array | None, add: Array | None, *, scale: float, out_dtype: Any
) -> Array:
    """``scale · Σ_k weights[t, k] · rows[slots[t, k]] + add[t]`` over slots >= 0.

    Args:
      rows: [M, W]. slots: int32 [N, K]. weights: f32 [N, K], None: all 1. add: [N, W].

    Returns:
      [N, W]: summed in f32 in order of k, rounded once.
    """
    y = jnp.zeros((slots.shape[0], rows.shape[-1]), jnp.float32)
    for k in range(slots.shape[1]):
        row = take(rows, slots[:, k]).astype(jnp.float32)
        y = y + (row if weights is None else jnp.where(slots[:, k] >= 0, weights[:, k], 0)[:, None] * row)
    if scale != 1:
        y = y * jnp.float32(scale)
    if add is not None:
        y = y + add.astype(jnp.float32)
    return y.astype(out_dtype)
