from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.config import RouterConfig
from jaxmoe.layer.params import RouterParams
from jaxmoe.router import append_shared_slots, route

jitted = jax.jit(route, static_argnames=("config", "deterministic"))


def _order(values: list[float], among: list[int]) -> list[int]:
    """Best first; NaN last; ties to the lowest index."""
    return sorted(among, key=lambda i: (math.isnan(values[i]), 0.0 if math.isnan(values[i]) else -values[i], i))


def _reference(row: np.ndarray, bias: np.ndarray | None, config: RouterConfig) -> tuple[list[int], np.ndarray]:
    """One token in float64, one expert after the other."""
    row = row.astype(np.float64)
    e, k, n = config.num_experts, config.top_k, config.num_groups
    with np.errstate(all="ignore"):
        match config.score:
            case "softmax":
                score = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            case "sigmoid":
                score = 1 / (1 + np.exp(-row))
            case "sqrtsoftplus":
                score = np.sqrt(np.logaddexp(0, row))
            case _:
                score = row
        if config.softmax_after_topk or (bias is None and n == 1):
            selection = row if bias is None else row + bias
        else:
            selection = score if bias is None else score + bias
        among = list(range(e))
        if n > 1:
            size = e // n
            groups = [_order(list(selection), list(range(g * size, (g + 1) * size))) for g in range(n)]
            taken = 2 if config.group_score == "top2_sum" else 1
            ranks = [sum(selection[i] for i in members[:taken]) for members in groups]
            best = _order(ranks, list(range(n)))[: config.top_groups]
            among = [i for g in best for i in groups[g]]
        ids = _order(list(selection), among)[:k]
        weights = score[ids]
        if config.softmax_after_topk:
            weights = np.exp(row[ids] - row[ids].max()) / np.exp(row[ids] - row[ids].max()).sum()
        elif config.renormalize:
            weights = weights / (
                weights.sum() if not weights.sum() < config.renormalize_floor else config.renormalize_floor
            )
    return ids, weights * config.scaling_factor


@st.composite
def _configs(draw: st.DrawFn) -> RouterConfig:
    size, n = draw(st.integers(2, 4)), draw(st.sampled_from([1, 1, 2, 4]))
    top = draw(st.integers(1, n))
    score = draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus", "raw"]))
    return RouterConfig(
        num_experts=size * n,
        top_k=draw(st.integers(1, size * top)),
        score=score,
        softmax_after_topk=score == "softmax" and draw(st.booleans()),
        renormalize=score != "raw" and draw(st.booleans()),
        num_groups=n,
        top_groups=top,
        group_score=draw(st.sampled_from(["top2_sum", "max"])),
        correction_bias=draw(st.booleans()),
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
    )


@settings(max_examples=20, deadline=None)
@given(_configs(), st.integers(0, 2**32 - 1))
def test_against_a_plain_reference(config: RouterConfig, seed: int) -> None:
    rng = np.random.default_rng(seed)
    e = config.num_experts
    # Few distinct values make many exact ties; distinct ones are far enough apart for f32 to tell them.
    pool = np.concatenate([rng.normal(size=5) * 3, [np.nan, np.inf, -np.inf, 0.0, -0.0]]).astype(np.float32)
    odds = np.array([6.0] * 5 + [1] * 5)
    rows = rng.choice(pool, (12, e), p=odds / odds.sum())
    bias = rng.choice(rng.normal(size=3), e).astype(np.float32) if config.correction_bias else None
    params = RouterParams(kernel=jnp.zeros((1, e)), correction_bias=None if bias is None else jnp.asarray(bias))
    valid = rng.random(12) < 0.8

    got = jitted(params, None, config, logits=jnp.asarray(rows), valid=jnp.asarray(valid))

    for t in range(12):
        ids, weights = _reference(rows[t], bias, config) if valid[t] else ([-1] * config.top_k, np.zeros(config.top_k))
        assert np.asarray(got.ids[t]).tolist() == ids
        np.testing.assert_allclose(got.weights[t], weights, rtol=2e-5, atol=1e-12)


def test_router_gemm_is_f32_and_takes_bf16_rows(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(9, 64)), jnp.bfloat16)
    kernel, bias = rng.normal(size=(64, 16)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    config = RouterConfig(num_experts=16, top_k=16, score="raw", renormalize=False, logit_bias=True)
    got = route(RouterParams(kernel=jnp.asarray(kernel), logit_bias=jnp.asarray(bias)), x, config)
    exact = np.asarray(x.astype(jnp.float32), np.float64) @ kernel + bias
    np.testing.assert_allclose(
        got.weights, np.take_along_axis(exact, np.asarray(got.ids), axis=1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_bits_do_not_depend_on_the_number_of_rows(rng: np.random.Generator, score) -> None:
    params = RouterParams(kernel=jnp.asarray(rng.normal(size=(256, 128)), jnp.float32))
    x = jnp.asarray(rng.normal(size=(70, 256)), jnp.float32)
    config = RouterConfig(num_experts=128, top_k=6, score=score)
    run = jax.jit(lambda x: route(params, x, config, deterministic=True))
    full = run(x)
    for start, stop in [(0, 1), (0, 5), (3, 20), (64, 70), (40, 70)]:
        part = run(x[start:stop])
        np.testing.assert_array_equal(part.ids, full.ids[start:stop])
        np.testing.assert_array_equal(part.weights, full.weights[start:stop])


def test_masked_rows_take_no_gradient_and_give_none(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
    params = RouterParams(kernel=jnp.asarray(rng.normal(size=(8, 6)), jnp.float32))
    config = RouterConfig(num_experts=6, top_k=2, score="sqrtsoftplus", scaling_factor=1.5)
    probe = jnp.asarray(rng.normal(size=(4, 2)), jnp.float32)

    def loss(params: RouterParams, x: jax.Array, valid: jax.Array | None, probe: jax.Array) -> jax.Array:
        return (route(params, x, config, valid=valid).weights * probe).sum()

    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))
    poisoned, valid = x.at[2:].set(jnp.nan), jnp.array([True, True, False, False])
    got, want = grads(params, poisoned, valid, probe), grads(params, x[:2], None, probe[:2])
    np.testing.assert_allclose(got[0].kernel, want[0].kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1][:2], want[1], rtol=1e-5, atol=1e-6)
    assert (np.asarray(got[1][2:]) == 0).all()

    step = 1e-2 * jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    up, down = (loss(params, x + s * step, None, probe) for s in (1.0, -1.0))
    np.testing.assert_allclose((up - down) / 2, (grads(params, x, None, probe)[1] * step).sum(), rtol=2e-2, atol=1e-5)


def test_vmap_and_no_rows(rng: np.random.Generator) -> None:
    config = RouterConfig(num_experts=8, top_k=3, score="sigmoid", num_groups=4, top_groups=2)
    params = RouterParams(kernel=jnp.zeros((4, 8)))
    logits = jnp.asarray(rng.normal(size=(3, 5, 8)), jnp.float32)
    run = jax.jit(lambda lg: route(params, None, config, logits=lg))
    got, flat = jax.vmap(run)(logits), run(logits.reshape(15, 8))
    np.testing.assert_array_equal(got.ids.reshape(15, 3), flat.ids)
    np.testing.assert_allclose(got.weights.reshape(15, 3), flat.weights, rtol=1e-6)
    for deterministic in (False, True):
        none = jitted(params, jnp.zeros((0, 4)), config, deterministic=deterministic)
        assert none.ids.shape == none.weights.shape == (0, 3)


def test_floor_of_the_divisor() -> None:
    config = RouterConfig(num_experts=2, top_k=1, score="sigmoid", renormalize_floor=1e-3)
    logits = jnp.array([[0, -1], [-10, -11]], jnp.float32)
    got = route(RouterParams(kernel=jnp.zeros((1, 2))), None, config, logits=logits)
    np.testing.assert_allclose(got.weights, [[1], [4.5397869e-2]], rtol=1e-5)


def test_shared_slots() -> None:
    config = RouterConfig(num_experts=4, top_k=1, scaling_factor=2.5)
    valid = jnp.array([True, False])
    routing = route(RouterParams(kernel=jnp.zeros((1, 4))), None, config, logits=jnp.zeros((2, 4)), valid=valid)
    got = append_shared_slots(routing, 4, 2, jnp.array([0.25, jnp.nan]), valid)
    assert np.asarray(got.ids).tolist() == [[0, 4, 5], [-1, -1, -1]]
    assert np.asarray(got.weights).tolist() == [[2.5, 0.25, 0.25], [0, 0, 0]]
    np.testing.assert_array_equal(append_shared_slots(routing, 4, 0).ids, routing.ids)
    with pytest.raises(ValueError, match=r"gate has shape \(3,\)"):
        append_shared_slots(routing, 4, 1, jnp.ones(3))
    with pytest.raises(ValueError, match="slots is -1"):
        append_shared_slots(routing, 4, -1)
