"""Whole rows copied by the copy engine, Pallas Mosaic GPU: global memory to shared memory and out again.

A block fetches a few rows, each with a barrier of its own, and sends every row on as it arrives; blocks share an SM, so
that fetches and stores of different blocks overlap. No register holds data, and any dtype of whole bytes is the same
to it. Tokens push their rows: pulled by the rows of the buffer, each would be read K times (0.55 of the copy rate on an
H200, against 0.86). The copy engine's descriptors hold 64-bit strides, and it ignores rows past the end of an array.
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


def scatter(x: Array, slots: Array, num_rows: int, stage: int) -> Array:
    """``out[slots[t, k]] = x[t]``, each row of x read once; rows that no slot names hold anything.

    Args:
      x: [N, W], W a multiple of 64, rows of a multiple of 128 bytes.
      slots: int32 [N, K], -1 for none. Slots of different tokens differ.
      num_rows: M.
      stage: bytes of shared memory for the rows of a block, at least one row is taken.
    """
    n, w = x.shape
    inner = next(d for d in (256, 192, 128, UNIT) if w % d == 0)
    rows = min(max(stage // (w * x.dtype.itemsize), 1), 8)
    view = (w // inner, inner)
    out = plgpu.kernel(
        functools.partial(_scatter, rows=rows),
        out_type=jax.ShapeDtypeStruct((num_rows, *view), x.dtype),
        grid=(-(-n // rows),),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((rows, *view), x.dtype), plgpu.Barrier(num_barriers=rows)],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(slots, x.reshape(n, *view))
    out, *_ = vary_together(out, slots, x)  # Pallas loses what their types say of mesh axes
    return out.reshape(num_rows, w)


def _scatter(slots: Ref, x: Ref, out: Ref, stage: Ref, arrived: Ref, *, rows: int) -> None:
    n, k = slots.shape
    tokens = [lax.axis_index("block") * rows + i for i in range(rows)]
    # All index loads come before the first copy, which nothing is moved across.
    taken = [[slots[jnp.minimum(t, n - 1), j] for j in range(k)] for t in tokens]
    wanted = [(t < n) & (functools.reduce(jnp.maximum, s) >= 0) for t, s in zip(tokens, taken, strict=True)]
    for i, t in enumerate(tokens):
        pl.when(wanted[i])(functools.partial(plgpu.copy_gmem_to_smem, x.at[t], stage.at[i], arrived.at[i]))
    for i in range(rows):

        @pl.when(wanted[i])
        def _(i: int = i) -> None:
            plgpu.barrier_wait(arrived.at[i])
            for slot in taken[i]:
                pl.when(slot >= 0)(functools.partial(plgpu.copy_smem_to_gmem, stage.at[i], out.at[slot]))

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
