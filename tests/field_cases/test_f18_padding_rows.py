"""F18: padding rows leave garbage in the scale buffer (part A, the quantiser's side)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.ops.quantize import quantize
from jaxmoe.quant import ActivationQuant

COUNTS, STEP, H = [3, 0, 1], 128, 256


def dirty_memory(shape) -> None:
    """Frees arrays of the sizes the quantiser is about to allocate, full of rubbish."""
    for value in (3.3, -1.0, np.nan):
        for dtype in (jnp.float32, jnp.int32):
            fill = -1 if dtype == jnp.int32 else value
            jax.block_until_ready([jnp.full(shape, fill, dtype) for _ in range(4)])


@pytest.mark.parametrize("layout", ["psum", "masked"])
@pytest.mark.parametrize("block", [32, 128])
def test_every_scale_of_the_buffer_is_a_power_of_two(layout, block, rng):
    """Rows of three experts in a buffer whose other rows are NaN, -1 or 3.3; 384 of them, of which 4 are real."""
    lead = (3, STEP) if layout == "masked" else (3 * STEP,)
    row = np.arange(STEP)
    valid = np.stack([row < c for c in COUNTS]).reshape(lead)
    rubbish = rng.choice(np.array([np.nan, -1, 3.3], np.float32), (*lead, H))
    real = rng.normal(size=(*lead, H)).astype(np.float32)
    x = jnp.asarray(np.where(valid[..., None], real, rubbish))
    dirty_memory((H // block, 3 * STEP))
    q = jax.jit(quantize, static_argnums=1)(x, ActivationQuant(block, "ue8m0"), valid=jnp.asarray(valid))
    byte = np.asarray(q.scales).view(np.uint8)
    assert ((byte >= 1) & (byte <= 254)).all()
    assert not np.asarray(q.values)[~valid].view(np.uint8).any()
    words = np.moveaxis(np.asarray(q.scales), -2, -1)
    assert (words[~valid] == 0x7F7F7F7F).all()
    clean = quantize(jnp.asarray(np.where(valid[..., None], real, np.float32(0))), ActivationQuant(block, "ue8m0"))
    np.testing.assert_array_equal(np.asarray(q.values)[valid], np.asarray(clean.values)[valid])


def test_float_scales_of_padding_rows_are_one():
    x = jnp.full((STEP, H), jnp.nan)
    q = quantize(x, ActivationQuant(128, "float32"), valid=jnp.zeros(STEP, bool))
    bits = np.asarray(q.scales).view(np.uint32)
    assert (bits & 0x807FFFFF == 0).all() and (bits == 0x3F800000).all()
