"""F08: correction bias leaks into the weights; wrong score or group rule at one shape."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import RouterConfig
from jaxmoe.layer.params import RouterParams
from jaxmoe.router import route

SHAPES = [(8, 1), (16, 4), (64, 6), (128, 8), (160, 6), (256, 8), (384, 8), (512, 10)]


def test_a_bias_chooses_and_never_weighs() -> None:
    scores = np.array([[0.9, 0.1, 0.6, 0.6, 0.55, 0.5, 0.2, 0.2]])
    config = RouterConfig(num_experts=8, top_k=2, score="sigmoid", num_groups=4, top_groups=2, correction_bias=True)
    params = RouterParams(kernel=jnp.zeros((4, 8)), correction_bias=jnp.zeros(8).at[4].set(0.2))
    got = route(params, None, config, logits=jnp.asarray(np.log(scores / (1 - scores)), jnp.float32))
    assert np.asarray(got.ids).tolist() == [[4, 2]]
    np.testing.assert_allclose(got.weights, [[0.47826087, 0.52173913]], rtol=1e-6)


def test_b_the_numbers_of_the_case() -> None:
    got = _sigmoid_route(jnp.linspace(-4, 4, 128)[None], jnp.zeros(128), 8)
    assert np.asarray(got.ids)[0].tolist() == list(range(127, 119, -1))
    np.testing.assert_allclose(got.weights[0, :2], [0.98201379, 0.98086673], rtol=1e-6)
    np.testing.assert_allclose(got.weights.sum(), 7.81966863, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("e", "k"), SHAPES)
def test_b_every_shape_and_dtype(e: int, k: int, dtype: type) -> None:
    rng = np.random.default_rng(e)
    logits = jnp.asarray(rng.uniform(-4, 4, (5, e)), dtype)
    exact = 1 / (1 + np.exp(-np.asarray(logits.astype(jnp.float32), np.float64)))
    bias = np.asarray(rng.permutation(e) * 2.0, np.float32)
    for b in (np.zeros(e, np.float32), bias):
        ids = np.argsort(-(exact + b), axis=1, kind="stable")[:, :k]
        got = _sigmoid_route(logits, jnp.asarray(b), k)
        np.testing.assert_array_equal(got.ids, ids)
        np.testing.assert_allclose(got.weights, np.take_along_axis(exact, ids, axis=1), rtol=1e-6)


def _sigmoid_route(logits, bias, k):
    config = RouterConfig(
        num_experts=logits.shape[1], top_k=k, score="sigmoid", correction_bias=True, renormalize=False
    )
    params = RouterParams(kernel=jnp.zeros((4, logits.shape[1])), correction_bias=bias)
    return route(params, None, config, logits=logits)
