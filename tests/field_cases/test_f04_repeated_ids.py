"""F04 A: a repeated id in one top-k counts twice on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import Execution
from jaxmoe.layer.pipeline import moe
from jaxmoe.ops.permute import expert_counts
from jaxmoe.router import Routing
from jaxmoe.testing import marker_layer

ROUTING = Routing(jnp.array([[2, 2], [1, 3]], jnp.int32), jnp.array([[0.25, 0.75], [0.5, 0.5]], jnp.float32))


@pytest.mark.parametrize("layout", ["psum", "masked", "contiguous"])
def test_a_one_device(layout: str) -> None:
    """Added twice, and both weights get their gradient, also where the two choices share a row (masked)."""
    assert expert_counts(ROUTING.ids, 4).tolist() == [0, 1, 2, 1]
    config, params = marker_layer(4, 2, dtype=jnp.float32)
    x = jnp.ones((2, 128), jnp.float32)

    @jax.jit
    def run(weights: jax.Array) -> jax.Array:
        execution = Execution(layout=layout)  # type: ignore[arg-type]
        return moe(params, x, config, execution, routing=Routing(ROUTING.ids, weights))[:, 0]

    np.testing.assert_allclose(run(ROUTING.weights), [2.19317574, 2.19317574], rtol=1e-5)
    grad = jax.jit(jax.grad(lambda w: run(w).sum()))(ROUTING.weights)
    np.testing.assert_allclose(grad, 0.73105858 * np.array([[3, 3], [2, 4]]), rtol=1e-5)


def test_a_eager() -> None:
    """The same where the ids are known to Python."""
    config, params = marker_layer(4, 2, dtype=jnp.float32)
    y = moe(params, jnp.ones((2, 128), jnp.float32), config, routing=ROUTING)
    np.testing.assert_allclose(y[:, 0], [2.19317574, 2.19317574], rtol=1e-5)
