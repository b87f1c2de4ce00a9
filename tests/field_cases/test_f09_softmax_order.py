"""F09: softmax before or after top-k; raw logits used as weights."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import RouterConfig
from jaxmoe.layer.params import RouterParams
from jaxmoe.router import route

BEFORE = [0.64391426, 0.23688282]
NORMALISED = [0.73105858, 0.26894142]


@pytest.mark.parametrize(
    ("logits", "ids"),
    [([2, 1, 0, -1], [0, 1]), ([-10, -11, -12, -13], [0, 1]), ([0, -1, 2, 1], [2, 3])],
    ids=["plain", "all-negative", "shuffled"],
)
@pytest.mark.parametrize(
    ("renormalize", "after", "weights"),
    [(False, False, BEFORE), (True, False, NORMALISED), (False, True, NORMALISED), (True, True, NORMALISED)],
)
def test_order(logits: list[float], ids: list[int], renormalize: bool, after: bool, weights: list[float]) -> None:
    config = RouterConfig(num_experts=4, top_k=2, renormalize=renormalize, softmax_after_topk=after)
    got = route(RouterParams(kernel=jnp.zeros((4, 4))), None, config, logits=jnp.array([logits], jnp.float32))
    assert np.asarray(got.ids).tolist() == [ids]
    np.testing.assert_allclose(got.weights, [weights], rtol=1e-6)
