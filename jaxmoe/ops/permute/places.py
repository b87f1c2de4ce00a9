"""Places in plain JAX.

All of it is integer arithmetic on one stable sort by (expert, token, k), so places never depend on timing. A choice
of -1 takes no row; it is turned into an index past the end before any scatter, because JAX wraps -1 around.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.config import Layout

Array = jax.Array


def place(ids: Array, num_experts: int, *, layout: Layout, alignment: int, num_rows: int) -> tuple[Array, Array, Array]:
    """Group, slots and source of a :class:`jaxmoe.ops.permute.Grouping` of ``num_rows`` rows."""
    k = ids.shape[1]
    if layout == "masked":
        first = jnp.argmax(ids[:, :, None] == ids[:, None, :], axis=-1)
        held, owner, rank = _ranks(jnp.where(first < jnp.arange(k), -1, ids), num_experts)
        slots = jnp.where(owner < num_experts, owner * (num_rows // num_experts) + rank, -1)
        slots = jnp.take_along_axis(slots, first, axis=1)
        return held, slots, inverse(slots, num_rows)
    held, owner, rank = _ranks(ids, num_experts)
    padded = lax.div(held + (alignment - 1), alignment) * alignment
    starts = jnp.cumsum(padded, dtype=jnp.int32) - padded
    slots = jnp.where(owner < num_experts, starts[jnp.minimum(owner, num_experts - 1)] + rank, -1)
    group = starts + held
    if layout == "contiguous":
        row = jnp.where(slots >= 0, slots, num_rows)
        group = jnp.full(num_rows, -1, jnp.int32).at[row].set(ids, mode="drop")
    return group, slots, inverse(slots, num_rows)


def inverse(slots: Array, num_rows: int) -> Array:
    """See :func:`jaxmoe.ops.permute.inverse_slots`."""
    tokens = jnp.broadcast_to(jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None], slots.shape)
    return jnp.full(num_rows, -1, jnp.int32).at[jnp.where(slots >= 0, slots, num_rows)].set(tokens, mode="drop")


def counts(ids: Array, num_experts: int) -> Array:
    """See :func:`jaxmoe.ops.permute.expert_counts`."""
    owner = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    return jnp.zeros(num_experts, jnp.int32).at[owner.reshape(-1)].add(1, mode="drop")


def _ranks(ids: Array, num_experts: int) -> tuple[Array, Array, Array]:
    """Counts [E]; each choice's expert (E for none) and its rank among that expert's choices, [N, K]."""
    owner = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    flat = owner.reshape(-1)
    held = jnp.zeros(num_experts + 1, jnp.int32).at[flat].add(1)
    starts = jnp.cumsum(held, dtype=jnp.int32) - held
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    rank = jnp.arange(flat.size, dtype=jnp.int32) - starts[flat[order]]
    rank = jnp.zeros_like(flat).at[order].set(rank, unique_indices=True)
    return held[:-1], owner, rank.reshape(ids.shape)
