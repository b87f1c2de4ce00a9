"""Which row of the grouped buffer each choice takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmoe.config import Layout
from jaxmoe.errors import ShapeError
from jaxmoe.ops import backend as _backend
from jaxmoe.ops.backend import Backend
from jaxmoe.ops.permute import cuda, places
from jaxmoe.sizes import round_up

Array = jax.Array

PLACE: dict[str, Callable[..., tuple[Array, Array, Array]]] = {"cuda": cuda.place, "reference": places.place}
"""Implementations by name: ``f(ids, num_experts, *, layout, alignment, num_rows)``."""


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
    return places.counts(ids, num_experts)


def group_tokens(
    ids: Array,
    num_experts: int,
    *,
    layout: Layout = "psum",
    alignment: int = 8,
    capacity: int | None = None,
    backend: Backend = "auto",
) -> Grouping:
    """Gives every choice its row, in order of expert, then token, then k.

    Psum and contiguous give a repeated id of one token a row each time. Masked gives it one row, which both
    choices share, so that no expert needs more than N rows and nothing is ever dropped.

    Args:
      ids: int32 [N, K], -1 (or any id outside 0..E-1) for none.
      num_experts: E.
      layout, alignment: see :class:`GroupedRows`.
      capacity: rows per expert of the masked layout, at least N (default), rounded up to ``alignment``.
      backend: see design: ``"auto"``, a name, or names in order.

    Raises:
      ShapeError: ids are not int32 [N, K], or the capacity is below N.
      NotImplementedError: the named backend cannot do this case.
    """
    if ids.ndim != 2 or ids.dtype != jnp.int32:
        raise ShapeError(f"ids are {ids.dtype}{list(ids.shape)}; they must be int32 [N, K]")
    num_rows = buffer_rows(layout, ids.shape[0], ids.size, num_experts, alignment, capacity)
    options = {"layout": layout, "alignment": alignment, "num_rows": num_rows}
    group, slots, source = _backend.run("group_tokens", PLACE, backend, ids, num_experts, **options)
    return Grouping(group, slots, source, layout, alignment)


def inverse_slots(slots: Array, num_rows: int) -> Array:
    """The token of each of ``num_rows`` rows, int32 [num_rows], -1 for rows no choice in ``slots`` [N, K] takes."""
    return places.inverse(slots, num_rows)
