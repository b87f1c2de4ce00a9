"""Load-time conversion between weight formats. What can change a value says so, by an error or a warning."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxmoe.errors import FormatError, LossyConversionError, LossyConversionWarning, ShapeError
from jaxmoe.quant.codecs import E4M3, E4M3_MAX, float_to_e8m0_byte, to_e4m3, ue8m0_exponent
from jaxmoe.quant.formats import BF16, FORMATS, MXFP4, MXFP8, FP8Block, FP8BlockUE8M0, WeightFormat
from jaxmoe.quant.scale_layout import unpack_ue8m0
from jaxmoe.quant.tensors import GroupedWeight
from jaxmoe.quant.weights import (
    assemble,
    canonical_scales,
    decode_values,
    dequantize,
    dequantize_expert,
    quantize_weight,
)

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What a conversion did to the values.

    Attributes:
      changed: number of values that are not exactly the same.
      worst: largest relative error, 1.0 for a value that became 0.
      expert, block_row, block_column: of the 128×128 block with the largest error.
    """

    changed: int
    worst: float
    expert: int
    block_row: int
    block_column: int

    def __str__(self) -> str:
        return (
            f"{self.changed} values change; worst in expert {self.expert}, 128×128 block (row {self.block_row}, "
            f"column {self.block_column}): relative error {self.worst:.3g}"
        )


@functools.partial(jax.jit, static_argnums=2)
def _reblock_all(values: Array, scales: Array, format: WeightFormat) -> tuple[Array, Array, Array, Array]:
    return lax.map(lambda expert: _reblock(expert[0], expert[1], format), (values, scales))


def _reblock(values: Array, scales: Array, format: WeightFormat) -> tuple[Array, Array, Array, Array]:
    """Re-encodes one expert with power-of-two scales as e4m3 with a power-of-two scale per 128×128 block.

    Returns e4m3 [N, Kp], float32 scales [NB, KB], and per block the worst relative error and how many values changed.
    """
    c = decode_values(values, format)
    n, kp = c.shape
    groups, kb = kp // format.block_k, kp // 128
    nb = -(-n // 128)
    byte = unpack_ue8m0(scales, n, groups).astype(jnp.int32)
    amax = jnp.max(jnp.abs(c).reshape(n, groups, format.block_k), axis=2)
    # Where each group alone wants the block's scale. MXFP4: 6 below its exponent, whatever its codes, so that code 6
    # becomes 384; e4m3: the smallest power of two that does not clip.
    wants = byte - 6 if format.bits == 4 else ue8m0_exponent(amax, E4M3_MAX) + byte - 127
    wants = jnp.where(amax > 0, wants, -1024)
    wants = jnp.pad(wants, ((0, nb * 128 - n), (0, 0)), constant_values=-1024)
    best = jnp.max(wants.reshape(nb, 128, kb, groups // kb), axis=(1, 3))
    best = jnp.where(best == -1024, 127, jnp.clip(best, 1, 254))
    shift = byte - jnp.repeat(jnp.repeat(best, 128, axis=0)[:n], groups // kb, axis=1)
    # Beyond 2^±100 every code has long become 0, or was 0; the bound keeps the factor a normal number.
    factor = lax.bitcast_convert_type((jnp.clip(shift, -100, 100) + 127) << 23, jnp.float32)
    v = c * jnp.repeat(factor, format.block_k, axis=1)
    q = to_e4m3(v)
    error = jnp.where(
        v == 0, jnp.float32(0), jnp.abs(q.astype(jnp.float32) - v) / jnp.where(v == 0, jnp.float32(1), jnp.abs(v))
    )
    error = jnp.pad(error, ((0, nb * 128 - n), (0, 0))).reshape(nb, 128, kb, 128)
    scale = lax.bitcast_convert_type(best << 23, jnp.float32)
    return q, scale, jnp.max(error, axis=(1, 3)), jnp.sum(error > 0, axis=(1, 3), dtype=jnp.int32)


def _to_blocks(w: GroupedWeight) -> tuple[GroupedWeight, ConversionReport | None]:
    """FP8Block from a format with power-of-two scales, and a report if that changes values."""
    assert w.scales is not None
    values, scales, worst, changed = _reblock_all(w.values, w.scales, w.format)
    if isinstance(worst, Tracer):
        raise TypeError("weights are converted at load time: whether values change is checked, which cannot be traced")
    out = assemble(values, scales, FP8Block, w.k)
    count = int(jnp.sum(changed))
    if not count:
        return out, None
    expert, row, column = (int(i) for i in jnp.unravel_index(jnp.argmax(worst), worst.shape))
    return out, ConversionReport(count, float(jnp.max(worst)), expert, row, column)


def mxfp4_to_fp8(w: GroupedWeight, *, allow_lossy: bool = False) -> GroupedWeight:
    """MXFP4 as FP8Block: e2m1 codes become e4m3 under a power-of-two scale per 128×128 block.

    The scale puts the block's largest group exponent (of groups that are not all zero) 6 above its own, so that the
    largest code becomes 6·2^6 = 384. A group d below the largest holds multiples of 2^(5-d), and e4m3 has them down to
    2^-9: every code is exact while group exponents in a block differ by at most 14. Beyond, what counts is whether the
    codes in use are.

    Args:
      w: MXFP4.
      allow_lossy: convert also where values change, and report it by one :class:`LossyConversionWarning`.

    Raises:
      LossyConversionError: a value would change; names expert, block and worst error.
      FormatError: ``w`` is not MXFP4.
    """
    _check_format(w, MXFP4)
    out, report = _to_blocks(w)
    if report is not None:
        if not allow_lossy:
            raise LossyConversionError(
                f"MXFP4 to FP8Block is not exact: {report}. Group exponents in that block differ by more than 14; "
                "keep the weights MXFP4, convert to BF16, or pass allow_lossy=True"
            )
        warnings.warn(f"MXFP4 to FP8Block: {report}", LossyConversionWarning, stacklevel=2)
    return out


def mxfp8_to_fp8(w: GroupedWeight) -> GroupedWeight:
    """MXFP8 or FP8BlockUE8M0 as FP8Block, with the smallest power-of-two scale per 128×128 block that clips nothing.

    Exact where the scales within a block lie close enough; otherwise small values lose bits, and one
    :class:`LossyConversionWarning` reports it.
    """
    _check_format(w, MXFP8, FP8BlockUE8M0)
    out, report = _to_blocks(w)
    if report is not None:
        warnings.warn(f"{w.format.name} to FP8Block: {report}", LossyConversionWarning, stacklevel=2)
    return out


@jax.jit
def requantize_ue8m0(w: GroupedWeight) -> GroupedWeight:
    """FP8Block, dequantised and quantised again with scales rounded up to powers of two (what Blackwell needs).

    Scales that are powers of two already keep every value.
    """
    _check_format(w, FP8Block)

    def one(expert: Array) -> tuple[Array, Array]:
        q = quantize_weight(dequantize_expert(w, expert)[None], FP8BlockUE8M0)
        assert q.scales is not None
        return q.values[0], q.scales[0]

    values, scales = lax.map(one, jnp.arange(w.num_experts))
    return GroupedWeight(values, scales, FP8BlockUE8M0, w.k)


def expand_per_tensor(scale: Array, n: int, k: int) -> Array:
    """Repeats one scale per matrix over 128×128 blocks.

    Args:
      scale: float32 [E]. n, k: N and K.

    Returns:
      float32 [E, ⌈N/128⌉, ⌈K/128⌉], for :func:`from_canonical` with FP8Block.
    """
    if scale.ndim != 1:
        raise ShapeError(f"per-tensor scales have shape {scale.shape}; expected [E]")
    shape = (scale.shape[0], -(-n // 128), -(-k // 128))
    return jnp.broadcast_to(jnp.asarray(scale, dtype=jnp.float32)[:, None, None], shape)


def convert(w: GroupedWeight, format: WeightFormat, *, allow_lossy: bool = False) -> GroupedWeight:
    """The same weights in another format, by the one path that leads there.

    =============== ===================================================================================
    to BF16         dequantised, rounded once
    from BF16       quantised
    MXFP4 →         FP8Block, FP8BlockUE8M0: exact or refused (``allow_lossy``); MXFP8: exact
    MXFP8 →         FP8Block, FP8BlockUE8M0: warns where values change
    FP8BlockUE8M0 → MXFP8: exact; FP8Block: warns where values change, which off-grid cuts alone can cause
    FP8Block →      FP8BlockUE8M0: requantised
    =============== ===================================================================================

    Raises:
      FormatError: no path; names both formats and the way out.
      LossyConversionError: MXFP4 that does not fit, without ``allow_lossy``.
    """
    source = w.format
    if source == format:
        return w
    if format == BF16:
        return GroupedWeight(dequantize(w, jnp.bfloat16), None, BF16, w.k)
    if source == BF16:
        return quantize_weight(w.values, format)
    if format == MXFP8 and source.scale == "ue8m0":
        scales = canonical_scales(w)
        assert scales is not None
        wide = jnp.repeat(scales, source.block_k // 32, axis=2)[:, :, : -(-w.k // 32)]
        return assemble(decode_values(w.values, source).astype(E4M3), wide, MXFP8, w.k)
    if format in (FP8Block, FP8BlockUE8M0):
        if source == FP8Block:
            return requantize_ue8m0(w)
        out = mxfp4_to_fp8(w, allow_lossy=allow_lossy) if source == MXFP4 else mxfp8_to_fp8(w)
        if format == FP8Block:
            return out
        assert out.scales is not None
        return assemble(out.values, float_to_e8m0_byte(out.scales), FP8BlockUE8M0, w.k)
    raise FormatError(
        f"no conversion from {source.name} to {format.name}; convert to BF16 first and quantise that, or keep "
        f"{source.name} (formats: {', '.join(FORMATS)})"
    )


def _check_format(w: GroupedWeight, *formats: WeightFormat) -> None:
    if w.format not in formats:
        raise FormatError(f"weights are {w.format.name}; this path takes {' or '.join(f.name for f in formats)}")
