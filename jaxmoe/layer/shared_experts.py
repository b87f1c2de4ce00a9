"""Experts that see every token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxmoe.layer.params import SharedParams
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
