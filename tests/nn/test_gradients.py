"""Gradients of the layer in f32 through the reference path, against a dense formula and finite differences."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmoe
from jaxmoe import Activation, Execution, MoEConfig, RouterConfig, Routing, SharedExperts
from jaxmoe.nn import MoE
from jaxmoe.quant.tensors import GroupedWeight

T, H, WIDTH, E, K = 10, 32, 16, 6, 2
CONFIG = MoEConfig(
    hidden=H,
    intermediate=WIDTH,
    router=RouterConfig(num_experts=E, top_k=K, logit_bias=True, scaling_factor=1.5),
    activation=Activation(kind="clamped", limit=0.7),
    expert_bias=True,
    shared=SharedExperts(intermediate=2 * WIDTH, gate=True),
)
LAYOUTS = ["psum", "contiguous", "masked"]


@functools.cache
def problem():
    """Parameters, x, a direction for y, and which tokens are valid."""
    module = MoE(
        H,
        WIDTH,
        E,
        router=CONFIG.router,
        activation=CONFIG.activation,
        expert_bias=True,
        shared=CONFIG.shared,
        param_dtype=jnp.float32,
        bias_init=nnx.initializers.normal(0.3),
        rngs=nnx.Rngs(5),
    )
    keys = jax.random.split(jax.random.key(1), 2)
    x, dy = (jax.random.normal(key, (T, H), jnp.float32) for key in keys)
    return module.params, x, dy, jnp.arange(T) != 3


def act(gate, up):
    gate, up = jnp.minimum(gate, 0.7), jnp.clip(up, -0.7, 0.7)
    return gate * jax.nn.sigmoid(gate) * up


def mlp(x, w, e):
    h = x @ w.gate_up.values[e].T
    if w.gate_up_bias is not None:
        h = h + w.gate_up_bias[e]
    half = h.shape[-1] // 2
    y = act(h[:, :half], h[:, half:]) @ w.down.values[e].T
    return y if w.down_bias is None else y + w.down_bias[e]


def dense(params, x, valid):
    """Every expert on every token, then masked: the layer's formula without any grouping."""
    logits = x @ params.router.kernel + params.router.logit_bias
    scores = jax.nn.softmax(logits, axis=-1)
    ids = jax.lax.top_k(jax.lax.stop_gradient(logits), K)[1]
    chosen = jnp.any(ids[:, :, None] == jnp.arange(E), axis=1)
    weights = jnp.where(chosen, scores, 0.0)
    weights = 1.5 * weights / weights.sum(axis=-1, keepdims=True)
    y = sum(weights[:, e, None] * mlp(x, params.experts, e) for e in range(E))
    y = y + jax.nn.sigmoid(x @ params.shared.gate)[:, None] * mlp(x, params.shared.experts, 0)
    return jnp.where(valid[:, None], y, 0.0)


@functools.partial(jax.jit, static_argnames=("execution", "config"))
def moe_gradients(params, x, dy, valid, execution, config=CONFIG):
    def loss(params, x):
        return jnp.sum(dy * jaxmoe.moe(params, x, config, execution, valid=valid))

    return jax.value_and_grad(loss, argnums=(0, 1))(params, x)


@jax.jit
def dense_gradients(params, x, dy, valid):
    def loss(params, x):
        return jnp.sum(dy * dense(params, x, valid))

    return jax.value_and_grad(loss, argnums=(0, 1))(params, x)


def assert_trees_close(ours, theirs, tolerance):
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        scale = float(jnp.abs(b).max())
        assert scale > 0, f"{jax.tree_util.keystr(path)}: a gradient of zeros tests nothing"
        np.testing.assert_allclose(a, b, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_matches_the_dense_formula(layout):
    params, x, dy, valid = problem()
    value, gradients = moe_gradients(params, x, dy, valid, Execution(layout=layout))
    with jax.default_matmul_precision("highest"):
        dense_value, expected = dense_gradients(params, x, dy, valid)
    assert value == pytest.approx(float(dense_value), rel=1e-5)
    assert len(jax.tree.leaves(gradients)) == 10
    assert_trees_close(gradients, expected, 1e-5)
    np.testing.assert_array_equal(gradients[1][3], 0)


def test_poisoned_padding_reaches_no_gradient():
    params, x, dy, valid = problem()
    _, clean = moe_gradients(params, x, dy, valid, Execution(layout="psum"))
    dirty_x = jnp.where(valid[:, None], x, jnp.nan)
    _, dirty = moe_gradients(params, dirty_x, dy, valid, Execution(layout="psum"))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


def test_finite_differences():
    """Along a random direction of each parameter, and of x, with the router's choice unchanged."""
    params, x, dy, valid = problem()
    execution = Execution(layout="psum")
    _, gradients = moe_gradients(params, x, dy, valid, execution)
    loss = jax.jit(lambda params, x: jnp.sum(dy * jaxmoe.moe(params, x, CONFIG, execution, valid=valid)))
    choice = jax.jit(lambda params, x: jaxmoe.route(params.router, x, CONFIG.router).ids)
    leaves, tree = jax.tree.flatten((params, x))
    before = choice(params, x)
    for index, (leaf, gradient) in enumerate(zip(leaves, jax.tree.leaves(gradients), strict=True)):
        # Along the gradient's sign the slope is the sum of its magnitudes: far above f32's noise.
        direction = jnp.sign(gradient)
        slope = float(jnp.sum(jnp.abs(gradient)))
        step = 1e-2 / slope
        ends = []
        for sign in (1.0, -1.0):
            moved = [*leaves[:index], leaf + sign * step * direction, *leaves[index + 1 :]]
            moved_params, moved_x = jax.tree.unflatten(tree, moved)
            np.testing.assert_array_equal(choice(moved_params, moved_x), before)
            ends.append(float(loss(moved_params, moved_x)))
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_weights_get_gradients_and_no_expert_gives_none(layout):
    params, x, dy, _ = problem()
    ids = jnp.full((T, K), -1, jnp.int32).at[2:, 0].set(jnp.arange(T - 2, dtype=jnp.int32) % E)
    weights = jnp.full((T, K), 0.5, jnp.float32)
    config = dataclasses.replace(CONFIG, shared=None)
    params = dataclasses.replace(params, shared=None)

    @jax.jit
    def gradients(weights, x):
        def loss(weights, x):
            y = jaxmoe.moe(params, x, config, Execution(layout=layout), routing=Routing(ids, weights))
            return jnp.sum(dy * y)

        return jax.grad(loss, argnums=(0, 1))(weights, x)

    d_weights, d_x = gradients(weights, x)
    np.testing.assert_array_equal(d_x[:2], 0)
    np.testing.assert_array_equal(d_weights[ids < 0], 0)
    for t in (2, 9):
        expected = jnp.dot(dy[t], mlp(x[t : t + 1], params.experts, int(ids[t, 0]))[0])
        assert float(d_weights[t, 0]) == pytest.approx(float(expected), rel=1e-4)
    assert jnp.all(jnp.any(d_x[2:] != 0, axis=1))


def test_bf16_gradients_are_the_f32_ones_rounded():
    params, x, dy, valid = problem()
    # Without a clamp: a value that rounds across it loses its gradient altogether.
    smooth = dataclasses.replace(CONFIG, activation=Activation())
    run = functools.partial(moe_gradients, execution=Execution(), config=smooth)
    _, exact = run(params, x, dy, valid)

    def narrow(w):
        return dataclasses.replace(w, values=w.values.astype(jnp.bfloat16)) if is_stack(w) else w

    def is_stack(w):
        return isinstance(w, GroupedWeight)

    packed = jax.tree.map(narrow, params, is_leaf=is_stack)
    _, rough = run(packed, x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16), valid)
    assert rough[1].dtype == rough[0].experts.down.values.dtype == jnp.bfloat16
    assert rough[0].router.kernel.dtype == jnp.float32
    for (path, a), b in zip(jax.tree.leaves_with_path(rough), jax.tree.leaves(exact), strict=True):
        error = jnp.linalg.norm((a.astype(jnp.float32) - b).ravel()) / jnp.linalg.norm(b.ravel())
        assert 0 < error < 0.01, (jax.tree_util.keystr(path), error)


def test_quantised_weights_give_gradients_to_the_rest_when_rows_are_not_quantised():
    module = MoE(
        128,
        128,
        4,
        top_k=2,
        weights=jaxmoe.MXFP4,
        expert_bias=True,
        execution=Execution(quantize_activations=False),
        rngs=nnx.Rngs(0),
    )
    x = jax.random.normal(jax.random.key(0), (6, 128), jnp.float32)
    gradients, d_x = nnx.jit(nnx.grad(lambda m, x: jnp.sum(m(x) ** 2), argnums=(0, 1)))(module, x)
    assert {".".join(path) for path, _ in nnx.to_flat_state(gradients)} == {
        "router.kernel",
        "experts.gate_up_bias",
        "experts.down_bias",
    }
    assert all(bool(jnp.any(g != 0)) for g in (*jax.tree.leaves(gradients), d_x))
