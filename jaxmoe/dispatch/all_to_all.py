"""The transport of XLA's own collectives: any devices, several hosts, differentiable. The oracle of the others."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.dispatch.base import Dispatched
from jaxmoe.errors import ShapeError
from jaxmoe.ops.manual_axes import vary_together
from jaxmoe.ops.permute import group_tokens, permute, unpermute

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Way:
    """The way back: each token's row in each rank's part of the buffer, and how many exchanges it took."""

    slots: Array
    rounds: Array | None


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Tokens travel by ``jax.lax.all_to_all`` inside ``shard_map``; implements :class:`jaxmoe.dispatch.base.Dispatch`.

    Expert e lives on rank ``e // (E / R)``. A token goes once to each rank that holds any of its experts, with all K
    ids and weights; that rank sums over its experts in f32, and the token's own rank sums over ranks, in order of
    rank, in f32. Row i of what rank s sends to rank d is the i-th of s's tokens for d, so that places follow from ids
    alone, and a token's bits neither from its place nor from other tokens.

    Buffers are padded to what any routing may need, so that nothing is ever dropped: T rows for each pair of ranks, of
    which R·T arrive, and R·T·K grouped rows behind them. ``capacity`` is about the wire only.

    Attributes:
      axis: the mesh axes of the R ranks, major first.
      capacity: rows that two ranks exchange at a time; as many exchanges follow as the fullest pair of ranks needs.
        None: all T rows at once, used or not. About T·K/R·1.25 takes one exchange where routing is balanced.
    """

    axis: str | tuple[str, ...]
    capacity: int | None = None

    def __post_init__(self) -> None:
        if self.capacity is not None and self.capacity < 1:
            raise ShapeError(f"capacity is {self.capacity}; it must be at least 1, or None for all rows at once")

    def held(self, num_experts: int, replicated: int) -> int:
        """E / R and the replicated ones.

        Raises:
          ShapeError: R does not divide E. NameError: the axis is not one of a ``shard_map`` around.
        """
        ranks = lax.axis_size(self.axis)
        if num_experts % ranks:
            raise ShapeError(
                f"{num_experts} experts do not divide over the {ranks} ranks of mesh axis {self.axis!r}; use a number "
                f"of ranks that divides {num_experts}, and cut each expert over the other devices"
            )
        return num_experts // ranks + replicated

    def dispatch(self, x: Array, ids: Array, weights: Array, num_experts: int) -> Dispatched:
        """Sends tokens; R·T' rows arrive, in order of rank, T' being T rounded up to the capacity.

        Raises:
          ShapeError: as :meth:`held`.
        """
        local, ranks = self.held(num_experts, 0), lax.axis_size(self.axis)
        me, tokens, even = lax.axis_index(self.axis), x.shape[0], ids.size
        rank = jnp.arange(ranks, dtype=jnp.int32)

        owner = jnp.where(ids >= num_experts, me, jnp.where(ids >= 0, lax.div(ids, local), -1))
        wanted = (owner[:, :, None] == rank).any(1)
        chunk = min(self.capacity or tokens, max(tokens, 1)) or 1
        grouping = group_tokens(jnp.where(wanted, rank, -1), ranks, layout="masked", alignment=chunk)
        rounds = None
        if chunk < tokens:
            rounds = lax.pmax(lax.div(jnp.max(grouping.group) + (chunk - 1), chunk), self.axis)
        way = _Way(grouping.slots, rounds)

        def send(rows: Array) -> Array:
            return self._exchange(permute(rows, grouping).values, rounds)

        ids = send(ids + 1) - 1  # rows that nothing was put in are 0 on the wire
        source = rank[:, None, None]
        here = ids - me * local
        here = jnp.where((here >= 0) & (here < local) & (ids < num_experts), here, -1)
        here = jnp.where((ids >= num_experts) & (source == me), ids - num_experts + local, here)
        rows = here.shape[0] * here.shape[1]
        return Dispatched(send(x).reshape(rows, -1), here.reshape(rows, -1), send(weights).reshape(rows, -1), way, even)

    def combine(self, y: Array, dispatched: Dispatched) -> Array:
        """Brings rows back and sums over ranks, in order of rank, in f32."""
        way = dispatched.state
        ranks = lax.axis_size(self.axis)
        back = self._exchange(y.reshape(ranks, y.shape[0] // ranks, y.shape[1]), way.rounds)
        return unpermute(back, way.slots, jnp.ones(way.slots.shape, jnp.float32), out_dtype=jnp.float32)

    def _exchange(self, rows: Array, rounds: Array | None) -> Array:
        """[R, T', W] by destination to [R, T', W] by source."""
        if rounds is None:
            return lax.all_to_all(rows, self.axis, 0, 0)
        assert self.capacity is not None
        return _in_rounds(self.axis, self.capacity, rows, rounds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_rounds(axis: Any, chunk: int, rows: Array, rounds: Array) -> Array:
    """The first ``rounds`` · ``chunk`` rows of each pair, exchanged chunk by chunk; the others come as 0."""
    out, rows = vary_together(jnp.zeros(rows.shape, rows.dtype), rows)

    def exchange(i: Array, out: Array) -> Array:
        part = lax.dynamic_slice_in_dim(rows, i * chunk, chunk, 1)
        return lax.dynamic_update_slice_in_dim(out, lax.all_to_all(part, axis, 0, 0), i * chunk, 1)

    return lax.fori_loop(0, rounds, exchange, out)


def _in_rounds_fwd(axis: Any, chunk: int, rows: Array, rounds: Array) -> tuple[Array, Array]:
    return _in_rounds(axis, chunk, rows, rounds), rounds


def _in_rounds_bwd(axis: Any, chunk: int, rounds: Array, d_out: Array) -> tuple[Array, None]:
    return _in_rounds(axis, chunk, d_out, rounds), None  # what went there comes back the same way


_in_rounds.defvjp(_in_rounds_fwd, _in_rounds_bwd)
