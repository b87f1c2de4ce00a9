"""Router logits to expert scores, f32 to f32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxmoe.config import Score

Array = jax.Array

_TAIL = -16.0  # below it softplus(x) is exp(x) to less than half an f32 ulp


def sqrtsoftplus(x: Array) -> Array:
    """sqrt(log(1 + exp(x))), accurate and with finite gradients at any finite f32 x.

    Softplus is ``max(x, 0) + log1p(exp(-|x|))``, which neither overflows nor loses small values. Far below 0 it is
    exp(x), whose root is taken as exp(x/2): this stays normal for twice as long, and has no infinite slope at 0.
    """
    tail = x < _TAIL
    body = jnp.where(tail, 0.0, x)
    root = jnp.sqrt(jnp.maximum(body, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(body))))
    return jnp.where(tail, jnp.exp(jnp.where(tail, x, 0.0) * 0.5), root)


def scores(logits: Array, kind: Score) -> Array:
    """Scores [..., E] f32 of logits [..., E] f32.

    Args:
      logits: router logits, f32.
      kind: ``softmax`` over the last axis, ``sigmoid``, ``sqrtsoftplus``, or ``raw`` for the logits themselves.
    """
    match kind:
        case "softmax":
            return jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            return jax.nn.sigmoid(logits)
        case "sqrtsoftplus":
            return sqrtsoftplus(logits)
        case "raw":
            return logits
