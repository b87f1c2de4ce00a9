"""F13 E: a GEMM with weight scales near 1e-23 is finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.ops.grouped_gemm import grouped_gemm
from jaxmoe.ops.quantize import quantize
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.formats import ActivationQuant, FP8Block
from jaxmoe.quant.weights import from_canonical


def test_e_tiny_weight_scale() -> None:
    w = from_canonical(jnp.ones((1, 8, 128), jnp.float8_e4m3fn), jnp.full((1, 1, 1), 1e-23, jnp.float32), FP8Block)
    x = jnp.ones((8, 128), jnp.bfloat16)
    rows = GroupedRows(x, jnp.array([8], jnp.int32), "psum", 8)
    run = jax.jit(grouped_gemm, static_argnames="out_dtype")
    for rows_in in (rows, rows.with_rows(quantize(x, ActivationQuant(128, "float32")))):
        for dtype in (jnp.float32, jnp.bfloat16):
            y = np.float64(run(rows_in, w, out_dtype=dtype))
            assert np.isfinite(y).all() and (y >= 0).all() and (y <= 1.3e-21).all()
            np.testing.assert_allclose(y, 1.28e-21, rtol=1e-2)
