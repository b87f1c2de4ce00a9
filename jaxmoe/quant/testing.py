"""Inputs and the measure for tests of anything quantised."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxmoe.quant.codecs import E4M3
from jaxmoe.quant.formats import ActivationQuant, WeightFormat
from jaxmoe.quant.scale_layout import mn_major_f32, pack_ue8m0
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows
from jaxmoe.quant.weights import from_canonical


def calc_diff(a: object, b: object) -> float:
    """How far two arrays are apart: ``1 - 2·Σab / (Σa² + Σb²)`` in float64, the measure of DeepGEMM's own tests.

    Returns:
      0 for equal arrays (also if all zero), NaN if either holds one.
    """
    x, y = (np.asarray(v).astype(np.float64) for v in (a, b))
    norm = (x * x + y * y).sum()
    return float(1 - 2 * (x * y).sum() / norm) if norm != 0 else 0.0


def e4m3_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random finite e4m3 codes, every one of the 254 equally likely (subnormals and both zeros included)."""
    codes = rng.integers(0, 254, shape)
    return (codes + (codes >= 127)).astype(np.uint8).view(E4M3)


def random_weight(
    rng: np.random.Generator, e: int, n: int, k: int, format: WeightFormat, *, exponents: tuple[int, int] = (-6, 2)
) -> GroupedWeight:
    """A stack made of random codes and scales, so that no quantiser stands between a test and its numbers.

    Args:
      rng: source. e, n, k: extents (k even for MXFP4). format: of the stack.
      exponents: bounds (inclusive) of the scales' powers of two; FP8Block's float scales get a random mantissa too.
    """
    if not format.quantized:
        return from_canonical(rng.normal(size=(e, n, k)).astype(jnp.bfloat16), None, format)
    shape = (e, -(-n // format.block_n), -(-k // format.block_k))
    scales = rng.integers(exponents[0], exponents[1] + 1, shape)
    if format.scale == "float32":
        scales = np.ldexp(rng.uniform(1, 2, shape), scales).astype(np.float32)
    else:
        scales = (scales + 127).astype(np.uint8)
    if format.bits == 4:
        return from_canonical(rng.integers(0, 256, (e, n, k // 2), dtype=np.uint8), scales, format)
    return from_canonical(e4m3_codes(rng, (e, n, k)), scales, format)


def random_rows(rng: np.random.Generator, shape: tuple[int, ...], quant: ActivationQuant) -> QuantizedRows:
    """Rows [..., M, Kp] of random codes with scales between 2^-6 and 2^2; Kp must be a multiple of 128."""
    scales = rng.integers(-6, 3, (*shape[:-1], shape[-1] // quant.block))
    if quant.scale == "float32":
        laid_out = mn_major_f32(jnp.asarray(np.ldexp(rng.uniform(1, 2, scales.shape), scales), dtype=jnp.float32))
    else:
        laid_out = pack_ue8m0(jnp.asarray(scales + 127, dtype=jnp.uint8))
    return QuantizedRows(jnp.asarray(e4m3_codes(rng, shape)), laid_out, quant)


def hostile_blocks(block: int) -> dict[str, np.ndarray]:
    """Blocks that break careless quantisers, by name: float32 [block] each."""
    ones = np.ones(block, dtype=np.float32)

    def with_first(value: float) -> np.ndarray:
        return np.concatenate([np.full(1, value, dtype=np.float32), ones[1:]])

    return {
        "zero": 0 * ones,
        "negative zero": -0.0 * ones,
        "tiny": ones * np.float32(1e-30),
        "subnormal": ones * np.float32(1e-40),
        "one tiny": with_first(1e-38),
        "huge": ones * np.finfo(np.float32).max,
        "outlier": with_first(1e30),
        "inf": with_first(np.inf),
        "-inf": with_first(-np.inf),
        "nan": with_first(np.nan),
        "all nan": np.full(block, np.nan, dtype=np.float32),
    }
