"""F06: sqrtsoftplus scores underflow; hash routing divides 0 by 0 or reads outside its table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import RouterConfig
from jaxmoe.layer.params import RouterParams
from jaxmoe.router import route
from jaxmoe.router.scores import scores

KERNEL = jnp.zeros((4, 8))


def test_a_scores() -> None:
    x = jnp.array([-20, 0, 2, 100], jnp.float32)
    np.testing.assert_allclose(scores(x, "sqrtsoftplus"), [4.5399930e-05, 0.83255461, 1.45839913, 10.0], rtol=1e-6)
    assert np.isfinite(scores(jnp.linspace(-200, 200, 8001), "sqrtsoftplus")).all()


def test_b_small_scores_keep_their_ratio() -> None:
    config = RouterConfig(num_experts=8, top_k=2, score="sqrtsoftplus")
    logits = jnp.array([[-20, -21, -90, -90, -90, -90, -90, -90]], jnp.float32)
    got = route(RouterParams(kernel=KERNEL), None, config, logits=logits)
    np.testing.assert_allclose(got.weights, [[0.62245933, 0.37754067]], rtol=1e-6)


def test_c_scores_that_vanish_give_finite_weights_and_gradients() -> None:
    config = RouterConfig(num_experts=8, top_k=2, score="sqrtsoftplus")
    logits = jnp.full((1, 8), -200.0)

    def weights(logits: jax.Array) -> jax.Array:
        return route(RouterParams(kernel=KERNEL), None, config, logits=logits).weights

    assert np.isfinite(weights(logits)).all()
    assert np.isfinite(jax.grad(lambda x: weights(x)[0, 0])(logits)).all()


def test_d_hash_layer() -> None:
    config = RouterConfig(num_experts=8, top_k=2, score="sqrtsoftplus", hash_routing=True, scaling_factor=1.5)
    tokens = jnp.arange(16, dtype=jnp.int32)
    params = RouterParams(kernel=KERNEL, tid2eid=jnp.stack([tokens % 8, (tokens + 3) % 8], axis=1))
    logits = jnp.broadcast_to(jnp.array([2, 9, 9, 9, 9, 0, 9, 9], jnp.float32), (4, 8))

    got = jax.jit(lambda t: route(params, None, config, logits=logits, token_ids=t))(jnp.array([5, -1, 16, 5]))

    assert np.asarray(got.ids).tolist() == [[5, 0], [-1, -1], [-1, -1], [5, 0]]
    for row in (0, 3):
        np.testing.assert_allclose(got.weights[row], [0.54511442, 0.95488558], rtol=1e-6)
    assert (np.asarray(got.weights)[1:3] == 0).all()
