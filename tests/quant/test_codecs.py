"""Codes and scales bit by bit, against ml_dtypes and exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.errors import FormatError
from jaxmoe.quant import codecs

E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


@pytest.mark.parametrize("jit", [False, True])
def test_e4m3_rounds_to_nearest_even_at_every_midpoint(jit):
    finite = np.sort(E4M3_VALUES[np.isfinite(E4M3_VALUES)])
    mid = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([finite, mid, np.nextafter(mid, np.float32(1e9)), np.nextafter(mid, np.float32(-1e9))])
    cast = jax.jit(codecs.to_e4m3) if jit else codecs.to_e4m3
    got = np.asarray(cast(x)).view(np.uint8)
    np.testing.assert_array_equal(got, x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_e4m3_saturates_and_keeps_nan(dtype):
    x = jnp.asarray([np.inf, -np.inf, 1e30, -1e30, np.nan], dtype=dtype)
    np.testing.assert_array_equal(np.asarray(codecs.to_e4m3(x)).astype(np.float32), [448, -448, 448, -448, np.nan])


def test_e2m1_codes_match_ml_dtypes_and_round_trip():
    packed = np.arange(256, dtype=np.uint8)[:, None]
    got = codecs.decode_e2m1(packed)
    nibbles = np.stack([packed[:, 0] & 15, packed[:, 0] >> 4], axis=1).astype(np.uint8)
    np.testing.assert_array_equal(got, nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    np.testing.assert_array_equal(codecs.encode_e2m1(got), packed)


@given(st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=2))
@settings(deadline=None, max_examples=60)
def test_e2m1_rounding(pair):
    x = np.asarray(pair, dtype=np.float32)
    want = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    got = np.asarray(codecs.encode_e2m1(x))
    assert [got[0] & 15, got[0] >> 4] == list(want)


def test_e2m1_ties_saturation_and_nan():
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.0001, 7, np.inf, -np.inf, np.nan, -0.25, -0.0], np.float32)
    got = codecs.decode_e2m1(codecs.encode_e2m1(x))
    np.testing.assert_array_equal(
        bits(got), bits(np.array([0, 1, 1, 2, 2, 4, 4, 6, 6, 6, -6, 6, -0.0, -0.0], np.float32))
    )


@pytest.mark.parametrize("jit", [False, True])
def test_every_e8m0_byte(jit):
    byte = np.arange(256, dtype=np.uint8)
    want = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
    value = jax.jit(codecs.e8m0_to_float) if jit else codecs.e8m0_to_float
    for scales in (byte, byte.view(ml_dtypes.float8_e8m0fnu), jnp.asarray(byte.view(ml_dtypes.float8_e8m0fnu))):
        np.testing.assert_array_equal(np.asarray(value(scales)), want)
    np.testing.assert_array_equal(codecs.float_to_e8m0_byte(want), byte)


def test_what_is_no_power_of_two_has_the_nan_byte():
    x = np.array([0, -0.0, -1, 3, 1.0000001, np.inf, np.nan, 2.0**-128, 2.0**-149], dtype=np.float32)
    assert (np.asarray(codecs.float_to_e8m0_byte(x)) == 255).all()


def test_e8m0_scales_of_another_dtype_are_refused():
    with pytest.raises(FormatError, match=r"float32.*uint8 or float8_e8m0fnu"):
        codecs.e8m0_to_float(np.ones(3, np.float32))


def test_scaling_by_the_least_byte_is_not_flushed():
    x = np.array([1.0, 6.0, -448.0, 0.5, 448.0], np.float32)
    got = codecs.scale_by_e8m0(x, np.array([2, 0, 0, 254, 255], np.uint8))
    want = np.array([2.0**-125, 6 * 2.0**-127, -448 * 2.0**-127, 2.0**126, np.nan], np.float32)
    np.testing.assert_array_equal(bits(got)[:4], bits(want)[:4])
    assert np.isnan(got[4])


@given(st.floats(2.0**-100, 2.0**100, width=32), st.sampled_from([448.0, 6.0]))
@settings(deadline=None, max_examples=100)
def test_scale_byte_is_the_smallest_that_fits(amax, target):
    scale = Fraction(2) ** (int(codecs.ue8m0_scale_byte(np.float32(amax), target)) - 127)
    assert Fraction(amax) / scale <= target < Fraction(amax) / (scale / 2)


def test_scale_byte_stays_in_range():
    amax = np.array([0, 1e-45, 1e-38, np.finfo(np.float32).max], np.float32)
    assert np.asarray(codecs.ue8m0_scale_byte(amax, 448.0)).tolist() == [1, 1, 1, 247]
    assert np.asarray(codecs.ue8m0_scale_byte(amax, 6.0)).tolist() == [1, 1, 1, 253]


@pytest.mark.parametrize("kind", ["float32", "ue8m0"])
def test_block_scales_have_the_documented_bits_under_jit_too(kind, rng):
    amax = np.exp2(rng.uniform(-110, 127.9, 20_000)).astype(np.float32)
    amax = np.maximum(amax, np.float32(codecs.FLOOR))
    eager = codecs.block_scale(jnp.asarray(amax), kind)
    jitted = jax.jit(lambda a: codecs.block_scale(a, kind))(amax)
    for a, b in zip(eager, jitted, strict=True):
        np.testing.assert_array_equal(a, b)
    if kind == "float32":
        scale = amax * np.float32(1 / 448)
        np.testing.assert_array_equal(eager[0], scale)
        np.testing.assert_array_equal(eager[1], np.float32(1) / scale)
    else:
        np.testing.assert_array_equal(np.asarray(codecs.e8m0_to_float(eager[0])) * np.asarray(eager[1]), 1)
