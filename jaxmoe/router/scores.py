"""Router logits to expert scores, f32 to f32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxmoe.config import Score

Array = jax.Array

_TAIL = -16.0  # below it softplus(x) is exp(x) to less than half an f32 ulp


def _exp(x: Array) -> Array:
    """exp, compiled apart from what makes its argument.

    Fused with it, the CPU backend gives other last bits for other numbers of rows.
    """
    return jnp.exp(jax.lax.optimization_barrier(x))


def sqrtsoftplus(x: Array) -> Array:
    """sqrt(log(1 + exp(x))), accurate and with finite gradients at any finite f32 x.

    Softplus is ``max(x, 0) + log1p(exp(-|x|))``, which neither overflows nor loses small values. Far below 0 it is
    exp(x), whose root is taken as exp(x/2): this stays normal for twice as long, and has no infinite slope at 0.
    """
    tail = x < _TAIL
    power = jax.lax.optimization_barrier(_exp(jnp.where(tail, x * 0.5, jnp.where(x > 0.0, -x, x))))
    softplus = jnp.where(x > 0.0, x, 0.0) + jnp.log1p(power)
    return jnp.where(tail, power, jnp.sqrt(jnp.where(tail, 1.0, softplus)))


def row_sum(x: Array) -> Array:
    """Sum over the last axis, kept with extent 1, as a fixed tree of additions.

    The order of a backend's own reduction may change with the number of rows; a row's bits must not.
    """
    n = x.shape[-1]
    width = 1 << (n - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - n)])
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x


def softmax(x: Array) -> Array:
    """Softmax over the last axis, by :func:`row_sum`. A row whose maximum is infinite or NaN is all NaN."""
    powers = _exp(x - jax.lax.stop_gradient(x.max(axis=-1, keepdims=True)))
    return powers / row_sum(powers)


def scores(logits: Array, kind: Score) -> Array:
    """Scores [..., E] f32 of logits [..., E] f32.

    Args:
      logits: router logits, f32.
      kind: ``softmax`` over the last axis, ``sigmoid``, ``sqrtsoftplus``, or ``raw`` for the logits themselves.
    """
    match kind:
        case "softmax":
            return softmax(logits)
        case "sigmoid":
            return jax.nn.sigmoid(logits)
        case "sqrtsoftplus":
            return sqrtsoftplus(logits)
        case "raw":
            return logits
