"""Field case F01 D: experts that got no token have gradients of exactly 0, through the whole layer."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmoe import Execution, Routing
from jaxmoe.nn import MoE

T, H, WIDTH, E, K = 4, 32, 16, 8, 2


@pytest.mark.parametrize(
    ("layout", "param_dtype"),
    [("psum", jnp.float32), ("contiguous", jnp.bfloat16), ("masked", jnp.float32)],
    ids=["psum-f32", "contiguous-bf16", "masked-f32"],
)
def test_experts_without_tokens_get_exactly_zero(layout, param_dtype):
    module = MoE(
        H,
        WIDTH,
        E,
        top_k=K,
        expert_bias=True,
        param_dtype=param_dtype,
        execution=Execution(layout=layout),
        rngs=nnx.Rngs(0),
    )
    x = jax.random.normal(jax.random.key(0), (T, H), param_dtype)
    ids = jnp.array([[0, 1], [1, 0], [0, -1], [1, 0]], jnp.int32)
    routing = Routing(ids, jnp.where(ids >= 0, 0.5, 0.0).astype(jnp.float32))
    gradient = nnx.jit(nnx.grad(lambda m: jnp.sum(m(x, routing=routing).astype(jnp.float32))))
    clean = gradient(module)
    np.asarray(jnp.full((1024, 1024), jnp.nan))
    for state in (clean, gradient(module)):
        experts = nnx.to_pure_dict(state)["experts"]
        for leaf in jax.tree.leaves(experts):
            assert leaf.shape[0] == E
            np.testing.assert_array_equal(leaf[2:].astype(jnp.float32), 0.0)
            assert jnp.all(jnp.isfinite(leaf.astype(jnp.float32)))
            for used in (0, 1):
                assert jnp.any(leaf[used] != 0)


@functools.partial(jax.jit, static_argnums=1)
def _gradient(module, layout):
    none = Routing(jnp.full((T, K), -1, jnp.int32), jnp.zeros((T, K), jnp.float32))
    module = MoE.from_params(module.config, module.params, Execution(layout=layout))
    return jax.value_and_grad(lambda x: jnp.sum(module(x, routing=none)))(jnp.full((T, H), 2.0, jnp.float32))


@pytest.mark.parametrize("layout", ["psum", "contiguous", "masked"])
def test_no_expert_at_all_gives_zeros(layout):
    module = MoE(H, WIDTH, E, top_k=K, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    value, gradient = _gradient(module, layout)
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)
