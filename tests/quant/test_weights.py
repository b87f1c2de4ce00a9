"""Stacks of expert matrices: construction, reading back, quantisation, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe import quant
from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.quant import BF16, FORMATS, MXFP4, MXFP8, FP8Block, FP8BlockUE8M0
from jaxmoe.testing import calc_diff, e4m3_codes, hostile_blocks, random_weight

QUANTIZED = [f for f in FORMATS.values() if f.quantized]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def plain(values, scales, format):
    """Dequantised in float64, by a loop over blocks."""
    if format.bits == 4:
        x = E2M1[np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:2], -1)]
    else:
        x = values.astype(np.float64)
    out = np.empty_like(x)
    for e, row, column in np.ndindex(x.shape):
        out[e, row, column] = x[e, row, column] * scales[e, row // format.block_n, column // format.block_k]
    return out


def checkpoint_arrays(rng, format, e, n, k):
    shape = (e, -(-n // format.block_n), -(-k // format.block_k))
    values = rng.integers(0, 256, (e, n, k // 2), dtype=np.uint8) if format.bits == 4 else e4m3_codes(rng, (e, n, k))
    scales = np.exp2(rng.integers(-5, 6, shape)).astype(np.float32)
    if format.scale == "float32":
        scales *= rng.uniform(1, 2, shape).astype(np.float32)
    return values, scales


@pytest.mark.parametrize("format", QUANTIZED, ids=repr)
@pytest.mark.parametrize("e, n, k", [(1, 1, 32), (2, 130, 160)])
def test_a_loaded_stack_means_what_the_checkpoint_means(format, e, n, k, rng):
    values, scales = checkpoint_arrays(rng, format, e, n, k)
    w = quant.from_canonical(values, scales, format)
    want = plain(values, scales, format).astype(np.float32)
    np.testing.assert_array_equal(quant.dequantize(w), want)
    np.testing.assert_array_equal(jax.jit(quant.dequantize)(w), want)
    assert (w.num_experts, w.n, w.k, w.k_padded) == (e, n, k, -(-k // 128) * 128)
    one = jax.jit(quant.dequantize_expert)(w, jnp.int32(e - 1))
    np.testing.assert_array_equal(one[:, :k], want[e - 1])
    assert (np.asarray(one[:, k:]) == 0).all()
    again = quant.from_canonical(w.values, quant.canonical_scales(w), format, k)
    jax.tree.map(np.testing.assert_array_equal, again, w)


@pytest.mark.parametrize("format", [FP8BlockUE8M0, MXFP8, MXFP4], ids=repr)
def test_power_of_two_scales_in_each_of_their_three_types(format, rng):
    values, scales = checkpoint_arrays(rng, format, 2, 130, 160)
    byte = (np.log2(scales) + 127).astype(np.uint8)
    forms = [scales, byte, byte.view(ml_dtypes.float8_e8m0fnu), jnp.asarray(byte)]
    first, *others = [quant.from_canonical(values, s, format) for s in forms]
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)
    rows = np.repeat(byte, format.block_n, axis=1)[:, :130]
    np.testing.assert_array_equal(quant.canonical_scales(first), rows)
    jax.tree.map(np.testing.assert_array_equal, quant.from_canonical(values, rows, format), first)


@pytest.mark.parametrize("format", QUANTIZED, ids=repr)
def test_columns_past_the_logical_width_are_blanked(format, rng):
    values, scales = checkpoint_arrays(rng, format, 2, 5, 256)
    w = quant.from_canonical(values, scales, format, k=101)
    assert w.k == 101 and w.k_padded == 128
    want = plain(values, scales, format)[:, :, :101].astype(np.float32)
    np.testing.assert_array_equal(quant.dequantize(w), want)
    np.testing.assert_array_equal(quant.dequantize_expert(w, 0)[:, 101:], 0)


@pytest.mark.parametrize("format", QUANTIZED, ids=repr)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_quantised_weights_are_close(format, dtype, rng):
    w = jnp.asarray(rng.normal(size=(2, 200, 296)), dtype=dtype)
    q = quant.quantize_weight(w, format)
    assert calc_diff(quant.dequantize(q), w) < format.max_diff
    jax.tree.map(np.testing.assert_array_equal, jax.jit(quant.quantize_weight, static_argnums=1)(w, format), q)


@pytest.mark.parametrize("format", QUANTIZED, ids=repr)
@given(seed=st.integers(0, 2**32 - 1), log=st.floats(-20, 20))
@settings(deadline=None, max_examples=10)
def test_quantising_a_quantised_stack_changes_nothing(format, seed, log):
    rng = np.random.default_rng(seed)
    q = quant.quantize_weight((2.0**log * rng.normal(size=(1, 130, 135))).astype(np.float32), format)
    again = quant.quantize_weight(quant.dequantize(q), format)
    if format.scale == "ue8m0":
        np.testing.assert_array_equal(quant.dequantize(again), quant.dequantize(q))
    else:
        assert calc_diff(quant.dequantize(again), quant.dequantize(q)) < 1e-6


@pytest.mark.parametrize("format", QUANTIZED, ids=repr)
def test_a_hostile_block_stays_alone_and_has_a_sound_scale(format):
    for name in hostile_blocks(1):
        if format.bits == 8 or "nan" not in name:  # NaN for MXFP4 is refused, tested below
            check_hostile(format, name)


def check_hostile(format, name):
    bad = hostile_blocks(format.block_k)[name]
    w = np.ones((1, 2 * format.block_n, 2 * format.block_k), np.float32)
    w[0, 0, : format.block_k] = bad
    q = quant.quantize_weight(w, format)
    scales = np.asarray(quant.canonical_scales(q))
    assert ((scales > 0) & (scales < (255 if scales.dtype == np.uint8 else np.inf))).all()
    out = np.asarray(quant.dequantize(q))
    np.testing.assert_array_equal(out[0, format.block_n :], 1)
    np.testing.assert_array_equal(out[0, :, format.block_k :], 1)
    assert np.isnan(out).sum() == np.isnan(bad).sum()
    assert not np.isinf(out).any() or name in ("huge", "inf", "-inf")


def test_bf16_passes_through(rng):
    w = rng.normal(size=(2, 3, 5)).astype(ml_dtypes.bfloat16)
    g = quant.from_canonical(w, None, BF16)
    np.testing.assert_array_equal(g.values, w)
    assert g.scales is None and quant.canonical_scales(g) is None and g.k_padded == 5
    np.testing.assert_array_equal(quant.dequantize_expert(g, 1), w[1].astype(np.float32))


def test_nbytes_counts_values_and_scales(rng):
    w = random_weight(rng, 2, 128, 256, MXFP4)
    assert w.nbytes == 2 * 128 * 256 // 2 + 2 * 128 * 8


ONES8 = np.ones((2, 128, 256), ml_dtypes.float8_e4m3fn)
ONES4 = np.ones((2, 128, 128), np.uint8)


@pytest.mark.parametrize(
    "values, scales, format, error, message",
    [
        (
            ONES8.astype(np.float32),
            np.ones((2, 1, 2), np.float32),
            FP8Block,
            FormatError,
            "float32; they must be float8_e4m3fn",
        ),
        (
            ONES4.astype(np.float32),
            np.ones((2, 128, 8), np.uint8),
            MXFP4,
            FormatError,
            "float32; they must be uint8 or int8",
        ),
        (ONES8, None, FP8Block, FormatError, "FP8Block weights need scales"),
        (ONES8[0], np.ones((1, 2), np.float32), FP8Block, ShapeError, r"\(128, 256\); expected \[E, N, K\]"),
        (ONES8, np.ones((2, 2, 2), np.float32), FP8Block, ShapeError, r"\(2, 2, 2\).*128×256.*128×128.*\(2, 1, 2\)"),
        (ONES8, np.ones((2, 1, 2), np.float64), FP8Block, FormatError, "float64; they must be float32"),
        (ONES8, np.full((2, 1, 2), np.nan, np.float32), FP8Block, FormatError, "expert 0, block row 0, group 0 is nan"),
        (ONES8, -np.ones((2, 1, 2), np.float32), FP8Block, FormatError, "is -1.0, which is not a finite number"),
        (ONES8, np.full((2, 1, 2), 3, np.float32), FP8BlockUE8M0, FormatError, "is 3.0, which is no power of two"),
        (ONES8, np.ones((2, 128, 8), np.int32), MXFP8, FormatError, "int32; they must be uint8, float8_e8m0fnu"),
        (ONES4, np.full((2, 128, 8), 255, np.uint8), MXFP4, FormatError, "is 255, which is the e8m0 byte of NaN"),
        (ONES4, np.ones((2, 128, 4), np.uint8), MXFP4, ShapeError, r"\(2, 128, 4\).*1×32.*\(2, 128, 8\)"),
        (np.ones((2, 3, 4), np.float16), None, BF16, FormatError, "float16; they must be bfloat16 or float32"),
        (np.ones((2, 3, 4), np.float32), np.ones(3, np.float32), BF16, FormatError, "BF16 weights take no scales"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(values, scales, format, error, message):
    with pytest.raises(error, match=message):
        quant.from_canonical(values, scales, format)


def test_other_refusals():
    with pytest.raises(ShapeError, match=r"k is 300, but the FP8Block values hold 256"):
        quant.from_canonical(ONES8, np.ones((2, 1, 2), np.float32), FP8Block, k=300)
    with pytest.raises(FormatError, match="int32; they must be bfloat16 or float32"):
        quant.quantize_weight(np.ones((1, 2, 3), np.int32), MXFP8)
    with pytest.raises(ShapeError, match=r"\(2, 3\); expected \[E, N, K\]"):
        quant.quantize_weight(np.ones((2, 3), np.float32), MXFP8)
    nan = np.ones((2, 3, 32), np.float32)
    nan[1, 2, 5] = np.nan
    with pytest.raises(FormatError, match="expert 1, row 2, column 5 is NaN, which MXFP4 cannot hold"):
        quant.quantize_weight(nan, MXFP4)


def test_calc_diff_measures():
    x = np.array([3.0, 4.0])
    assert calc_diff(x, x) == 0 and calc_diff(0 * x, 0 * x) == 0
    assert calc_diff(x, -x) == 2
    assert calc_diff(x, 2 * x) == pytest.approx(1 - 4 / 5)
    assert np.isnan(calc_diff(x, np.array([np.nan, 1])))
