"""Dense GEMMs on DeepGEMM's kernels: what only they have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.target import target
from jaxmoe.ops.dense_gemm import dense_gemm, prenorm_gemm
from jaxmoe.ops.quantize import quantize
from jaxmoe.quant.formats import BF16, MXFP4, FP8BlockUE8M0
from jaxmoe.quant.weights import quantize_weight

HOPPER, BLACKWELL = Arch("sm_90a", 132), Arch("sm_100f", 148)


def bf16(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


def test_float32_output_of_dense_on_blackwell_never_swaps(launches):
    """One would read sums that are not finished: with swapped operands, a store is 16 rows high."""
    with target(BLACKWELL):
        for m in (1, 64, 4096):
            for fmt in (BF16, FP8BlockUE8M0, MXFP4):
                x = bf16(m, 128) if fmt is BF16 else quantize(bf16(m, 128), fmt.activation)
                weight = quantize_weight(bf16(1, 256, 128), fmt)
                y = dense_gemm(x, weight, out_dtype=jnp.float32, backend="deepgemm")
                assert jax.block_until_ready(y).dtype == jnp.float32
    for launch in launches():
        d = launch["params"][-1]["map"]
        assert d[0] == "FLOAT32" and d[3][1] in (32, 64, 128)


def test_prenorm_runs_on_blackwell_only(launches):
    x, w = bf16(200, 256), jnp.zeros((24, 256), jnp.float32)
    with target(BLACKWELL):
        product, squares = jax.block_until_ready(jax.jit(prenorm_gemm)(x, w))
        (launch,) = launches()
        gradients = jax.grad(lambda x, w: sum(map(jnp.sum, prenorm_gemm(x, w))), argnums=(0, 1))(x, w)
    assert (product.shape, squares.shape) == ((200, 24), (200,)) and launch["grid"] == [4, 1, 1]
    assert [p["map"][0] for p in launch["params"][1:4]] == ["BFLOAT16", "TFLOAT32", "FLOAT32"]
    np.testing.assert_array_equal(np.asarray(gradients[1]), 0)
    with target(HOPPER):
        product, squares = prenorm_gemm(x, w)  # auto: plain JAX
    np.testing.assert_array_equal(np.asarray(product), 0)
    np.testing.assert_array_equal(np.asarray(squares), 0)
    assert len(launches()) == 2
