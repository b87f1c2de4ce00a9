"""From the experts that a router knows to their places in the stacks, where some are there more than once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.router.routing import Routing

Array = jax.Array

_GOLDEN = 0x9E3779B1 - (1 << 32)  # odd, 2^32 over the golden ratio: multiplying spreads low bits into high ones


def choose_copies(routing: Routing, replicas: Array, *, by_place: bool) -> Routing:
    """Sends each token to one copy of each of its experts.

    Args:
      routing: ids [T, K] of experts, -1 for none.
      replicas: int32 [E, C], places of each expert's copies, -1 after the last; every expert has one at least.
      by_place: copies are taken in turn, by the token's index plus the sum of its ids: even however alike tokens are.
        Otherwise by a hash of its ids and the bits of its weights, so that the same token always takes the same copies.

    Returns:
      Places in the stacks, int32 [T, K], -1 where the id was; the weights as they were.
    """
    ids = routing.ids
    turn = jnp.sum(jnp.maximum(ids, 0), axis=1, keepdims=True, dtype=jnp.int32)
    if by_place:
        turn = turn + jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    else:
        bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(routing.weights), jnp.int32)
        mixed = (turn + jnp.sum(bits, axis=1, keepdims=True, dtype=jnp.int32)) * np.int32(_GOLDEN)
        turn = jax.lax.shift_right_logical(mixed, np.int32(16))
    table = replicas[jnp.maximum(ids, 0)]
    copies = jnp.maximum(jnp.sum(table >= 0, axis=2, dtype=jnp.int32), 1)
    places = jnp.take_along_axis(table, jax.lax.rem(turn, copies)[:, :, None], axis=2)[:, :, 0]
    return dataclasses.replace(routing, ids=jnp.where(ids >= 0, places, -1))
