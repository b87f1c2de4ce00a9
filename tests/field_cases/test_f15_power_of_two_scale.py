"""F15: power-of-two scale rounded the wrong way: the block maximum is clipped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import quant
from jaxmoe.ops.quantize import quantize, row_scales
from jaxmoe.quant import MXFP4, MXFP8, ActivationQuant
from jaxmoe.quant.codecs import ue8m0_scale_byte

TABLE = [
    (448.0, 1.0, 119), (448.0, 3.5, 120), (448.0, 448, 127), (448.0, 450, 128), (448.0, 900, 129),
    (6.0, 1.3, 125), (6.0, 2.9, 126), (6.0, 5.2, 127), (6.0, 6, 127), (6.0, 6.5, 128),
]  # fmt: skip


@pytest.mark.parametrize("target, amax, byte", TABLE)
def test_the_table(target, amax, byte):
    assert int(ue8m0_scale_byte(np.float32(amax), target)) == byte
    w = np.zeros((1, 1, 32), np.float32)
    w[0, 0, 3] = -amax
    q = quant.quantize_weight(w, MXFP8 if target == 448 else MXFP4)
    assert int(quant.canonical_scales(q)[0, 0, 0]) == byte


@pytest.mark.parametrize("target", [448.0, 6.0])
def test_the_scale_is_the_smallest_that_fits(target, rng):
    amax = np.exp2(rng.uniform(-100, 100, 100_000)).astype(np.float32)
    byte = np.asarray(jax.jit(ue8m0_scale_byte, static_argnums=1)(amax, target))
    np.testing.assert_array_equal(byte, ue8m0_scale_byte(amax, target))
    s = np.ldexp(1.0, byte.astype(int) - 127)
    assert (amax / s <= target).all() and (target < amax / (s / 2)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("block", [32, 128])
def test_rows_use_the_same_rule(block, dtype, rng):
    x = jnp.asarray(rng.normal(size=(500, 256)) * np.exp2(rng.uniform(-99, 100, (500, 1))), dtype=dtype)
    s = np.asarray(row_scales(quantize(x, ActivationQuant(block, "ue8m0")))).astype(np.float64)
    amax = np.abs(np.asarray(x).astype(np.float64)).reshape(500, -1, block).max(axis=2)
    real = amax >= 2.0**-100
    assert (amax <= 448 * s).all() and (448 * s < 2 * amax)[real].all()
