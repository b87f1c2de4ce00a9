"""F01: experts that got no token still receive a gradient (A to C, the grouped GEMM)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.ops.grouped_gemm import ragged_gemm


def _dirty() -> None:
    """Leaves freed NaN memory behind."""
    jnp.full((4, 1 << 20), jnp.nan).block_until_ready().delete()


@jax.jit
def _forward_backward(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array):
    y, vjp = jax.vjp(lambda lhs, rhs: ragged_gemm(lhs, rhs, sizes), lhs, rhs)
    return y, *vjp(jnp.ones_like(y))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_b_c_empty_groups(rng: np.random.Generator, dtype: jnp.dtype) -> None:
    lhs = jnp.ones((16, 64), dtype)
    rhs = jnp.asarray(rng.normal(size=(4, 32, 64)), dtype)
    for sizes in ([8, 0, 8, 0], [0, 0, 0, 0], [3, 0, 4, 0]):
        _dirty()
        y, d_lhs, d_rhs = (np.float64(a) for a in _forward_backward(lhs, rhs, jnp.array(sizes, jnp.int32)))
        total, owner = sum(sizes), np.repeat(np.arange(4), sizes)
        assert (y[total:] == 0).all() and (d_lhs[total:] == 0).all()
        for g, size in enumerate(sizes):
            assert (d_rhs[g] == float(size)).all()
        want = np.float64(rhs).sum(1)[owner]
        np.testing.assert_allclose(d_lhs[:total], want, rtol=0, atol=(1e-5 if dtype == jnp.float32 else 2e-2) * 16)
        np.testing.assert_allclose(y[:total], np.float64(rhs).sum(2)[owner], rtol=0, atol=0.2)
