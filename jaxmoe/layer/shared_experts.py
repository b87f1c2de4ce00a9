"""Experts that see every token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxmoe.layer.params import SharedParams
from jaxmoe.router import Routing
from jaxmoe.router.tiles import by_tiles

Array = jax.Array


def shared_gate(shared: SharedParams | None, x: Array, *, deterministic: bool = False) -> Array | None:
    """σ(x · gate) in f32, [T], for x [T, H]; None where the layer has no gate.

    Deterministic: its bits do not depend on T.
    """
    if shared is None or shared.gate is None:
        return None
    vector = shared.gate.astype(jnp.float32)

    def gate(x: Array) -> Array:
        return jax.nn.sigmoid(jnp.dot(x.astype(jnp.float32), vector, precision=jax.lax.Precision.HIGHEST))

    return by_tiles(gate, x) if deterministic else gate(x)


def everyone(shared: SharedParams, x: Array, valid: Array | None = None, *, deterministic: bool = False) -> Routing:
    """The routing of a shared expert kept apart: every valid token to the one expert of its stack.

    Args:
      shared: the parameters.
      x: [T, H].
      valid: bool [T]; rows where it is False go nowhere.
      deterministic: the gate's bits do not depend on T.

    Returns:
      ids and weights [T, 1]; the weight is the sigmoid gate where there is one, else 1.
    """
    gate = shared_gate(shared, x, deterministic=deterministic)
    ids = jnp.zeros((x.shape[0], 1), jnp.int32)
    weights = jnp.ones((x.shape[0], 1), jnp.float32) if gate is None else gate[:, None]
    return Routing(ids if valid is None else jnp.where(valid[:, None], ids, -1), weights)
