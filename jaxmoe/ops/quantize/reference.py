"""Row quantisation in plain JAX: the bits every other backend must give."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxmoe.quant.codecs import block_amax, block_scale, e8m0_to_float, to_e4m3
from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.scale_layout import NEUTRAL_BYTE, mn_major_f32, pack_ue8m0, row_major_f32, unpack_ue8m0
from jaxmoe.quant.tensors import QuantizedRows

Array = jax.Array


@functools.partial(jax.jit, static_argnums=1)
def quantize(x: Array, quant: ActivationQuant, *, valid: Array | None = None) -> QuantizedRows:
    """Quantises rows; see :func:`jaxmoe.ops.quantize.quantize`."""
    *lead, m, k = x.shape
    x = x.astype(jnp.float32)
    if valid is not None:
        x = jnp.where(valid[..., None], x, jnp.float32(0))
    kp = -(-k // 128) * 128
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, kp - k)])
    groups = x.reshape(*lead, m, kp // quant.block, quant.block)
    scale, inverse = block_scale(block_amax(groups, -1), quant.scale)
    values = to_e4m3(groups * inverse[..., None]).reshape(*lead, m, kp)
    if valid is not None:
        one = jnp.asarray(1 if quant.scale == "float32" else NEUTRAL_BYTE, dtype=scale.dtype)
        scale = jnp.where(valid[..., None], scale, one)
    lay_out = mn_major_f32 if quant.scale == "float32" else pack_ue8m0
    return QuantizedRows(values, lay_out(scale), quant)


def row_scales(rows: QuantizedRows) -> Array:
    """Scales of quantised rows, row-major.

    Args:
      rows: values [..., M, Kp].

    Returns:
      float32 [..., M, S].
    """
    m, kp = rows.values.shape[-2:]
    if rows.quant.scale == "float32":
        return row_major_f32(rows.scales, m)
    return e8m0_to_float(unpack_ue8m0(rows.scales, m, kp // rows.quant.block))


@jax.jit
def dequantize_rows(rows: QuantizedRows) -> Array:
    """What quantised rows stand for.

    Args:
      rows: values [..., M, Kp].

    Returns:
      float32 [..., M, Kp]; columns past the logical K are 0.
    """
    scales = jnp.repeat(row_scales(rows), rows.quant.block, axis=-1)
    return rows.values.astype(jnp.float32) * scales
