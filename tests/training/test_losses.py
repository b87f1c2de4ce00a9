"""Losses and the bias step, against values by hand and finite slopes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import RouterConfig
from jaxmoe.balance import load_balancing_loss, router_z_loss, update_correction_bias
from jaxmoe.errors import ShapeError
from jaxmoe.layer.params import RouterParams
from jaxmoe.router import router_logits

SWITCH = RouterConfig(num_experts=4, top_k=1)
loss = jax.jit(load_balancing_loss, static_argnames=("router", "sequence_wise"))


def test_by_hand():
    """Switch's E·Σ f·P: 1 for uniform scores whatever the choice, E if all tokens and all scores are at one expert."""
    ids = jnp.array([[0], [1], [2], [3]], jnp.int32)
    even, one = jnp.zeros((4, 4), jnp.float32), jnp.zeros((4, 4), jnp.float32).at[:, 2].set(50.0)
    assert float(loss(even, ids, SWITCH)) == pytest.approx(1.0)
    assert float(loss(even, jnp.zeros_like(ids), SWITCH)) == pytest.approx(1.0)
    assert float(loss(one, jnp.full_like(ids, 2), SWITCH)) == pytest.approx(4.0)
    # P = (0.5, 0.5, 0, 0) in both tokens, f = 4·(1/2, 0, 1/2, 0).
    half = jnp.array([[9.0, 9.0, -90.0, -90.0]] * 2, jnp.float32)
    assert float(loss(half, jnp.array([[0], [2]], jnp.int32), SWITCH)) == pytest.approx(1.0)
    # K = 2 of 4 with sigmoid scores (1/2, 1/2, 1/4, 3/4) and -1 for a choice that was not made: 4/2·(1/2·1/4 + ...).
    router = RouterConfig(num_experts=4, top_k=2, score="sigmoid")
    logits = jnp.log(jnp.array([[1.0, 1.0, 1 / 3, 3.0]], jnp.float32))
    assert float(loss(logits, jnp.array([[3, 0]], jnp.int32), router)) == pytest.approx(2 * (0.75 + 0.5) / 2)
    assert float(loss(logits, jnp.array([[3, -1]], jnp.int32), router)) == pytest.approx(2 * 0.75 / 2)


def test_sequences_are_balanced_one_by_one():
    """Two sequences, each all at one expert: uneven by sequence, even (of two experts) over all tokens."""
    ids = jnp.array([[[0], [0]], [[1], [1]]], jnp.int32)
    logits = 50.0 * jax.nn.one_hot(ids[..., 0], 4, dtype=jnp.float32)
    assert float(loss(logits, ids, SWITCH)) == pytest.approx(2.0)
    assert float(loss(logits, ids, SWITCH, sequence_wise=True)) == pytest.approx(4.0)
    # A sequence without a valid token does not enter the mean, and what it holds does not matter.
    valid = jnp.array([[True, True], [False, False]])
    dirty = logits.at[1].set(jnp.nan)
    assert float(loss(dirty, ids, SWITCH, valid=valid, sequence_wise=True)) == pytest.approx(4.0)
    assert float(loss(dirty, ids, SWITCH, valid=valid)) == pytest.approx(4.0)
    assert float(loss(dirty, ids, SWITCH, valid=jnp.zeros_like(valid), sequence_wise=True)) == 0.0


def test_gradients_push_towards_even_load():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 8, 4)), jnp.float32).at[..., 1].add(2.0)
    ids = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    slopes = jax.jit(jax.value_and_grad(load_balancing_loss), static_argnames=("router", "sequence_wise"))
    for sequence_wise in (False, True):
        value, slope = slopes(logits, ids, SWITCH, sequence_wise=sequence_wise)
        assert float(value) > 1.3 and (slope[..., 1] > 0).all()
        assert float(loss(logits - 0.5 * slope, ids, SWITCH, sequence_wise=sequence_wise)) < float(value)
    want = float(np.mean(np.log(np.exp(np.asarray(logits)).sum(-1)) ** 2))
    assert float(router_z_loss(logits)) == pytest.approx(want, rel=1e-5)


def test_padding_has_no_gradient_whatever_it_holds():
    rng = np.random.default_rng(0)
    valid = jnp.broadcast_to(jnp.arange(8) < 5, (3, 8))
    dirty = jnp.where(valid[..., None], jnp.asarray(rng.normal(size=(3, 8, 4)), jnp.float32), jnp.nan)
    ids = jnp.zeros((3, 8, 1), jnp.int32)

    @jax.jit
    @jax.value_and_grad
    def both(logits):
        return router_z_loss(logits, valid=valid) + load_balancing_loss(logits, ids, SWITCH, valid=valid)

    value, slope = both(dirty)
    assert np.isfinite(float(value)) and np.isfinite(slope).all() and not slope[:, 5:].any() and slope[:, :5].all()


def test_bias_step():
    bias, load = jnp.array([0.0, 0.5, -0.5, 0.0]), jnp.array([10, 2, 6, 6], jnp.int32)
    np.testing.assert_allclose(update_correction_bias(bias, load, 1e-3), [-1e-3, 0.501, -0.5, 0.0], atol=1e-7)
    stacked = update_correction_bias(jnp.stack([bias, bias]), jnp.stack([load, jnp.zeros_like(load)]), 1e-3)
    np.testing.assert_array_equal(stacked[1], bias)


def test_the_bias_evens_a_router_out():
    """Skewed random logits: after steps against the load, every expert gets about its share."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(512, 16)), jnp.float32)
    config = RouterConfig(num_experts=8, top_k=2, score="sigmoid", correction_bias=True)
    kernel = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
    skew = jnp.asarray(rng.normal(size=8), jnp.float32)

    @jax.jit
    def load_of(bias):
        params = RouterParams(kernel, None, bias)
        logits = router_logits(params, x) + skew
        return jaxmoe.balance.expert_load(jaxmoe.route(params, None, config, logits=logits), 8)

    bias = jnp.zeros(8, jnp.float32)
    before = np.asarray(load_of(bias))
    for _ in range(150):
        bias = update_correction_bias(bias, load_of(bias), 0.01)
    after = np.asarray(load_of(bias))
    assert before.max() > 1.4 * before.mean() and after.max() < 1.15 * after.mean() and after.sum() == before.sum()


def test_refusals():
    logits, ids = jnp.zeros((6, 4), jnp.float32), jnp.zeros((6, 1), jnp.int32)
    with pytest.raises(ShapeError, match=r"logits are \[6, 3\]; they must be \[..., tokens, 4\]"):
        load_balancing_loss(logits[:, :3], ids, SWITCH)
    with pytest.raises(ShapeError, match=r"ids are \[5, 1\]"):
        load_balancing_loss(logits, ids[:5], SWITCH)
    with pytest.raises(ShapeError, match=r"valid is \[4\]"):
        router_z_loss(logits, valid=jnp.ones(4, bool))
    with pytest.raises(ShapeError, match=r"bias is \[4\] and load \[3\]"):
        update_correction_bias(jnp.zeros(4), jnp.zeros(3, jnp.int32), 0.1)
