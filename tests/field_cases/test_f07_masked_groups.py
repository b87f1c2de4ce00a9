"""F07: masked groups are set to 0, and 0 beats negative scores."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxmoe.config import RouterConfig
from jaxmoe.layer.params import RouterParams
from jaxmoe.router import route


def test_negative_selection_scores_stay_in_their_group() -> None:
    config = RouterConfig(num_experts=4, top_k=2, score="sigmoid", num_groups=2, top_groups=1, correction_bias=True)
    params = RouterParams(kernel=jnp.zeros((4, 4)), correction_bias=jnp.array([-0.9, -0.9, -1.0, -1.0]))
    got = route(params, None, config, logits=jnp.array([[0.4054651, 0.2006707, 0, -0.2006707]]))
    assert np.asarray(got.ids).tolist() == [[0, 1]]
    np.testing.assert_allclose(got.weights, [[0.52173913, 0.47826087]], rtol=1e-6)
