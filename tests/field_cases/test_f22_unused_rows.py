"""F22: unused rows of the receive buffer enter through a bias, a NaN weight or the backward pass."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import Execution, MoEConfig
from jaxmoe.layer.params import ExpertWeights
from jaxmoe.layer.pipeline import experts, moe
from jaxmoe.ops.permute import expert_counts
from jaxmoe.router import route
from jaxmoe.testing import marker_layer

VALID = np.arange(8) < 3
LAYOUTS = ("psum", "masked", "contiguous")


def _biased(dtype: jnp.dtype) -> tuple[MoEConfig, ExpertWeights]:
    config, params = marker_layer(2, 1, dtype=dtype)
    bias = {"gate_up_bias": jnp.zeros((2, 256), jnp.float32), "down_bias": jnp.full((2, 128), 0.5, jnp.float32)}
    return dataclasses.replace(config, expert_bias=True), dataclasses.replace(params.experts, **bias)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_b_c(dtype: jnp.dtype, layout: str) -> None:
    config, weights = _biased(dtype)
    ids = jnp.asarray(np.where(VALID, 0, -1)[:, None], jnp.int32)
    execution = Execution(layout=layout)  # type: ignore[arg-type]

    @jax.jit
    def run(x: jax.Array, w: jax.Array):
        def column(weights: ExpertWeights, x: jax.Array, w: jax.Array) -> jax.Array:
            return experts(weights, x, ids, w[:, None], config, execution)[:, 0].sum()

        return jax.value_and_grad(column, argnums=(0, 1, 2))(weights, x, w)

    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for w, want, d_bias in (
        (np.ones(8), 3.69317574, 3.0),
        (np.array([0.5, 0.25, 0.25, *[np.nan] * 5]), 1.23105858, 1.0),
    ):
        results = []
        for unused in (np.nan, 0.0, 7.0):
            x = jnp.asarray(np.where(VALID, 1.0, unused)[:, None] * np.ones(128), dtype)
            value, grads = run(x, jnp.asarray(w, jnp.float32))
            np.testing.assert_allclose(value, want, rtol=tolerance)
            assert float(grads[0].down_bias[0, 0]) == d_bias and (np.asarray(grads[0].down_bias[1]) == 0).all()
            assert (np.asarray(grads[1])[~VALID] == 0).all() and (np.asarray(grads[2])[~VALID] == 0).all()
            results.append(jax.tree.map(np.float32, grads))
        for other in results[1:]:
            for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(other), strict=True):
                assert np.isfinite(a).all()
                np.testing.assert_array_equal(a, b)


def test_d_rows_that_fill_a_batch() -> None:
    """Through the router: outputs 0, counts as without them, all gradients as without them."""
    config, weights = _biased(jnp.float32)
    params = dataclasses.replace(marker_layer(2, 1, dtype=jnp.float32)[1], experts=weights)
    x = jnp.asarray(np.where(VALID, 1.0, np.nan)[:, None] * np.ones(128), jnp.float32)
    valid = jnp.asarray(VALID)
    routing = route(params.router, x, config.router, valid=valid)
    assert expert_counts(routing.ids, 2).tolist() == [3, 0]

    def run(params, x: jax.Array, valid: jax.Array | None):
        def total(params):
            y = moe(params, x, config, valid=valid)
            return y.sum(), y

        (_, y), grads = jax.value_and_grad(total, has_aux=True)(params)
        return y, grads

    y, grads = jax.jit(run)(params, x, valid)
    bare, bare_grads = jax.jit(run)(params, x[:3], None)
    assert (np.asarray(y)[~VALID] == 0).all()
    np.testing.assert_array_equal(y[:3], bare)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(bare_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
