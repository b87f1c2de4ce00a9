"""Building stacks of expert matrices from checkpoint arrays or floats, and reading them back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.quant.codecs import (
    E2M1_MAX,
    E4M3,
    E4M3_MAX,
    block_amax,
    block_scale,
    decode_e2m1,
    e8m0_bytes,
    encode_e2m1,
    float_to_e8m0_byte,
    scale_by_e8m0,
    to_e4m3,
)
from jaxmoe.quant.formats import WeightFormat
from jaxmoe.quant.scale_layout import NEUTRAL_BYTE, pack_ue8m0, unpack_ue8m0
from jaxmoe.quant.tensors import GroupedWeight

Array = jax.Array


def from_canonical(values: Any, scales: Any, format: WeightFormat, k: int | None = None) -> GroupedWeight:
    """Builds a stack from arrays as checkpoints hold them.

    Args:
      values: [E, N, K]: bfloat16 or float32 (BF16), float8_e4m3fn (FP8, MXFP8); MXFP4: uint8 or int8 [E, N, K/2], low
        nibble first, or [E, N, K/32, 16].
      scales: None for BF16. FP8Block: float32 [E, ⌈N/128⌉, ⌈K/128⌉]. FP8BlockUE8M0: likewise, or a row each,
        [E, N, ⌈K/128⌉]; MXFP8 and MXFP4: [E, N, ⌈K/32⌉]; as uint8 exponent bytes, float8_e8m0fnu, or float32 powers
        of two. NumPy or JAX arrays; blocks at the edges may be partial.
      format: what they are.
      k: logical width if the values are already padded beyond it; columns past it are set to 0. The scales may then
        cover either width.

    Returns:
      The stack, K padded with zeros to ``format.k_multiple`` and the scales in the layout of :class:`GroupedWeight`.

    Raises:
      FormatError: dtypes do not belong to the format; a scale is NaN, infinite, negative or, for e8m0, no power of two
        (checked outside of jit only).
      ShapeError: rank or extents.
    """
    values = _check_values(values, format)
    e, n, stored = (*values.shape[:2], values.shape[2] * (2 if format.bits == 4 else 1))
    width = stored if k is None else k
    if not 0 < width <= stored:
        raise ShapeError(f"k is {width}, but the {format.name} values hold {stored} columns; k must be in 1..{stored}")
    if not format.quantized:
        if scales is not None:
            raise FormatError(f"BF16 weights take no scales, got an array of shape {scales.shape}")
        return assemble(values, None, format, width)
    if scales is None:
        raise FormatError(f"{format.name} weights need scales; for unquantised values use BF16 or quantize_weight")
    return assemble(values, _check_scales(scales, format, e, n, {stored, width}), format, width)


def _check_values(values: Any, format: WeightFormat) -> Array:
    allowed = {16: (jnp.bfloat16, jnp.float32), 8: (E4M3,), 4: (jnp.uint8, jnp.int8)}[format.bits]
    if values.dtype not in allowed:
        names = " or ".join(jnp.dtype(a).name for a in allowed)
        raise FormatError(f"{format.name} values have dtype {values.dtype}; they must be {names}")
    if format.bits == 4:
        if values.ndim == 4 and values.shape[3] == format.block_k // 2:
            values = values.reshape(*values.shape[:2], -1)
        if values.dtype == jnp.int8:
            values = lax.bitcast_convert_type(jnp.asarray(values), jnp.uint8)
    if values.ndim != 3:
        raise ShapeError(
            f"{format.name} values have shape {values.shape}; expected [E, N, K]" + ("/2" * (format.bits == 4))
        )
    return jnp.asarray(values)


def _check_scales(scales: Any, format: WeightFormat, e: int, n: int, ks: set[int]) -> Array:
    """Checked scales, for one of the widths: float32, or exponent bytes."""
    rows = {-(-n // format.block_n)} | ({n} if format.scale == "ue8m0" else set())
    expected = {(e, r, -(-k // format.block_k)) for r in rows for k in ks}
    if scales.shape not in expected:
        raise ShapeError(
            f"{format.name} scales have shape {scales.shape}; {e} matrices of {n}×{max(ks)} in blocks of "
            f"{format.block_n}×{format.block_k} need {' or '.join(map(str, sorted(expected)))}"
        )
    if format.scale == "float32":
        if scales.dtype != jnp.float32:
            raise FormatError(f"{format.name} scales have dtype {scales.dtype}; they must be float32")
        scales = jnp.asarray(scales)
        _refuse(~(jnp.isfinite(scales) & (scales >= 0)), scales, "is not a finite number of at least 0")
        return scales
    given = jnp.asarray(scales)
    if scales.dtype == jnp.float32:
        scales = float_to_e8m0_byte(given)
        _refuse(scales == 255, given, "is no power of two; load as FP8Block and convert to requantise")
    elif scales.dtype in (jnp.uint8, jnp.float8_e8m0fnu):
        scales = e8m0_bytes(scales)
        _refuse(scales == 255, scales, "is the e8m0 byte of NaN; bytes must be in 0..254")
    else:
        raise FormatError(
            f"{format.name} scales have dtype {scales.dtype}; they must be uint8, float8_e8m0fnu or float32 powers "
            "of two"
        )
    return scales


def _refuse(bad: Array, scales: Array, why: str) -> None:
    if isinstance(bad, Tracer) or not bad.any():
        return
    expert, row, group = (int(i) for i in jnp.argwhere(bad, size=1)[0])
    raise FormatError(
        f"scale of expert {expert}, block row {row}, group {group} is {scales[expert, row, group]}, which {why}"
    )


@functools.partial(jax.jit, static_argnums=(2, 3))
def assemble(values: Array, scales: Array | None, format: WeightFormat, k: int) -> GroupedWeight:
    """Pads K, blanks columns past k, and lays scales (float32, or bytes per block row or row) out."""
    per = 2 if format.bits == 4 else 1
    n, stored = values.shape[1], values.shape[2] * per
    kp = -(-k // format.k_multiple) * format.k_multiple
    if k < stored:
        values = values[:, :, : -(-k // per)]
        if k % per:
            values = values.at[:, :, -1].set(values[:, :, -1] & 0xF)
    values = jnp.pad(values, ((0, 0), (0, 0), (0, kp // per - values.shape[2])))
    if scales is None:
        return GroupedWeight(values, None, format, k)
    s = kp // format.block_k
    scales = scales[:, :, : -(-k // format.block_k)]
    one = jnp.asarray(1 if format.scale == "float32" else NEUTRAL_BYTE, dtype=scales.dtype)
    scales = jnp.pad(scales, ((0, 0), (0, 0), (0, s - scales.shape[2])), constant_values=one)
    if format.scale == "ue8m0":
        if scales.shape[1] != n:
            scales = jnp.repeat(scales, format.block_n, axis=1)[:, :n]
        scales = pack_ue8m0(scales)
    return GroupedWeight(values, scales, format, k)


def canonical_scales(w: GroupedWeight) -> Array | None:
    """The scales as :func:`from_canonical` takes them.

    Returns:
      None for BF16; float32 [E, ⌈N/128⌉, ⌈K/128⌉] for FP8Block; else bytes, uint8 [E, N, ⌈K/block⌉], a row each (also
      for FP8BlockUE8M0, whose scales are stored by row).
    """
    if w.scales is None:
        return None
    s = -(-w.k // w.format.block_k)
    if w.format.scale == "float32":
        return w.scales[:, :, :s]
    return unpack_ue8m0(w.scales, w.n, w.k_padded // w.format.block_k)[..., :s]


def decode_values(values: Array, format: WeightFormat) -> Array:
    """Stored values as float32 [..., N, Kp], without their scales."""
    return decode_e2m1(values) if format.bits == 4 else values.astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=2)
def _dequantize(values: Array, scales: Array | None, format: WeightFormat) -> Array:
    x = decode_values(values, format)
    if scales is None:
        return x
    n, kp = x.shape[-2:]
    if format.scale == "float32":
        rows = jnp.repeat(scales, format.block_n, axis=-2)[..., :n, :]
        return x * jnp.repeat(rows, format.block_k, axis=-1)
    return scale_by_e8m0(x, jnp.repeat(unpack_ue8m0(scales, n, kp // format.block_k), format.block_k, axis=-1))


def dequantize(w: GroupedWeight, dtype: Any = jnp.float32) -> Array:
    """All matrices in a float dtype.

    Returns:
      [E, N, K], the logical K, computed in float32 and rounded once to ``dtype``.
    """
    return _dequantize(w.values, w.scales, w.format)[..., : w.k].astype(dtype)


def dequantize_expert(w: GroupedWeight, expert: Array | int) -> Array:
    """One matrix, for use inside a loop: nothing of the other experts is materialised.

    Args:
      w: the stack. expert: its index, may be traced; out of range clamps as ``dynamic_index_in_dim`` does.

    Returns:
      float32 [N, Kp].
    """
    scales = None if w.scales is None else lax.dynamic_index_in_dim(w.scales, expert, keepdims=False)
    return _dequantize(lax.dynamic_index_in_dim(w.values, expert, keepdims=False), scales, w.format)


@functools.partial(jax.jit, static_argnums=1)
def _quantize(w: Array, format: WeightFormat) -> tuple[Array, Array]:
    """Codes (columns up to the end of the last block) and canonical scales of [E, N, K], an expert at a time."""
    return lax.map(lambda matrix: _quantize_matrix(matrix.astype(jnp.float32), format), w)


def _quantize_matrix(w: Array, format: WeightFormat) -> tuple[Array, Array]:
    n, k = w.shape
    bn, bk = format.block_n, format.block_k
    nb, kb = -(-n // bn), -(-k // bk)
    w = jnp.pad(w, ((0, nb * bn - n), (0, kb * bk - k)))
    blocks = w.reshape(nb, bn, kb, bk)
    target = E2M1_MAX if format.bits == 4 else E4M3_MAX
    assert format.scale is not None
    scales, inverse = block_scale(block_amax(blocks, (1, 3)), format.scale, target)
    q = (blocks * inverse[:, None, :, None]).reshape(nb * bn, kb * bk)[:n]
    return encode_e2m1(q) if format.bits == 4 else to_e4m3(q), scales


def quantize_weight(w: Any, format: WeightFormat) -> GroupedWeight:
    """Quantises float matrices.

    Scales are made as for activations (see :func:`jaxmoe.quant.codecs.block_scale`), for ``block_n × block_k`` blocks;
    blocks at the edges may be partial. Experts are worked on one at a time.

    Args:
      w: bfloat16 or float32 [E, N, K]. format: any; BF16 casts to bfloat16.

    Raises:
      FormatError: dtype, or NaN in weights for MXFP4, which cannot hold it (checked outside of jit only).
      ShapeError: rank.
    """
    if w.dtype not in (jnp.bfloat16, jnp.float32):
        raise FormatError(f"weights to quantise have dtype {w.dtype}; they must be bfloat16 or float32")
    if w.ndim != 3:
        raise ShapeError(f"weights to quantise have shape {w.shape}; expected [E, N, K]")
    k = w.shape[2]
    w = jnp.asarray(w)
    if not format.quantized:
        return GroupedWeight(w.astype(jnp.bfloat16), None, format, k)
    if format.bits == 4 and not isinstance(w, Tracer) and (nan := jnp.isnan(w)).any():
        expert, row, column = (int(i) for i in jnp.argwhere(nan, size=1)[0])
        raise FormatError(
            f"weight of expert {expert}, row {row}, column {column} is NaN, which {format.name} cannot hold"
        )
    values, scales = _quantize(w, format)
    return assemble(values, scales, format, k)
