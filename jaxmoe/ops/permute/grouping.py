"""Which row of the grouped buffer each choice takes.

All of it is integer arithmetic on one stable sort by (expert, token, k), so places never depend on timing. A choice
of -1 takes no row; it is turned into an index past the end before any scatter, because JAX wraps -1 around.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.config import Layout
from jaxmoe.errors import ShapeError
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
