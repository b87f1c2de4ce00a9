"""Which row of the grouped buffer each choice takes, and moving rows there and back.

All of it is integer arithmetic on one stable sort by (expert, token, k), so places never depend on timing. A choice
of -1 takes no row; it is turned into an index past the end before any scatter, because JAX wraps -1 around.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.config import Layout
from jaxmoe.errors import ShapeError
from jaxmoe.ops.manual_axes import vary_together
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.sizes import round_up

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouping:
    """Where rows go. M is the number of rows of the buffer (E·C of the masked layout).

    Attributes:
      group: what :class:`GroupedRows` keeps for the layout.
      slots: int32 [N, K], the (flattened) row of each choice, -1 for none.
      source: int32 [M], the token each row holds, -1 for padding.
      layout, alignment: static.
    """

    group: Array
    slots: Array
    source: Array
    layout: Layout = dataclasses.field(metadata={"static": True})
    alignment: int = dataclasses.field(metadata={"static": True})

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Leading shape of the buffer: (M,), masked (E, C)."""
        m = self.source.shape[0]
        return (self.group.shape[0], m // self.group.shape[0]) if self.layout == "masked" else (m,)

    @property
    def valid(self) -> Array:
        """bool, of :attr:`row_shape`: which rows hold a token."""
        return (self.source >= 0).reshape(self.row_shape)


def buffer_rows(
    layout: Layout, tokens: int, choices: int, num_experts: int, alignment: int, capacity: int | None = None
) -> int:
    """Rows M (E·C of the masked layout) of the buffer that :func:`group_tokens` makes; they hold any routing.

    Args:
      tokens: N. choices: N·K.
      layout, num_experts, alignment, capacity: as of :func:`group_tokens`.

    Raises:
      ShapeError: the masked capacity is below N.
    """
    if layout != "masked":
        return padded_rows(choices, num_experts, alignment)
    capacity = tokens if capacity is None else capacity
    if capacity < tokens:
        raise ShapeError(
            f"masked_capacity {capacity} is below the {tokens} tokens an expert may get; raise it to at least {tokens}"
        )
    return num_experts * max(round_up(capacity, alignment), alignment)


def padded_rows(rows: int, num_experts: int, alignment: int) -> int:
    """Rows of a buffer that just holds ``rows`` rows whatever their experts, each expert padded to ``alignment``."""
    return (rows + min(num_experts, rows) * (alignment - 1)) // alignment * alignment


def expert_counts(ids: Array, num_experts: int) -> Array:
    """Choices per expert, int32 [E]. A repeated id counts each time; ids outside 0..E-1 count nowhere."""
    return _ranks(ids, num_experts)[0]


def group_tokens(
    ids: Array, num_experts: int, *, layout: Layout = "psum", alignment: int = 8, capacity: int | None = None
) -> Grouping:
    """Gives every choice its row, in order of expert, then token, then k.

    Psum and contiguous give a repeated id of one token a row each time. Masked gives it one row, which both
    choices share, so that no expert needs more than N rows and nothing is ever dropped.

    Args:
      ids: int32 [N, K], -1 (or any id outside 0..E-1) for none.
      num_experts: E.
      layout, alignment: see :class:`GroupedRows`.
      capacity: rows per expert of the masked layout, at least N (default), rounded up to ``alignment``.

    Raises:
      ShapeError: ids are not int32 [N, K], or the capacity is below N.
    """
    if ids.ndim != 2 or ids.dtype != jnp.int32:
        raise ShapeError(f"ids are {ids.dtype}{list(ids.shape)}; they must be int32 [N, K]")
    n, k = ids.shape
    num_rows = buffer_rows(layout, n, n * k, num_experts, alignment, capacity)
    if layout == "masked":
        capacity = num_rows // num_experts
        first = jnp.argmax(ids[:, :, None] == ids[:, None, :], axis=-1)
        repeated = first < jnp.arange(k)
        counts, owner, rank = _ranks(jnp.where(repeated, -1, ids), num_experts)
        slots = jnp.where(owner < num_experts, owner * capacity + rank, -1)
        slots = jnp.take_along_axis(slots, first, axis=1)
        return Grouping(counts, slots, inverse_slots(slots, num_rows), layout, alignment)
    counts, owner, rank = _ranks(ids, num_experts)
    padded = lax.div(counts + (alignment - 1), alignment) * alignment
    starts = jnp.cumsum(padded, dtype=jnp.int32) - padded
    slots = jnp.where(owner < num_experts, starts[jnp.minimum(owner, num_experts - 1)] + rank, -1)
    group = starts + counts
    if layout == "contiguous":
        place = jnp.where(slots >= 0, slots, num_rows)
        group = jnp.full(num_rows, -1, jnp.int32).at[place].set(ids, mode="drop")
    return Grouping(group, slots, inverse_slots(slots, num_rows), layout, alignment)


def inverse_slots(slots: Array, num_rows: int) -> Array:
    """The token of each of ``num_rows`` rows, int32 [num_rows], -1 for rows no choice in ``slots`` [N, K] takes."""
    tokens = jnp.broadcast_to(jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None], slots.shape)
    return jnp.full(num_rows, -1, jnp.int32).at[jnp.where(slots >= 0, slots, num_rows)].set(tokens, mode="drop")


def _ranks(ids: Array, num_experts: int) -> tuple[Array, Array, Array]:
    """Counts [E]; each choice's expert (E for none) and its rank among that expert's choices, [N, K]."""
    owner = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    flat = owner.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    in_order = flat[order]
    bounds = jnp.searchsorted(in_order, jnp.arange(num_experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    rank = jnp.arange(flat.size, dtype=jnp.int32) - bounds[in_order]
    return jnp.diff(bounds), owner, jnp.zeros_like(flat).at[order].set(rank, unique_indices=True).reshape(ids.shape)


def permute(x: Array, grouping: Grouping) -> GroupedRows:
    """Copies token rows into the grouped buffer.

    Args:
      x: [N, W], any dtype. Tokens without a choice are not read.
      grouping: from :func:`group_tokens`.

    Returns:
      Rows [M, W] or [E, C, W]; padding rows are 0. The gradient of a token sums over its rows in f32, in order of k.
    """
    if x.ndim != 2 or x.shape[0] != grouping.slots.shape[0]:
        raise ShapeError(f"x {list(x.shape)} does not hold the {grouping.slots.shape[0]} tokens that were grouped")
    rows = _permute(*vary_together(x, grouping.slots, grouping.source))
    rows = rows.reshape(*grouping.row_shape, x.shape[1])
    return GroupedRows(rows, grouping.group, grouping.layout, grouping.alignment)


@jax.custom_vjp
def _permute(x: Array, slots: Array, source: Array) -> Array:
    return _take(x, source)


def _take(x: Array, index: Array) -> Array:
    """``x[index]``, rows of 0 where the index is -1."""
    if not x.shape[0]:
        return jnp.zeros((*index.shape, *x.shape[1:]), x.dtype)
    taken = x[jnp.maximum(index, 0)]
    return jnp.where((index >= 0).reshape(*index.shape, *[1] * (x.ndim - 1)), taken, jnp.zeros((), x.dtype))


def _permute_fwd(x: Array, slots: Array, source: Array) -> tuple[Array, Array]:
    return _take(x, source), slots


def _permute_bwd(slots: Array, d_rows: Array) -> tuple[Any, ...]:
    return _combine(d_rows, _once(slots), None, d_rows.dtype), None, None


def _once(slots: Array) -> Array:
    """Slots with each row named once: a later choice that shares a row becomes -1."""
    first = jnp.argmax(slots[:, :, None] == slots[:, None, :], axis=-1)
    return jnp.where(first < jnp.arange(slots.shape[1]), -1, slots)


_permute.defvjp(_permute_fwd, _permute_bwd)


def unpermute(rows: Array, slots: Array, weights: Array, *, out_dtype: Any = None) -> Array:
    """Brings rows back to their tokens: ``y[t] = Σ_k weights[t, k] · rows[slots[t, k]]`` over slots that are not -1.

    Args:
      rows: [M, W] or [E, C, W], any float dtype. Rows no slot names are never read.
      slots: int32 [N, K].
      weights: f32 [N, K]; entries at -1 are not read and get gradient 0.
      out_dtype: default the rows' dtype.

    Returns:
      [N, W]: summed in f32 in order of k, rounded once.
    """
    if slots.shape != weights.shape or slots.ndim != 2:
        raise ShapeError(f"slots {list(slots.shape)} and weights {list(weights.shape)} must both be [N, K]")
    flat = rows.reshape(-1, rows.shape[-1]) if rows.size else jnp.zeros((0, rows.shape[-1]), rows.dtype)
    like = jnp.zeros((), rows.dtype if out_dtype is None else out_dtype)
    return _unpermute(*vary_together(flat, slots, weights.astype(jnp.float32)), like)


@jax.custom_vjp
def _unpermute(rows: Array, slots: Array, weights: Array, like: Array) -> Array:
    return _combine(rows, slots, weights, like.dtype)


def _combine(rows: Array, slots: Array, weights: Array | None, out_dtype: Any) -> Array:
    y = jnp.zeros((slots.shape[0], rows.shape[-1]), jnp.float32)
    for k in range(slots.shape[1]):
        row = _take(rows, slots[:, k]).astype(jnp.float32)
        y = y + (row if weights is None else jnp.where(slots[:, k] >= 0, weights[:, k], 0)[:, None] * row)
    return y.astype(out_dtype)


def _unpermute_fwd(rows: Array, slots: Array, weights: Array, like: Array) -> tuple[Array, Any]:
    return _combine(rows, slots, weights, like.dtype), (rows, slots, weights)


def _unpermute_bwd(saved: Any, dy: Array) -> tuple[Any, ...]:
    rows, slots, weights = saved
    dy = dy.astype(jnp.float32)
    source = inverse_slots(slots, rows.shape[0])
    mine = _take(slots, source) == jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    weight = jnp.sum(jnp.where(mine, _take(weights, source), 0), axis=1)
    d_rows = weight[:, None] * _take(dy, source)
    dots = [jnp.sum(_take(rows, slots[:, k]).astype(jnp.float32) * dy, axis=-1) for k in range(slots.shape[1])]
    return d_rows.astype(rows.dtype), None, jnp.where(slots >= 0, jnp.stack(dots, 1), 0), None


_unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)
