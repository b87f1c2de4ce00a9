"""The index formulas of the two kernel layouts, element by element."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxmoe.errors import ShapeError
from jaxmoe.quant.scale_layout import mn_major_f32, pack_ue8m0, row_major_f32, unpack_ue8m0

SHAPES = [(1, 1, 1), (2, 3, 5), (3, 6, 90), (1, 129, 7), (2, 4, 4), (1, 5, 8), (2, 0, 3)]


@pytest.mark.parametrize("g, m, s", SHAPES)
def test_float_layout(g, m, s, rng):
    scales = rng.uniform(1, 9, (g, m, s)).astype(np.float32)
    laid = np.asarray(mn_major_f32(scales))
    ma = (m + 3) // 4 * 4
    assert laid.shape == (g, s, ma)
    flat = laid.ravel()
    for gi in range(g):
        for si in range(s):
            for mi in range(ma):
                want = scales[gi, mi, si] if mi < m else 1
                assert flat[(gi * s + si) * ma + mi] == want
    np.testing.assert_array_equal(row_major_f32(mn_major_f32(scales), m), scales)


@pytest.mark.parametrize("fill", [127, 0])
@pytest.mark.parametrize("g, m, s", SHAPES)
def test_packed_layout(g, m, s, fill, rng):
    e = rng.integers(0, 255, (g, m, s)).astype(np.uint8)
    words = np.asarray(pack_ue8m0(e, fill=fill))
    ma, p = (m + 3) // 4 * 4, (s + 3) // 4
    assert words.shape == (g, p, ma) and words.dtype == np.int32
    flat = words.ravel().view(np.uint32)
    for gi in range(g):
        for pi in range(p):
            for mi in range(ma):
                word = int(flat[(gi * p + pi) * ma + mi])
                for j in range(4):
                    group = 4 * pi + j
                    want = e[gi, mi, group] if mi < m and group < s else fill
                    assert word >> (8 * j) & 0xFF == want
    np.testing.assert_array_equal(unpack_ue8m0(pack_ue8m0(e, fill=fill), m, s), e)


def test_layouts_are_the_same_under_jit(rng):
    e = rng.integers(0, 255, (5, 6)).astype(np.uint8)
    np.testing.assert_array_equal(jax.jit(pack_ue8m0)(e), pack_ue8m0(e))
    f = rng.uniform(size=(5, 6)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(mn_major_f32)(f), mn_major_f32(f))


def test_wrong_extents_are_refused():
    with pytest.raises(ShapeError, match=r"5 rows has row stride 8, got 4"):
        row_major_f32(mn_major_f32(np.ones((4, 2), np.float32)), 5)
    with pytest.raises(ShapeError, match=r"2 words a row do not hold 9 scale groups; expected 3"):
        unpack_ue8m0(pack_ue8m0(np.ones((4, 8), np.uint8)), 4, 9)
