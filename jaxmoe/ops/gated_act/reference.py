"""The gated activations in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.config import Activation
from jaxmoe.ops.quantize import quantize
from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.tensors import QuantizedRows

Array = jax.Array


def gated_act(
    h: Array, activation: Activation, *, quant: ActivationQuant | None, valid: Array | None
) -> Array | QuantizedRows:
    """See :func:`jaxmoe.ops.gated_act.gated_act`."""
    if valid is not None:
        h = jnp.where(valid[..., None], h, jnp.zeros((), h.dtype))
    gate, up = jnp.split(h.astype(jnp.float32), 2, axis=-1)
    y = _product(gate, up, activation)
    if quant is None:
        return y.astype(h.dtype)
    if h.dtype == jnp.bfloat16 and not activation.keep_fp32:
        # Not two casts: XLA may leave out a pair of them and with it the rounding.
        y = lax.reduce_precision(y, exponent_bits=8, mantissa_bits=7)
    return quantize(y, quant, valid=valid, backend="reference")


def _product(gate: Array, up: Array, a: Activation) -> Array:
    if a.limit is not None:
        gate, up = jnp.minimum(gate, a.limit), jnp.clip(up, -a.limit, a.limit)
    match a.kind:
        case "oai":
            return gate * jax.nn.sigmoid(a.alpha * gate) * (up + 1)
        case "situ":
            squashed = a.beta_gate * jnp.tanh(gate / a.beta_gate) * jax.nn.sigmoid(gate)
            return squashed * (a.beta_up * jnp.tanh(up / a.beta_up))
        case _:
            return gate * jax.nn.sigmoid(gate) * up
