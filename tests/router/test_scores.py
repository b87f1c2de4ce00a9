from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.router.scores import row_sum, scores, softmax, sqrtsoftplus


def _exact(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return np.sqrt(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


def test_sqrtsoftplus_error_and_order(rng: np.random.Generator) -> None:
    x = np.sort(np.concatenate([np.linspace(-80, 200, 20001), rng.uniform(-17, -15, 5000)])).astype(np.float32)
    got = np.asarray(jax.jit(sqrtsoftplus)(x))
    np.testing.assert_allclose(got, _exact(x), rtol=1e-6)
    assert (np.diff(got) >= -1e-7 * got[1:]).all()


def test_sqrtsoftplus_slope() -> None:
    x = np.concatenate([np.linspace(-80, 200, 2001), [-16, 0, -200, 200, -1e30, 1e30]]).astype(np.float32)
    got = np.asarray(jax.jit(jax.vmap(jax.grad(sqrtsoftplus)))(x))
    assert np.isfinite(got).all()
    inside = np.abs(x) <= 200
    x64 = x[inside].astype(np.float64)
    exact = 1 / (1 + np.exp(-x64)) / (2 * _exact(x[inside]))
    np.testing.assert_allclose(got[inside], exact, rtol=1e-5, atol=1e-37)


def test_sqrtsoftplus_at_the_ends() -> None:
    got = np.asarray(sqrtsoftplus(jnp.array([np.inf, -np.inf, np.nan], jnp.float32)))
    np.testing.assert_array_equal(got, [np.inf, 0, np.nan])


@pytest.mark.parametrize("n", [1, 2, 3, 8, 60, 384])
def test_softmax_and_sigmoid_against_float64(rng: np.random.Generator, n: int) -> None:
    x = rng.uniform(-60, 60, (33, n)).astype(np.float32)
    x64 = x.astype(np.float64)
    powers = np.exp(x64 - x64.max(axis=1, keepdims=True))
    np.testing.assert_allclose(scores(x, "softmax"), powers / powers.sum(axis=1, keepdims=True), rtol=2e-5, atol=1e-37)
    np.testing.assert_allclose(scores(x, "sigmoid"), 1 / (1 + np.exp(-x64)), rtol=2e-5)
    assert scores(x, "raw") is x


@pytest.mark.parametrize("n", [1, 2, 5, 16, 100])
def test_row_sum(rng: np.random.Generator, n: int) -> None:
    x = rng.integers(-1000, 1000, (4, n)).astype(np.float32)  # exact in f32, so any order gives the same sum
    np.testing.assert_array_equal(row_sum(jnp.asarray(x)), x.sum(axis=1, keepdims=True))


def test_softmax_gradient_sums_to_zero(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(5, 12)), jnp.float32)
    got = jax.grad(lambda x: softmax(x)[:, 3].sum())(x)
    p = np.asarray(softmax(x), np.float64)
    np.testing.assert_allclose(got, p[:, 3:4] * ((np.arange(12) == 3) - p), atol=1e-6)
