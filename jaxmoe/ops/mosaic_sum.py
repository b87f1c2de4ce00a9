"""Weighted sums of rows at given places, Pallas Mosaic GPU.

A warpgroup owns up to 1024 columns of one token, 16 bytes of bf16 a lane. The rows of up to eight choices are fetched
before the first is added, several blocks live on an SM, and no shared memory is needed. Row numbers are index-typed,
so offsets have 64 bits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmoe.ops.manual_axes import vary_together
from jaxmoe.ops.mosaic import UNIT

Array = jax.Array
Ref = Any

_AHEAD = 8
"""Choices whose rows are fetched before they are added."""


def gather_sum(
    rows: Array, slots: Array, weights: Array | None, scale: float, add: Array | None, out_dtype: Any, columns: int
) -> Array:
    """``y[t] = scale · Σ_k weights[t, k] · rows[slots[t, k]] + add[t]`` over slots >= 0, in f32 in order of k.

    Args:
      rows: [M, W], W a multiple of 64.
      slots: int32 [N, K]. weights: f32 [N, K], None: all 1. add: [N, W].
      columns: that a block takes of a row, at most: 64 times a power of two up to 16.

    Returns:
      [N, W], rounded once to ``out_dtype``.
    """
    (n, _), w = slots.shape, rows.shape[1]
    tile = UNIT
    while 2 * tile <= min(w, columns):
        tile *= 2
    operands = [slots, rows, *(x for x in (weights, add) if x is not None)]
    out = plgpu.kernel(
        functools.partial(_body, tile=tile, weighted=weights is not None, scale=scale),
        out_type=jax.ShapeDtypeStruct((n, w), out_dtype),
        grid=(n * -(-w // tile),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*operands)
    return vary_together(out, operands)[0]  # Pallas loses what their types say of mesh axes


def _layout(tile: int) -> Any:
    """Eight columns a lane; lanes and warps that ``tile`` columns leave idle hold what others do."""
    lanes, warps = min(tile // 8, 32), max(tile // 256, 1)
    tiling = ((tile,), (256,), (8,)) if warps > 1 else ((tile,), (8,))
    warp_dims = (*((-3,) if warps > 1 else ()), *((plgpu.Replicated(4 // warps),) if warps < 4 else ()))
    lane_dims = (-2, *((plgpu.Replicated(32 // lanes),) if lanes < 32 else ()))
    return plgpu.Layout.TILED(plgpu.Tiling(tiling), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1)


def _body(slots: Ref, rows: Ref, *refs: Ref, tile: int, weighted: bool, scale: float) -> None:
    weights, refs = (refs[0], refs[1:]) if weighted else (None, refs)
    *add, out = refs
    k, w = slots.shape[1], rows.shape[1]
    layout = _layout(tile)
    across = -(-w // tile)
    block = lax.axis_index("block")
    t = lax.div(block, across)
    # The last tile of a row overlaps the one before; both write the same.
    window = pl.ds(jnp.minimum(lax.rem(block, across) * tile, w - tile), tile)

    def load(ref: Ref, row: Array) -> Array:
        return plgpu.load(ref.at[row, window], layout=layout, optimized=False)

    # Rows are fetched as bits: branches must agree in type, and what is loaded inside shard_map has a type of its own.
    word = jnp.uint16 if rows.dtype == jnp.bfloat16 else jnp.uint32

    def nothing(dtype: Any) -> Array:
        return plgpu.layout_cast(jnp.zeros(tile, dtype), layout)

    def fetch(row: Array) -> Array:
        bits = lax.cond(row >= 0, lambda: lax.bitcast_convert_type(load(rows, row), word), lambda: nothing(word))
        return lax.bitcast_convert_type(bits, rows.dtype)

    y = nothing(jnp.float32)
    places = [slots[t, j] for j in range(k)]
    factors = [None] * k if weights is None else [jnp.where(s >= 0, weights[t, j], 0.0) for j, s in enumerate(places)]
    for start in range(0, k, _AHEAD):
        ahead = slice(start, start + _AHEAD)
        fetched = [fetch(row) for row in places[ahead]]
        for row, factor in zip(fetched, factors[ahead], strict=True):
            row = row.astype(jnp.float32)
            y = y + (row if factor is None else factor * row)
    if scale != 1:
        y = y * jnp.float32(scale)
    for extra in add:
        y = y + load(extra, t).astype(jnp.float32)
    out[t, window] = y.astype(out.dtype)
