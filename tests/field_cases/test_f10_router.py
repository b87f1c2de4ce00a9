"""F10, the router's part: routed_scaling_factor is in the weights once, and never in a shared expert's."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import RouterConfig
from jaxmoe.layer.params import RouterParams
from jaxmoe.router import append_shared_slots, route

LOGITS = jnp.log(jnp.array([[0.6, 0.4, 0.01, 0.01]]))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("hash_routing", [False, True])
def test_scaled_once_and_shared_not_at_all(after: bool, hash_routing: bool) -> None:
    config = RouterConfig(
        num_experts=4, top_k=2, softmax_after_topk=after, scaling_factor=2.5, hash_routing=hash_routing
    )
    params = RouterParams(kernel=jnp.zeros((4, 4)), tid2eid=jnp.array([[0, 1]], jnp.int32) if hash_routing else None)
    tokens = jnp.zeros(1, jnp.int32) if hash_routing else None
    routing = route(params, None, config, logits=LOGITS, token_ids=tokens)
    np.testing.assert_allclose(routing.weights, [[1.5, 1.0]], rtol=1e-6)

    fused = append_shared_slots(routing, 4, 1)
    assert np.asarray(fused.ids).tolist() == [[0, 1, 4]]
    np.testing.assert_allclose(fused.weights, [[1.5, 1.0, 1.0]], rtol=1e-6)
