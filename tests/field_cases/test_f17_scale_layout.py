"""F17: scale tensor layout (the layout part): K groups not a multiple of 4, row stride, major order."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.ops.quantize import dequantize_rows, row_scales
from jaxmoe.quant import ActivationQuant, QuantizedRows
from jaxmoe.quant.scale_layout import mn_major_f32, pack_ue8m0, unpack_ue8m0


def byte_of(m: int, groups: int) -> np.ndarray:
    row, group = np.ogrid[:m, :groups]
    return (120 + group + np.where(row < 6, 3 * row, 0)).astype(np.uint8)


def test_a_words_of_five_groups():
    words = np.asarray(pack_ue8m0(byte_of(6, 5))).view(np.uint32)
    assert words.shape == (2, 8)  # word-major, row stride 6 rounded up to 4
    assert words[0, 0] == 0x7B7A7978
    assert words[1, 0] & 0xFF == 0x7C and words[1, 0] >> 8 == 0x7F7F7F  # the top bytes are scales of 1: neutral
    assert (words[:, 6:] == 0x7F7F7F7F).all()
    zeroed = np.asarray(pack_ue8m0(byte_of(6, 5), fill=0)).view(np.uint32)  # as DeepGEMM's own packing leaves them
    assert zeroed[:, 0].tolist() == [0x7B7A7978, 0x0000007C]


@pytest.mark.parametrize("k", [128, 384, 640, 896, 1152])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 6, 127, 129])
def test_c_rows_mean_the_same_in_both_layouts(k, m):
    groups = k // 128
    byte = byte_of(m, groups)
    scales = np.ldexp(np.float32(1), byte.astype(int) - 127)
    codes = jnp.ones((m, k), jnp.float8_e4m3fn)
    packed = QuantizedRows(codes, pack_ue8m0(byte), ActivationQuant(128, "ue8m0"))
    floats = QuantizedRows(codes, mn_major_f32(scales), ActivationQuant(128, "float32"))
    np.testing.assert_array_equal(unpack_ue8m0(packed.scales, m, groups), byte)
    want = np.where(np.arange(m) < 6, 8.0 ** np.minimum(np.arange(m), 6), 1) * (2**groups - 1)
    for rows in (packed, floats):
        np.testing.assert_array_equal(row_scales(rows), scales)
        assert rows.scales.shape[-1] == -(-m // 4) * 4
        np.testing.assert_array_equal(np.asarray(dequantize_rows(rows)).sum(axis=1), want)


def test_b_ninety_groups_of_32():
    byte = np.broadcast_to(127 + np.arange(90) % 3, (2, 90)).astype(np.uint8)
    words = pack_ue8m0(byte)
    assert words.shape == (23, 4)
    np.testing.assert_array_equal(unpack_ue8m0(words, 2, 90), byte)
    assert (np.exp2(np.asarray(unpack_ue8m0(words, 2, 90)).astype(float) - 127) * 32).sum(axis=1).tolist() == [6720] * 2
