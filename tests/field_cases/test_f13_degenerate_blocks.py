"""F13: all-zero, tiny or infinite blocks turn into NaN."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import quant
from jaxmoe.ops.quantize import dequantize_rows, quantize, row_scales
from jaxmoe.quant import ActivationQuant, FP8Block, FP8BlockUE8M0
from jaxmoe.quant.scale_layout import unpack_ue8m0

KINDS = pytest.mark.parametrize("kind", ["float32", "ue8m0"])


def rows() -> np.ndarray:
    x = np.ones((3, 256), np.float32)
    x[0, :128] = 0
    x[1, :128], x[1, 128:] = 1e-30, 1e-40
    x[2, 0], x[2, 128:] = np.inf, 2
    return x


@KINDS
def test_a_scales_are_finite_and_positive(kind):
    q = quantize(jnp.asarray(rows()), ActivationQuant(128, kind))
    scales = np.asarray(row_scales(q))
    assert (np.isfinite(scales) & (scales > 0)).all()
    if kind == "ue8m0":
        assert (np.asarray(unpack_ue8m0(q.scales, 3, 2)) != 255).all()


@KINDS
def test_b_only_the_block_with_the_bad_value_suffers(kind):
    out = np.asarray(dequantize_rows(quantize(jnp.asarray(rows()), ActivationQuant(128, kind))))
    np.testing.assert_array_equal(out[0], rows()[0])
    assert np.isfinite(out[1]).all() and np.abs(out[1]).max() <= 1.1e-30
    assert (out[1, :128] > 0.9e-30).all()  # above the documented floor, so not flushed
    np.testing.assert_array_equal(out[2, 128:], 2)


@KINDS
def test_c_rows_do_not_see_each_other(kind):
    q = ActivationQuant(128, kind)
    all_three, two = quantize(jnp.asarray(rows()), q), quantize(jnp.asarray(rows()[:2]), q)
    np.testing.assert_array_equal(
        np.asarray(all_three.values[:2]).view(np.uint8), np.asarray(two.values).view(np.uint8)
    )
    np.testing.assert_array_equal(row_scales(all_three)[:2], row_scales(two))


@pytest.mark.parametrize("format", [FP8Block, FP8BlockUE8M0], ids=repr)
def test_d_zero_tiles_of_a_weight(format):
    w = np.zeros((1, 256, 256), np.float32)
    w[0, 0, 0] = 1
    q = quant.quantize_weight(w, format)
    assert not np.isnan(np.asarray(q.values).astype(np.float32)).any()
    np.testing.assert_array_equal(quant.dequantize(q), w)
