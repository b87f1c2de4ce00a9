"""Cuts and joins never change a value."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe import quant
from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.quant import FORMATS, MXFP4, FP8Block
from jaxmoe.testing import random_weight

ALL = list(FORMATS.values())


@pytest.mark.parametrize("format", ALL, ids=repr)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=2)
def test_cuts_hold_the_same_values(format, data, seed):
    n, k = 300, 420
    w = random_weight(np.random.default_rng(seed), 2, n, k, format)
    full = np.asarray(quant.dequantize(w))
    step = format.block_n if format.scale == "float32" else 1
    start = data.draw(st.integers(0, (n - 1) // step)) * step
    stop = data.draw(st.integers(start + 1, n))
    np.testing.assert_array_equal(quant.dequantize(quant.slice_n(w, [(start, stop)])), full[:, start:stop])
    start = data.draw(st.integers(0, (k - 1) // format.block_k)) * format.block_k
    stop = data.draw(st.integers(start + 1, k))
    cut = quant.slice_k(w, start, stop)
    assert (cut.k, cut.k_padded % format.k_multiple) == (stop - start, 0)
    np.testing.assert_array_equal(quant.dequantize(cut), full[:, :, start:stop])
    np.testing.assert_array_equal(quant.dequantize_expert(cut, 1)[:, cut.k :], 0)


@pytest.mark.parametrize("format", ALL, ids=repr)
def test_a_widened_cut_is_exact_and_zero_outside(format, rng):
    w = random_weight(rng, 2, 320, 320, format)
    full = np.asarray(quant.dequantize(w))
    rows = np.asarray(quant.dequantize(quant.slice_n(w, [(40, 100), (160, 320)], grid=128)))
    assert rows.shape == (2, 128 + 256, 320)
    want = np.zeros_like(rows)
    want[:, 40:100], want[:, 128 + 32 : 128 + 192] = full[:, 40:100], full[:, 160:320]
    np.testing.assert_array_equal(rows, want)
    columns = quant.slice_k(w, 161, 320, grid=128)
    want = np.zeros((2, 320, 256), np.float32)
    want[:, :, 33:192] = full[:, :, 161:320]
    assert columns.k == 256
    np.testing.assert_array_equal(quant.dequantize(columns), want)
    whole = quant.slice_k(w, 1, 99, grid=128)
    np.testing.assert_array_equal(quant.dequantize(whole)[:, :, 1:99], full[:, :, 1:99])
    np.testing.assert_array_equal(quant.dequantize(whole)[:, :, [0, 99, 127]], 0)


@pytest.mark.parametrize("format", ALL, ids=repr)
def test_parts_join_to_the_whole(format, rng):
    w = random_weight(rng, 4, 256, 160, format)
    join_n = quant.concat_n([quant.slice_n(w, [(0, 128)]), quant.slice_n(w, [(128, 256)])])
    join_e = quant.stack_experts([quant.slice_experts(w, 0, 1), quant.slice_experts(w, 1, 4)])
    for joined in (join_n, join_e, jax.jit(lambda w: quant.slice_n(w, [(0, 128), (128, 256)]))(w)):
        jax.tree.map(np.testing.assert_array_equal, joined, w)
    padded = quant.pad_n(w, 333)
    np.testing.assert_array_equal(quant.dequantize(padded)[:, :256], quant.dequantize(w))
    np.testing.assert_array_equal(quant.dequantize(padded)[:, 256:], 0)
    assert quant.from_canonical(padded.values, quant.canonical_scales(padded), format, 160).n == 333
    for k in (160, 170, 300):
        padded = quant.pad_k(w, k)
        assert (padded.k, padded.k_padded) == (k, -(-k // format.k_multiple) * format.k_multiple)
        np.testing.assert_array_equal(quant.dequantize(padded)[:, :, :160], quant.dequantize(w))
        np.testing.assert_array_equal(quant.dequantize(padded)[:, :, 160:], 0)


def test_what_cannot_be_exact_is_refused_with_the_numbers(rng):
    w = random_weight(rng, 2, 320, 320, FP8Block)
    with pytest.raises(ShapeError, match=r"rows 160:320 cut a block of FP8Block.*128 rows.*320.*grid=128"):
        quant.slice_n(w, [(160, 320)])
    with pytest.raises(ShapeError, match=r"rows 0:160 cut"):
        quant.slice_n(w, [(0, 160), (256, 320)])
    with pytest.raises(ShapeError, match=r"columns 160:320 cut a block.*128 columns"):
        quant.slice_k(w, 160, 320)
    with pytest.raises(ShapeError, match=r"after 320 rows of FP8Block.*block 128.*pad_n to 384"):
        quant.concat_n([w, w])
    with pytest.raises(ShapeError, match=r"experts 1:3 are not within 0:2"):
        quant.slice_experts(w, 1, 3)
    with pytest.raises(ShapeError, match=r"cannot pad 320 rows to 10"):
        quant.pad_n(w, 10)
    with pytest.raises(ShapeError, match=r"cannot pad 320 columns to 10"):
        quant.pad_k(w, 10)
    with pytest.raises(FormatError, match=r"different format: jaxmoe.FP8Block, jaxmoe.MXFP4"):
        quant.concat_n([w, random_weight(rng, 2, 320, 320, MXFP4)])
    with pytest.raises(ShapeError, match="different n: 320, 64"):
        quant.stack_experts([w, random_weight(rng, 2, 64, 320, FP8Block)])
