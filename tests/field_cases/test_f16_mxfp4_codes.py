"""F16: MXFP4 weights decoded wrongly: scale bytes converted as numbers, nibbles swapped (parts A to C)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jaxmoe import quant
from jaxmoe.quant import MXFP4
from jaxmoe.quant.codecs import decode_e2m1, e8m0_to_float

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def test_a_every_code():
    packed = np.arange(0, 16, 2, dtype=np.uint8) | (np.arange(1, 16, 2, dtype=np.uint8) << 4)
    got = np.asarray(decode_e2m1(packed))
    np.testing.assert_array_equal(got.view(np.uint32), VALUES.view(np.uint32))


@pytest.mark.parametrize("byte, ones, alternating", [(127, 72, 28), (130, 576, 224)])
@pytest.mark.parametrize("stored", ["uint8", "float8_e8m0fnu", "int8 codes", "groups of 16 bytes"])
def test_b_the_low_nibble_is_the_even_element(stored, byte, ones, alternating):
    packed = np.tile(np.array([0x10, 0x32, 0x54, 0x76], np.uint8), 4)[None, None]
    scales = np.full((1, 1, 1), byte, np.uint8)
    if stored == "float8_e8m0fnu":
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    elif stored == "int8 codes":
        packed = packed.view(np.int8)
    elif stored == "groups of 16 bytes":
        packed = packed.reshape(1, 1, 1, 16)
    w = np.asarray(quant.dequantize(quant.from_canonical(packed, scales, MXFP4)))[0, 0]
    np.testing.assert_array_equal(w, np.tile(VALUES[:8], 4) * 2.0 ** (byte - 127))
    assert w @ np.ones(32) == ones and w @ np.tile([1, 0], 16) == alternating


def test_c_scale_bytes_are_bits_in_both_types():
    byte = np.array([0, 120, 127, 130, 254, 255], np.uint8)
    want = np.array([2.0**-127, 2.0**-7, 1, 8, 2.0**127, np.nan], np.float32)
    for scales in (byte, byte.view(ml_dtypes.float8_e8m0fnu)):
        np.testing.assert_array_equal(np.asarray(e8m0_to_float(scales)), want)
