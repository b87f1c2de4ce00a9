"""Between the psum buffer, rows of all experts one after another, and the masked slab, as many rows for each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.errors import ShapeError
from jaxmoe.ops.backend import Backend
from jaxmoe.ops.permute.api import permute, unpermute
from jaxmoe.ops.permute.grouping import Grouping, inverse_slots
from jaxmoe.ops.rows import GroupedRows, psum_experts, psum_starts
from jaxmoe.quant.tensors import QuantizedRows
from jaxmoe.sizes import round_up

Array = jax.Array


def slab_grouping(rows: GroupedRows, capacity: int) -> Grouping:
    """Where each row of a psum buffer goes in a masked slab; ``slots`` is [M, 1], the rows being the tokens.

    Args:
      rows: psum.
      capacity: rows per expert of the slab, rounded up to the alignment. It must hold the largest expert: rows past
        it are left out. The number of tokens is enough where a token has one row per expert.

    Raises:
      ShapeError: the layout is not psum, or the capacity is below 1.
    """
    if rows.layout != "psum":
        raise ShapeError(f"rows are {rows.layout}; only psum rows have a place in a masked slab")
    if capacity < 1:
        raise ShapeError(f"the capacity is {capacity}; it must be at least 1")
    a, m, e = rows.alignment, rows.values.shape[0], rows.group.shape[0]
    capacity = round_up(capacity, a)
    starts, owner = psum_starts(rows.group, a), psum_experts(rows.group, a, m)
    counts = jnp.minimum(rows.group - starts, capacity)
    rank = jnp.arange(m, dtype=jnp.int32) - starts[owner]
    slots = jnp.where((owner >= 0) & (rank < capacity), owner * capacity + rank, -1)[:, None]
    return Grouping(counts, slots, inverse_slots(slots, e * capacity), "masked", a)


def expand_to_masked_slab(rows: GroupedRows, capacity: int, *, backend: Backend = "auto") -> GroupedRows:
    """Copies psum rows, plain or quantised, into a masked slab.

    Args:
      rows: psum, [M, W].
      capacity: see :func:`slab_grouping`.
      backend: see design.

    Returns:
      Masked rows [E, C, W]; padding as of :func:`permute`.
    """
    return permute(rows.rows, slab_grouping(rows, capacity), backend=backend)


def masked_slab_to_expand(
    slab: GroupedRows,
    like: GroupedRows,
    *,
    weights: Array | None = None,
    out_dtype: Any = None,
    backend: Backend = "auto",
) -> GroupedRows:
    """Brings the rows of a masked slab back into a psum buffer.

    Args:
      slab: masked, [E, C, W], laid out by :func:`expand_to_masked_slab`.
      like: the psum rows, [M, ...], whose places they take.
      weights: f32 [M], a factor for each row, applied in f32. None copies; rows may then be quantised.
      out_dtype: with weights; default the rows' dtype.
      backend: see design.

    Returns:
      Psum rows [M, W]. Rows that belong to no expert are 0 with weights, and else padding as of :func:`permute`.

    Raises:
      ShapeError: ``slab`` is not masked or has other experts than ``like``.
    """
    if slab.layout != "masked" or slab.group.shape != like.group.shape:
        raise ShapeError(
            f"a {slab.layout} buffer of {slab.group.shape[0]} experts does not go into one of {like.group.shape[0]}"
        )
    _, capacity, w = slab.values.shape
    there = slab_grouping(like, capacity)
    if weights is not None:
        if isinstance(slab.rows, QuantizedRows):
            raise ShapeError("quantised rows take no weights; bring them back without, or apply weights in the sum")
        rows = unpermute(slab.rows, there.slots, weights[:, None], out_dtype=out_dtype, backend=backend)
        return like.with_rows(rows)
    back = Grouping(like.group, there.source[:, None], there.slots[:, 0], "psum", like.alignment)
    rows = slab.rows
    if isinstance(rows, QuantizedRows):
        scales = jnp.moveaxis(rows.scales[..., :capacity], 0, 1)
        rows = QuantizedRows(rows.values.reshape(-1, w), scales.reshape(scales.shape[0], -1), rows.quant)
    else:
        rows = rows.reshape(-1, w)
    return permute(rows, back, backend=backend)
