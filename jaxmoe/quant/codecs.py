"""What bits mean: e4m3 and e2m1 values, e8m0 scales, and how a block's largest magnitude becomes its scale.

Everything is exact integer or IEEE float32 arithmetic, written so that any backend can give the same bits: no
division by a constant (XLA turns it into a product with a rounded reciprocal under jit, not eagerly), no arithmetic on
subnormal numbers (XLA on CPU takes them for 0).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmoe.errors import FormatError
from jaxmoe.quant.formats import ScaleKind

Array = jax.Array

E4M3 = jnp.float8_e4m3fn
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 to 7; bit 3 is the sign."""

FLOOR = 2.0**-100
"""Least magnitude a block's scale is made for (about 7.9e-31).

A block whose largest magnitude is smaller gets the scale of one with exactly this magnitude: zero blocks have a finite
positive scale, and values far below the floor quantise to 0. Upstream quantisers use 1e-4 (DeepGEMM's tests) or 1e-10
(SGLang), which flush real values of small blocks; 2^-100 is as low as a product of two such scales stays harmless.
"""

_F32_MAX = float(np.finfo(np.float32).max)
_ONE = 127  # the e8m0 byte of 1.0


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _f32(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def to_e4m3(x: Array) -> Array:
    """Casts to e4m3 with saturation.

    Args:
      x: floats of any shape.

    Returns:
      float8_e4m3fn, rounded to nearest even. Magnitudes above 448, infinities included, become ±448; NaN stays NaN.
    """
    return jnp.clip(jnp.asarray(x, dtype=jnp.float32), -E4M3_MAX, E4M3_MAX).astype(E4M3)


def decode_e2m1(packed: Array) -> Array:
    """Decodes e2m1 codes, two a byte.

    Args:
      packed: uint8 [..., K/2]; the low nibble is the even element.

    Returns:
      float32 [..., K].
    """
    packed = jnp.asarray(packed, dtype=jnp.uint8)
    codes = jnp.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    table = jnp.asarray([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=jnp.float32)
    return table[codes]


def encode_e2m1(x: Array) -> Array:
    """Rounds to e2m1 (to nearest, ties to the even code) and packs two codes a byte.

    Args:
      x: floats [..., K], K even. Magnitudes above 6 saturate; NaN, which e2m1 cannot hold, becomes 6 as in PTX's
        ``cvt.rn.satfinite``.

    Returns:
      uint8 [..., K/2]; the low nibble is the even element.
    """
    x = jnp.asarray(x, dtype=jnp.float32)
    x = jnp.where(jnp.isnan(x), jnp.float32(E2M1_MAX), x)
    a = jnp.abs(x)
    # Midpoints between neighbouring magnitudes; a tie goes up where the upper code is even.
    up = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0)
    code = sum((u.astype(jnp.uint8) for u in up), jnp.where(jnp.signbit(x), jnp.uint8(8), jnp.uint8(0)))
    return code[..., 0::2] | (code[..., 1::2] << 4)


def e8m0_bytes(scales: Any) -> Array:
    """The exponent bytes of e8m0 scales, by bit pattern.

    Args:
      scales: uint8, or float8_e8m0fnu, whose bits are reinterpreted and never converted as numbers.

    Returns:
      uint8 of the same shape.

    Raises:
      FormatError: another dtype.
    """
    if scales.dtype == jnp.uint8:
        return jnp.asarray(scales)
    if scales.dtype == jnp.float8_e8m0fnu:
        return lax.bitcast_convert_type(jnp.asarray(scales), jnp.uint8)
    raise FormatError(f"e8m0 scales have dtype {scales.dtype}; they must be uint8 or float8_e8m0fnu")


def e8m0_to_float(scales: Any) -> Array:
    """Values of e8m0 scales.

    Args:
      scales: uint8 bytes or float8_e8m0fnu.

    Returns:
      float32: 2^(byte - 127); byte 0 is the subnormal 2^-127, byte 255 NaN. Multiply with :func:`scale_by_e8m0`
      where byte 0 can occur.
    """
    byte = e8m0_bytes(scales).astype(jnp.int32)
    bits = jnp.where(byte == 0, 1 << 22, byte << 23)
    return _f32(jnp.where(byte == 255, 0x7FC00000, bits))


def float_to_e8m0_byte(x: Array) -> Array:
    """Exponent bytes of powers of two.

    Args:
      x: float32.

    Returns:
      uint8: exact for 2^-127 to 2^127; 255, the e8m0 NaN, for everything else.
    """
    bits = _bits(jnp.asarray(x, dtype=jnp.float32))
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    valid = (exponent > 0) & (exponent < 255) & (mantissa == 0)
    return jnp.where(bits == 1 << 22, 0, jnp.where(valid, exponent, 255)).astype(jnp.uint8)


def scale_by_e8m0(x: Array, byte: Array) -> Array:
    """``x * 2^(byte - 127)``, exact also for byte 0, whose value alone would be flushed to 0.

    Args:
      x: float32. byte: uint8, broadcastable to x; 255 gives NaN.

    Returns:
      float32.
    """
    byte = byte.astype(jnp.int32)
    half = byte >> 1
    scaled = x * _f32((half + 64) << 23) * _f32((byte - half + 63) << 23)
    return jnp.where(byte == 255, jnp.float32(jnp.nan), scaled)


def ue8m0_exponent(amax: Array, target_max: float) -> Array:
    """Exponent byte, not clamped, of the smallest power of two s with ``amax / s <= target_max``.

    Args:
      amax: float32, at least 0; subnormals count as less than 2^-126.
      target_max: largest magnitude of the value format, 448 or 6.

    Returns:
      int32; below 1 where the scale is no normal float32.
    """
    top = int(np.float32(target_max).view(np.int32))
    bits = _bits(amax)
    return (bits >> 23) - (top >> 23) + _ONE + ((bits & 0x7FFFFF) > (top & 0x7FFFFF)).astype(jnp.int32)


def ue8m0_scale_byte(amax: Array, target_max: float) -> Array:
    """Byte of the smallest power of two s with ``amax / s <= target_max``, from the bits alone, so exact.

    Args:
      amax: float32, finite, at least 0.
      target_max: 448 (e4m3) or 6 (e2m1).

    Returns:
      uint8 in 1..254.
    """
    return jnp.clip(ue8m0_exponent(jnp.asarray(amax, dtype=jnp.float32), target_max), 1, 254).astype(jnp.uint8)


def block_amax(x: Array, axis: int | tuple[int, ...]) -> Array:
    """Largest magnitude of a block, as scales are made from it.

    Args:
      x: float32. axis: reduced.

    Returns:
      float32 in [FLOOR, largest float32]. NaN does not count, so a NaN spoils only itself; an infinity counts as the
      largest float32, so it saturates there and the rest of its block quantises to 0.
    """
    amax = jnp.max(jnp.where(jnp.isnan(x), jnp.float32(0), jnp.abs(x)), axis=axis, initial=0.0)
    return jnp.clip(amax, FLOOR, _F32_MAX)


def block_scale(amax: Array, kind: ScaleKind, target_max: float = E4M3_MAX) -> tuple[Array, Array]:
    """Scale of a block and what to multiply its values with.

    ``float32``: ``scale = amax · fl(1/target_max)``, ``inverse = 1 / scale``, each rounded once, to nearest even.
    ``ue8m0``: the scale's byte from :func:`ue8m0_scale_byte`, and the exact inverse power of two.

    Args:
      amax: float32 from :func:`block_amax`.
      kind: of the scale.
      target_max: 448 or 6.

    Returns:
      scale (float32, or uint8 for ``ue8m0``), inverse (float32); ``code = cast(x · inverse)``.
    """
    if kind == "float32":
        scale = amax * jnp.float32(1 / target_max)
        return scale, 1 / scale
    byte = ue8m0_scale_byte(amax, target_max)
    return byte, _f32((254 - byte.astype(jnp.int32)) << 23)
