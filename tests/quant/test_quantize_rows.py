"""Row quantisation against NumPy, bit by bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.ops.quantize import dequantize_rows, quantize, row_scales
from jaxmoe.quant import ActivationQuant
from jaxmoe.quant.codecs import FLOOR
from jaxmoe.testing import calc_diff, hostile_blocks, random_rows

QUANTS = [ActivationQuant(128, "float32"), ActivationQuant(128, "ue8m0"), ActivationQuant(32, "ue8m0")]
IDS = [f"{q.block}-{q.scale}" for q in QUANTS]


def in_numpy(x: np.ndarray, quant: ActivationQuant) -> tuple[np.ndarray, np.ndarray]:
    """Codes [M, Kp] and scales [M, S] by the documented recipe; x finite."""
    m, k = x.shape
    x = np.pad(x.astype(np.float32), ((0, 0), (0, -k % 128))).reshape(m, -1, quant.block)
    amax = np.maximum(np.abs(x).max(axis=2), np.float32(FLOOR))
    if quant.scale == "float32":
        scale = amax * np.float32(1 / 448)
    else:
        mantissa, exponent = np.frexp(amax)  # amax = mantissa · 2^exponent, mantissa in [0.5, 1); 448 = 0.875 · 2^9
        scale = np.ldexp(np.float32(1), exponent - 9 + (mantissa > 0.875))
    q = np.clip(x * (np.float32(1) / scale)[..., None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return q.reshape(m, -1), scale


@pytest.mark.parametrize("quant", QUANTS, ids=IDS)
@pytest.mark.parametrize("m, k", [(5, 640), (3, 200), (1, 1), (129, 128)])
def test_codes_and_scales_to_the_bit(quant, m, k, rng):
    x = (rng.normal(size=(m, k)) * np.exp2(rng.integers(-30, 30, (m, 1)))).astype(ml_dtypes.bfloat16)
    got = quantize(jnp.asarray(x), quant)
    codes, scales = in_numpy(x, quant)
    np.testing.assert_array_equal(np.asarray(got.values).view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(row_scales(got), scales)
    rows = m + (-m % 4)
    shape = (scales.shape[1], rows) if quant.scale == "float32" else (-(-scales.shape[1] // 4), rows)
    assert got.scales.shape == shape
    jax.tree.map(np.testing.assert_array_equal, jax.jit(quantize, static_argnums=1)(jnp.asarray(x), quant), got)
    assert (
        calc_diff(
            np.asarray(dequantize_rows(got))[:, :k] / np.abs(x.astype(np.float32)).max(1, keepdims=True),
            x.astype(np.float32) / np.abs(x.astype(np.float32)).max(1, keepdims=True),
        )
        < 1e-3
    )


@pytest.mark.parametrize("quant", QUANTS, ids=IDS)
def test_rows_that_are_not_valid_are_neutral_whatever_they_hold(quant, rng):
    x = rng.normal(size=(2, 6, 256)).astype(np.float32)
    valid = np.array([[1, 0, 1, 0, 0, 1], [0] * 6], bool)
    poisoned = np.where(valid[..., None], x, np.float32(np.nan))
    got = quantize(jnp.asarray(poisoned), quant, valid=jnp.asarray(valid))
    clean = quantize(jnp.asarray(x), quant)
    np.testing.assert_array_equal(np.asarray(got.values)[valid], np.asarray(clean.values)[valid])
    np.testing.assert_array_equal(np.asarray(row_scales(got))[valid], np.asarray(row_scales(clean))[valid])
    assert not np.asarray(got.values)[~valid].view(np.uint8).any()
    assert (np.asarray(row_scales(got))[~valid] == 1).all()


@pytest.mark.parametrize("quant", QUANTS, ids=IDS)
def test_no_rows(quant):
    got = quantize(jnp.zeros((3, 0, 256)), quant)
    assert got.values.shape == (3, 0, 256) and got.scales.shape[-1] == 0
    assert dequantize_rows(got).shape == (3, 0, 256)


@pytest.mark.parametrize("quant", QUANTS, ids=IDS)
def test_hostile_blocks_stay_alone(quant):
    blocks = hostile_blocks(quant.block)
    x = np.ones((len(blocks), 256), np.float32)
    x[:, : quant.block] = list(blocks.values())
    got = quantize(jnp.asarray(x), quant)
    scales = np.asarray(row_scales(got))
    assert ((scales > 0) & np.isfinite(scales)).all()
    out = np.asarray(dequantize_rows(got))
    np.testing.assert_array_equal(out[:, quant.block :], 1)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(x))


@pytest.mark.parametrize("quant", QUANTS, ids=IDS)
def test_generated_rows_keep_their_layout(quant, rng):
    rows = random_rows(rng, (2, 5, 384), quant)
    like = quantize(jnp.zeros((2, 5, 384)), quant)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), rows) == jax.tree.map(lambda x: (x.shape, x.dtype), like)
    scales = np.repeat(np.asarray(row_scales(rows)), quant.block, axis=-1)
    np.testing.assert_array_equal(dequantize_rows(rows), np.asarray(rows.values).astype(np.float32) * scales)


def test_refusals():
    q = QUANTS[0]
    with pytest.raises(FormatError, match="float16; they must be bfloat16 or float32"):
        quantize(jnp.ones((2, 128), jnp.float16), q)
    with pytest.raises(ShapeError, match=r"\(128,\); expected \[\.\.\., M, K\]"):
        quantize(jnp.ones(128), q)
    with pytest.raises(ShapeError, match=r"valid has shape \(3,\); rows of shape \(2, 128\) need \(2,\)"):
        quantize(jnp.ones((2, 128)), q, valid=jnp.ones(3, bool))
    with pytest.raises(FormatError, match="valid has dtype int32; it must be bool"):
        quantize(jnp.ones((2, 128)), q, valid=jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match="quantize has no backend 'none'"):
        quantize(jnp.ones((2, 128)), q, backend="none")
