"""Integer arithmetic around an exchange: which ids travel, in which place a token lands, what lies where it arrived.

All of it follows from ids alone, so that places depend on no timing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.cuda.deepep.sizes import Sizes
from jaxmoe.ops.permute import group_tokens

Array = jax.Array


def wire_ids(ids: Array, num_experts: int, replicated: int, ranks: int, me: Array) -> Array:
    """Ids as they travel: each rank's own experts and then its copies of the replicated ones, rank by rank.

    Args:
      ids: int32 [T, K], global; those from ``num_experts`` on are replicated experts, met on the token's own rank.
      me: this rank.

    Returns:
      int32 [T, K], -1 for ids that name no expert.
    """
    own = num_experts // ranks
    held = own + replicated
    routed = lax.div(ids, own) * held + lax.rem(ids, own)
    here = me * held + own + (ids - num_experts)
    ids = jnp.where(ids < 0, -1, jnp.where(ids < num_experts, routed, here))
    return jnp.where(ids < ranks * held, ids, -1)


def merge_repeats(ids: Array, weights: Array) -> tuple[Array, Array]:
    """Each id of a token once, with the sum of its weights; the kernels stop at a repeated one. Weight 0 at -1."""
    same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, None, :]
    merged = jnp.sum(jnp.where(same, weights[:, None, :], 0.0), axis=-1)
    earlier = jnp.arange(ids.shape[1]) < jnp.arange(ids.shape[1])[:, None]
    alone = (ids >= 0) & ~(same & earlier).any(-1)
    return jnp.where(alone, ids, -1), jnp.where(alone, merged, 0.0)


def slots_of(ids: Array, sizes: Sizes, me: Array) -> Array:
    """Places by order of token: ``me``·M + i for the i-th token that goes to a rank, at the last choice that does."""
    owner = jnp.where(ids >= 0, lax.div(ids, sizes.local_experts), -1)
    wanted = (owner[:, :, None] == jnp.arange(sizes.ranks, dtype=jnp.int32)).any(1).astype(jnp.int32)
    place = jnp.cumsum(wanted, 0, dtype=jnp.int32) - wanted
    later = jnp.arange(ids.shape[1])[:, None] < jnp.arange(ids.shape[1])
    last = ~((owner[:, :, None] == owner[:, None, :]) & later).any(-1)
    at = jnp.take_along_axis(place, jnp.maximum(owner, 0), axis=1)
    return jnp.where(last & (owner >= 0), me * sizes.tokens + at, -1)


def expanded_places(all_ids: Array, sizes: Sizes, me: Array) -> dict[str, Array]:
    """Where everything lands on this rank, expanded, in order of expert, sender, token.

    Args:
      all_ids: int32 [R, T, K], of all ranks.
      me: this rank.

    Returns:
      ``ranks`` and ``metadata`` as :mod:`jaxmoe.cuda.deepep.specs` has them, and ``ends``, [El], of real rows.
    """
    senders, tokens, k = all_ids.shape
    el = sizes.local_experts
    local = all_ids - me * el
    local = jnp.where((local >= 0) & (local < el), local, -1)
    came = (local >= 0).any(-1)
    ranks = jnp.cumsum(came.sum(1, dtype=jnp.int32), dtype=jnp.int32)
    flat = local.reshape(-1, k)
    grouping = group_tokens(flat, el, layout="psum", alignment=sizes.alignment)
    sender = jnp.arange(senders, dtype=jnp.int32)[:, None]
    source = sender * sizes.tokens + jnp.arange(tokens, dtype=jnp.int32)
    choice = jnp.arange(k, dtype=jnp.int32)
    highest = sender * k + jnp.max(jnp.where(local >= 0, choice, -1), axis=-1)
    rows = jnp.concatenate([source.reshape(-1, 1), highest.reshape(-1, 1), grouping.slots], axis=1)
    place = jnp.where(came, jnp.cumsum(came.reshape(-1), dtype=jnp.int32).reshape(came.shape) - 1, sizes.received)
    metadata = jnp.full((sizes.received, 2 + k), -1, jnp.int32).at[place.reshape(-1)].set(rows, mode="drop")
    return {"ranks": ranks, "metadata": metadata, "ends": grouping.group}


def received_rows(ranks: Array, rows: int) -> Array:
    """bool [rows]: whether a token arrived there; not expanded."""
    return jnp.arange(rows, dtype=jnp.int32) < ranks[-1]


def slab_experts(counts: Array, capacity: int) -> Array:
    """int32 [El·capacity, 1]: the expert of each row of a masked slab with ``counts`` [El] real rows each, else -1."""
    expert = jnp.arange(counts.shape[0], dtype=jnp.int32)[:, None]
    real = jnp.arange(capacity, dtype=jnp.int32) < counts[:, None]
    return jnp.where(real, expert, -1).reshape(-1, 1)
