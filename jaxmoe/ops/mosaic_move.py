"""Whole rows copied by the copy engine, Pallas Mosaic GPU: global memory to shared memory and out again.

A block fetches a few rows, each with a barrier of its own, and sends every row on as it arrives; blocks share an SM, so
that fetches and stores of different blocks overlap. No register holds data, and any dtype of whole bytes is the same
to it. The copy engine's descriptors hold 64-bit strides, and it ignores rows past the end of an array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmoe.ops.mosaic import UNIT

Array = jax.Array
Ref = Any


def gather(x: Array, source: Array, stage: int) -> Array:
    """``out[i] = x[source[i]]``; rows whose source is -1 hold anything.

    Args:
      x: [N, W], W a multiple of 64, rows of a multiple of 128 bytes.
      source: int32 [M].
      stage: bytes of shared memory for the rows of a block, at least one row is taken.
    """
    return _run(_gather, x, source, source.shape[0], stage)


def scatter(x: Array, slots: Array, num_rows: int, stage: int) -> Array:
    """``out[slots[t, k]] = x[t]``, each row of x read once; rows that no slot names hold anything.

    Args:
      x, stage: as of :func:`gather`.
      slots: int32 [N, K], -1 for none. Slots of different tokens differ.
      num_rows: M.
    """
    return _run(_scatter, x, slots, num_rows, stage)


def _run(body: Callable[..., None], x: Array, index: Array, m: int, stage: int) -> Array:
    n, w = x.shape
    inner = next(d for d in (256, 192, 128, UNIT) if w % d == 0)
    rows = min(max(stage // (w * x.dtype.itemsize), 1), 8)
    view = (w // inner, inner)
    out = plgpu.kernel(
        functools.partial(body, rows=rows),
        out_type=jax.ShapeDtypeStruct((m, *view), x.dtype),
        grid=(-(-index.shape[0] // rows),),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((rows, *view), x.dtype), plgpu.Barrier(num_barriers=rows)],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(index, x.reshape(n, *view))
    return out.reshape(m, w)


def _gather(source: Ref, x: Ref, out: Ref, stage: Ref, arrived: Ref, *, rows: int) -> None:
    m = source.shape[0]
    places = [lax.axis_index("block") * rows + i for i in range(rows)]
    sources = [jnp.where(r < m, source[jnp.minimum(r, m - 1)], -1) for r in places]
    for i, s in enumerate(sources):
        pl.when(s >= 0)(functools.partial(plgpu.copy_gmem_to_smem, x.at[s], stage.at[i], arrived.at[i]))
    for i, (s, r) in enumerate(zip(sources, places, strict=True)):

        @pl.when(s >= 0)
        def _(i: int = i, r: Array = r) -> None:
            plgpu.barrier_wait(arrived.at[i])
            plgpu.copy_smem_to_gmem(stage.at[i], out.at[r])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


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
