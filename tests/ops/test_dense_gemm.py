"""Dense GEMMs of the reference against float64 formulas, over formats and hostile sizes, and their checks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.ops.debug import debug
from jaxmoe.ops.dense_gemm import dense_gemm, prenorm_gemm
from jaxmoe.ops.quantize import quantize, row_scales
from jaxmoe.quant.formats import BF16, FORMATS, MXFP4, MXFP8, FP8Block, WeightFormat
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows
from jaxmoe.quant.weights import dequantize, quantize_weight
from jaxmoe.testing import calc_diff

QUANTIZED = [fmt for fmt in FORMATS.values() if fmt.quantized]


def arrays(rng: np.random.Generator, m: int, n: int, k: int) -> tuple[jax.Array, jax.Array]:
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (1, n, k)))
    return jnp.asarray(x).astype(jnp.bfloat16), jnp.asarray(w).astype(jnp.bfloat16)


def float64(a: Any) -> np.ndarray:
    return np.asarray(a.astype(jnp.float32)).astype(np.float64)


def padded(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, width - x.shape[1])))


@pytest.mark.parametrize(("m", "k"), [(0, 128), (1, 640), (33, 640), (128, 96)])
@pytest.mark.parametrize("fmt", QUANTIZED, ids=lambda fmt: fmt.name)
def test_quantised(rng, fmt: WeightFormat, m, k):
    """Against what the codes stand for, to f32 rounding, and against the unquantised product, to the format's bound."""
    x, w = arrays(rng, m, 72, k)
    weight = quantize_weight(w, fmt)
    rows = quantize(padded(x, weight.k_padded), fmt.activation)
    y = jax.jit(lambda x, w: dense_gemm(x, w, out_dtype=jnp.float32))(rows, weight)
    assert y.shape == (m, 72) and y.dtype == jnp.float32
    scales = np.repeat(np.asarray(row_scales(rows), np.float64), fmt.activation.block, axis=-1)
    codes = float64(rows.values) * scales[:, : weight.k_padded]
    matrix = np.asarray(dequantize(weight), np.float64)[0]
    np.testing.assert_allclose(np.asarray(y), codes[:, :k] @ matrix.T, rtol=0, atol=1e-4)
    assert calc_diff(y, float64(x) @ float64(w)[0].T) <= fmt.max_diff
    rounded = dense_gemm(rows, weight)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(float64(rounded), float64(y.astype(jnp.bfloat16)))


@pytest.mark.parametrize("m", [0, 1, 33])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_unquantised(rng, m, dtype):
    x, w = arrays(rng, m, 24, 96)
    weight = GroupedWeight(w.astype(dtype), None, BF16, 96)
    y = dense_gemm(x.astype(dtype), weight, out_dtype=jnp.float32)
    np.testing.assert_allclose(np.asarray(y), float64(x) @ float64(w)[0].T, rtol=0, atol=1e-4)
    rounded = dense_gemm(x.astype(dtype), weight)
    assert rounded.dtype == dtype
    np.testing.assert_array_equal(float64(rounded), float64(y.astype(dtype)))


@pytest.mark.parametrize("fmt", QUANTIZED, ids=lambda fmt: fmt.name)
def test_unquantised_rows_meet_the_dequantised_weight(rng, fmt):
    x, w = arrays(rng, 5, 40, 256)
    weight = quantize_weight(w, fmt)
    y = dense_gemm(x, weight, out_dtype=jnp.float32)
    np.testing.assert_allclose(np.asarray(y), float64(x) @ float64(dequantize(weight, x.dtype))[0].T, rtol=0, atol=1e-3)


def test_hints_change_nothing(rng):
    x, w = arrays(rng, 5, 40, 64)
    weight = GroupedWeight(w, None, BF16, 64)
    plain, hinted = dense_gemm(x, weight), dense_gemm(x, weight, num_sms=2, pdl=True)
    np.testing.assert_array_equal(float64(plain), float64(hinted))


@pytest.mark.parametrize("m", [0, 1, 70])
def test_prenorm(rng, m):
    x, w = arrays(rng, m, 24, 256)
    product, squares = jax.jit(prenorm_gemm)(x, w[0].astype(jnp.float32))
    assert (product.shape, squares.shape) == ((m, 24), (m,)) and product.dtype == squares.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(product), float64(x) @ float64(w)[0].T, rtol=0, atol=1e-4)
    np.testing.assert_allclose(np.asarray(squares), (float64(x) ** 2).sum(1), rtol=1e-6)


def bf16(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


def stack(e: int, n: int, k: int, fmt: WeightFormat = BF16) -> GroupedWeight:
    return quantize_weight(bf16(e, n, k), fmt)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dense_gemm(bf16(4, 128), stack(2, 8, 128)), ShapeError, "stack of 2; use grouped_gemm"),
        (lambda: dense_gemm(bf16(4, 64), stack(1, 8, 128)), ShapeError, r"x is \[4, 64\]; .* K = 128"),
        (lambda: dense_gemm(bf16(4, 64), stack(1, 8, 96, MXFP4)), ShapeError, "K = 96 or 128"),
        (lambda: dense_gemm(bf16(128), stack(1, 8, 128)), ShapeError, r"x is \[128\]; it must be \[M, K\]"),
        (
            lambda: dense_gemm(quantize(bf16(4, 128), MXFP8.activation), stack(1, 8, 128, FP8Block)),
            FormatError,
            "do not go with FP8Block weights; quantise them as",
        ),
        (lambda: dense_gemm(jnp.zeros((4, 128), jnp.float16), stack(1, 8, 128)), FormatError, "rows are float16"),
        (
            lambda: dense_gemm(bf16(4, 128), stack(1, 8, 128), out_dtype=jnp.float16),
            FormatError,
            "out_dtype is float16; it must be bfloat16 or float32",
        ),
        (lambda: dense_gemm(bf16(4, 128), stack(1, 8, 128), backend="deepgem"), ValueError, "no backend 'deepgem'"),
        (lambda: prenorm_gemm(bf16(4, 64), jnp.zeros((8, 32))), ShapeError, r"\[4, 64\] and weight \[8, 32\]"),
        (
            lambda: prenorm_gemm(bf16(4, 64), bf16(8, 64)),
            FormatError,
            "weight bfloat16; they must be bfloat16 and float32",
        ),
    ],
)
def test_wrong_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def with_byte(words: jax.Array, place: tuple[int, ...], byte: int) -> jax.Array:
    """Sets the lowest exponent byte of one word."""
    return words.at[place].set((words[place] & ~0xFF) | byte)


@pytest.mark.parametrize("byte", [0, 255])
@pytest.mark.parametrize("where", ["rows", "weight"])
def test_debug_mode_finds_bad_exponents(byte, where):
    x, weight = quantize(bf16(6, 256), MXFP4.activation), stack(1, 8, 256, MXFP4)
    if where == "rows":
        x = QuantizedRows(x.values, with_byte(x.scales, (0, 3), byte), x.quant)
        message = rf"1 UE8M0 scales of the rows .* first is {byte} at row \[3\] \(of \[6\]\), columns 0..127"
    else:
        weight = GroupedWeight(weight.values, with_byte(weight.scales, (0, 1, 5), byte), MXFP4, 256)
        message = rf"1 UE8M0 scales of the weight .* first is {byte} at row \[0, 5\] \(of \[1, 8\]\), columns 128..159"
    run = jax.jit(dense_gemm)
    jax.block_until_ready(run(x, weight))
    assert "callback" not in run.lower(x, weight).as_text()
    with debug(), pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s)FormatError: {message}"):
        jax.block_until_ready(run(x, weight))
    jax.block_until_ready(run(x, weight))
