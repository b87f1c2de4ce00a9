"""The gated activation by a Pallas Mosaic GPU kernel, with or without the quantisation for the next GEMM."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.config import Activation
from jaxmoe.ops import mosaic
from jaxmoe.ops.gated_act import reference
from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.tensors import QuantizedRows

Array = jax.Array

TILE = mosaic.Tile(rows=16, units=2)
"""Best of ``benchmarks/kernels.py --tiles`` for wide rows on an H200; for 2048 columns Tile(32, 4) was 14 % faster."""


def gated_act(
    h: Array, activation: Activation, *, quant: ActivationQuant | None, valid: Array | None
) -> Array | QuantizedRows:
    """See :func:`jaxmoe.ops.gated_act.gated_act`. Differentiable without ``quant``, by the reference's derivative.

    σ is 1/(1 + e^-x) from the hardware's exponential and reciprocal root, off by at most a few units in the last
    place of f32 (relative 4e-7 for positive x, and 6e-8·|x| more for negative x).

    Raises:
      BackendUnavailable: no Hopper or data-centre Blackwell GPU, I no multiple of 64, or too few rows.
    """
    mosaic.require_gpu()
    if quant is None:
        return _plain(h, valid, activation)
    return gated_act_kernel(h, activation, quant, valid, TILE)


@functools.partial(jax.jit, static_argnames=("activation", "quant", "tile", "approximate"))
def gated_act_kernel(
    h: Array,
    activation: Activation,
    quant: ActivationQuant | None,
    valid: Array | None,
    tile: mosaic.Tile,
    approximate: bool = True,
) -> Array | QuantizedRows:
    """The kernel with a tile of one's choice, on whatever device the program is for.

    Args:
      h, activation, quant, valid: as of :func:`gated_act`.
      tile: see :class:`jaxmoe.ops.mosaic.Tile`.
      approximate: False takes the exponential and the division of the C library; ``situ`` always does.
    """
    width = h.shape[-1] // 2
    mosaic.check(h.shape, width, tile)
    approximate = approximate and activation.kind != "situ"
    dtype = None if activation.keep_fp32 or quant is None else h.dtype

    def compute(gate: Array, up: Array) -> Array:
        y = _product(gate, up, activation, approximate)
        # The barrier has two roundings done by one packed instruction.
        return y if dtype is None else lax.optimization_barrier(y.astype(dtype)).astype(jnp.float32)

    from jaxmoe.ops import mosaic_rows  # heavy to import

    op = mosaic_rows.RowOp((0, width), width, compute, h.dtype, quant, approximate)
    return mosaic_rows.run(op, h, valid, tile)


def _product(gate: Array, up: Array, a: Activation, approximate: bool) -> Array:
    sigmoid = functools.partial(_sigmoid, approximate=approximate)
    if a.limit is not None:
        limit = jnp.float32(a.limit)
        gate, up = jnp.minimum(gate, limit), jnp.maximum(jnp.minimum(up, limit), -limit)
    match a.kind:
        case "oai":
            return gate * sigmoid(jnp.float32(a.alpha) * gate) * (up + 1.0)
        case "situ":
            gate, up = (
                jnp.float32(b) * jnp.tanh(x * jnp.float32(1 / b)) * s
                for x, b, s in ((gate, a.beta_gate, sigmoid(gate)), (up, a.beta_up, jnp.float32(1)))
            )
            return gate * up
        case _:
            return gate * sigmoid(gate) * up


def _sigmoid(x: Array, approximate: bool) -> Array:
    y = 1.0 + jnp.exp(-x)
    if not approximate:
        return 1.0 / y
    root = lax.rsqrt(y)
    return root * root


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _plain(h: Array, valid: Array | None, activation: Activation) -> Array:
    y = gated_act_kernel(h, activation, None, valid, TILE)
    assert isinstance(y, jax.Array)
    return y


def _forward(h: Array, valid: Array | None, activation: Activation) -> tuple[Array, tuple[Array, Array | None]]:
    return _plain(h, valid, activation), (h, valid)


def _backward(activation: Activation, saved: tuple[Array, Array | None], dy: Array) -> tuple[Array, None]:
    h, valid = saved
    (dh,) = jax.vjp(lambda h: reference.gated_act(h, activation, quant=None, valid=valid), h)[1](dy)
    return dh, None


_plain.defvjp(_forward, _backward)
