"""The load-time paths between formats."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import quant
from jaxmoe.errors import FormatError, LossyConversionError, LossyConversionWarning, ShapeError
from jaxmoe.quant import BF16, FORMATS, MXFP4, MXFP8, FP8Block, FP8BlockUE8M0
from jaxmoe.testing import calc_diff, random_weight

ALL_CODES = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8)


def two_groups(low: int, high: int, low_codes=ALL_CODES) -> quant.GroupedWeight:
    """One block whose group 1 has exponent byte ``low``, all others ``high``; every code in each."""
    values = np.broadcast_to(np.tile(ALL_CODES, 8), (1, 1, 64)).copy()
    values[0, 0, 16:32] = np.resize(low_codes, 16)
    return quant.from_canonical(values, np.array([[[high, low, high, high]]], np.uint8), MXFP4)


def test_mxfp4_is_exact_up_to_14_apart():
    top = [140, 127, 30, 16, 254]
    w = quant.stack_experts([two_groups(t - apart, t) for t in top for apart in range(15)])
    out = quant.mxfp4_to_fp8(w)
    assert np.asarray(out.scales[:, 0, 0]).tolist() == [2.0 ** (t - 127 - 6) for t in top for _ in range(15)]
    np.testing.assert_array_equal(quant.dequantize(out), quant.dequantize(w))
    assert (np.abs(np.asarray(out.values).astype(np.float32)).max(axis=(1, 2)) == 384).all()


def test_mxfp4_is_refused_from_15_apart_if_the_codes_need_it():
    w = two_groups(112, 127)
    with pytest.raises(
        LossyConversionError, match=r"8 values change.*expert 0.*row 0, column 0.*relative error 1\."
    ) as e:
        quant.mxfp4_to_fp8(w)
    assert "14" in str(e.value) and "allow_lossy" in str(e.value)
    with pytest.warns(LossyConversionWarning, match=r"8 values change"):
        out = quant.mxfp4_to_fp8(w, allow_lossy=True)
    error = np.abs(np.asarray(quant.dequantize(out)) - np.asarray(quant.dequantize(w)))
    assert error.max() == 0.5 * 2.0**-15 and (error[0, 0, :32] == 0).all()
    # The same exponents, but only codes 1, 2, 3, 4, 6 in the small group.
    quant.mxfp4_to_fp8(two_groups(112, 127, low_codes=np.array([0x42, 0x65, 0x7C], np.uint8)))


@pytest.mark.parametrize("apart", [16, 40, 120, 126])
def test_the_report_names_the_right_block(apart):
    values = np.zeros((3, 300, 192), np.uint8)
    values[2, 150, 64:80], values[2, 151, 70] = 0x11, 0x77
    scales = np.full((3, 300, 12), 127, np.uint8)
    scales[2, 150, :] = 127 - apart
    with pytest.raises(LossyConversionError, match=r"32 values change.*expert 2.*row 1, column 1.*error 1\."):
        quant.mxfp4_to_fp8(quant.from_canonical(values, scales, MXFP4))


def test_groups_of_zeros_do_not_count():
    values = np.broadcast_to(np.tile(ALL_CODES, 8), (1, 1, 64)).copy()
    values[..., :16] = 0x80
    w = quant.from_canonical(values, np.array([[[254, 127, 127, 120]]], np.uint8), MXFP4)
    np.testing.assert_array_equal(quant.dequantize(quant.mxfp4_to_fp8(w)), quant.dequantize(w))
    zero = quant.from_canonical(0 * values, np.array([[[3, 9, 127, 200]]], np.uint8), MXFP4)
    out = quant.mxfp4_to_fp8(zero)
    assert float(out.scales[0, 0, 0]) == 1 and not np.asarray(out.values).astype(np.float32).any()


def test_the_smallest_exponents_have_a_normal_scale():
    w = two_groups(0, 3)
    out = quant.mxfp4_to_fp8(w)
    assert float(out.scales[0, 0, 0]) == 2.0**-126
    got = np.asarray(out.values).astype(np.float64) * 2.0**-126
    want = np.concatenate([np.tile([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], 8)]).astype(
        np.float64
    )
    np.testing.assert_array_equal(got[0, 0], want * np.repeat([2.0**-124, 2.0**-127, 2.0**-124, 2.0**-124], 32))


@pytest.mark.parametrize("source", FORMATS.values(), ids=repr)
@pytest.mark.parametrize("target", FORMATS.values(), ids=repr)
def test_every_pair_converts_close_or_is_refused_by_name(source, target, rng):
    w = random_weight(rng, 2, 200, 320, source)
    want = quant.dequantize(w)
    if (target == MXFP4 and source not in (BF16, MXFP4)) or (source, target) == (FP8Block, MXFP8):
        with pytest.raises(
            FormatError, match=f"no conversion from {source.name} to {target.name}; convert to BF16 first"
        ):
            quant.convert(w, target)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossyConversionWarning)
        out = quant.convert(w, target)
    assert out.format == target and (out.n, out.k) == (200, 320)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == jax.tree.map(
        lambda x: (x.shape, x.dtype), random_weight(rng, 2, 200, 320, target)
    )
    assert calc_diff(quant.dequantize(out), want) < max(target.max_diff, 1e-5)
    exact = {
        (MXFP4, FP8Block),
        (MXFP4, FP8BlockUE8M0),
        (MXFP4, MXFP8),
        (FP8BlockUE8M0, MXFP8),
        (FP8BlockUE8M0, FP8Block),
    }
    if (source, target) in exact or source == target or (target == BF16 and source != FP8Block):
        np.testing.assert_array_equal(quant.dequantize(out), want)


def test_requantising_rounds_scales_up_and_keeps_powers_of_two(rng):
    values = np.full((1, 128, 256), 448, np.float32).astype(jnp.float8_e4m3fn)
    w = quant.from_canonical(values, np.array([[[1.0, 1.25]]], np.float32), FP8Block)
    out = quant.convert(w, FP8BlockUE8M0)
    assert (np.asarray(quant.canonical_scales(out))[0] == [127, 128]).all()
    np.testing.assert_array_equal(quant.dequantize(out)[0, 0, ::128], [448, 576])  # 448 · 1.25 / 2 rounds to 288
    powers = random_weight(rng, 2, 200, 200, FP8BlockUE8M0)
    back = quant.convert(quant.convert(powers, FP8Block), FP8BlockUE8M0)
    np.testing.assert_array_equal(quant.dequantize(back), quant.dequantize(powers))


def test_mxfp8_warns_only_where_values_change():
    values = np.ones((2, 1, 128), jnp.float8_e4m3fn)
    near = quant.from_canonical(values, np.array([[[120, 121, 122, 123]]] * 2, np.uint8), MXFP8)
    np.testing.assert_array_equal(quant.dequantize(quant.mxfp8_to_fp8(near)), quant.dequantize(near))
    far = quant.from_canonical(values, np.array([[[120] * 4], [[100, 127, 127, 127]]], np.uint8), MXFP8)
    with pytest.warns(
        LossyConversionWarning, match=r"MXFP8 to FP8Block: 32 values change; worst in expert 1.*error 1$"
    ):
        quant.mxfp8_to_fp8(far)


def test_per_tensor_scales_become_blocks(rng):
    values = rng.normal(size=(2, 130, 200)).astype(np.float32).astype(jnp.float8_e4m3fn)
    scales = quant.expand_per_tensor(np.array([0.5, 3.0], np.float32), 130, 200)
    w = quant.from_canonical(values, scales, FP8Block)
    want = values.astype(np.float32) * np.array([0.5, 3.0], np.float32)[:, None, None]
    np.testing.assert_array_equal(quant.dequantize(w), want)
    with pytest.raises(ShapeError, match=r"\(1, 1\); expected \[E\]"):
        quant.expand_per_tensor(np.ones((1, 1), np.float32), 130, 200)


def test_paths_refuse_other_formats_and_tracing(rng):
    with pytest.raises(FormatError, match="weights are FP8Block; this path takes MXFP4"):
        quant.mxfp4_to_fp8(random_weight(rng, 1, 4, 128, FP8Block))
    with pytest.raises(TypeError, match="at load time"):
        jax.jit(quant.mxfp4_to_fp8)(random_weight(rng, 1, 4, 128, MXFP4))
