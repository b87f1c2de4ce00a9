"""F06 C and D through a whole layer: scores that vanish, and token ids outside the table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import MoEConfig, RouterConfig
from jaxmoe.layer.build import make_params
from jaxmoe.layer.pipeline import moe
from jaxmoe.testing import MARKER_WIDTH, marker

E, VOCABULARY = 8, 16
TABLE = np.stack([np.arange(VOCABULARY) % E, (np.arange(VOCABULARY) + 3) % E], axis=1)


def markers(router: RouterConfig, kernel: np.ndarray, tid2eid: np.ndarray | None = None):
    n = MARKER_WIDTH
    config = MoEConfig(hidden=n, intermediate=n, router=router)
    ones = jnp.full((E, n, n), 1 / n, jnp.float32)
    up = ones * (jnp.arange(E, dtype=jnp.float32) + 1)[:, None, None]
    table = None if tid2eid is None else jnp.asarray(tid2eid, jnp.int32)
    params = make_params(config, gate=ones, up=up, down=ones, router_kernel=jnp.asarray(kernel), tid2eid=table)
    return jax.jit(lambda x, tokens: moe(params, x, config, token_ids=tokens))


def test_c_vanishing_scores_stay_finite() -> None:
    """Every logit is -200: all scores are 0 in float32."""
    run = markers(
        RouterConfig(num_experts=E, top_k=2, score="sqrtsoftplus"), np.full((MARKER_WIDTH, E), -200 / 128, np.float32)
    )
    assert np.isfinite(np.asarray(run(jnp.ones((3, MARKER_WIDTH), jnp.float32), None))).all()


def test_d_hash_layer() -> None:
    """Token 5 goes to experts 5 and 0 with the weights of the case; ids outside the table go nowhere."""
    router = RouterConfig(num_experts=E, top_k=2, score="sqrtsoftplus", hash_routing=True, scaling_factor=1.5)
    kernel = np.zeros((MARKER_WIDTH, E), np.float32)
    kernel[:, 0] = 2 / MARKER_WIDTH
    run = markers(router, kernel, TABLE)
    x = jnp.ones((4, MARKER_WIDTH), jnp.float32)
    y = np.asarray(run(x, jnp.array([5, -1, 16, 5], jnp.int32)))
    want = marker(1) * (0.54511442 * 6 + 0.95488558 * 1)
    np.testing.assert_allclose(y[[0, 3]], want, rtol=1e-5)
    np.testing.assert_array_equal(y[[1, 2]], 0)
