"""F04 B, F10, F11, F21 and F22 through the deepep transport, on the model of its kernels; and debug mode."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.config import Execution
from jaxmoe.dispatch.deepep import DeepEP
from jaxmoe.layer.pipeline import experts
from jaxmoe.ops.debug import debug
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.router import Routing
from jaxmoe.testing import marker_layer

EP = ParallelLayout(tokens=P("d"), experts="d")
FORMATS = ("v2", "v2_psum", "ll")


@pytest.mark.parametrize("format", FORMATS)
def test_f04_b_two_ranks(model, mesh_of, format):
    """A repeated id counts with the sum of its weights; group sizes are those of assignments."""
    config, params = marker_layer(4, 2)
    transport = DeepEP(model.ModelContext("d", 2, tokens=2, hidden=128, num_experts=4, top_k=2), format)

    def rank(weights, x, ids, combine_weights):
        sent = transport.dispatch(x, ids, combine_weights, 4)
        counts = (sent.ids[:, :, None] == jnp.arange(2)).sum((0, 1), dtype=jnp.int32)
        partial = experts(weights, sent.x, sent.ids, sent.weights, config, Execution())
        return counts, transport.combine(partial, sent)

    run = jax.jit(jax.shard_map(rank, mesh=mesh_of(2), in_specs=P("d"), out_specs=P("d")))
    x = jnp.asarray(np.repeat([1.0, 1.0, np.nan, np.nan], 128).reshape(4, 128), jnp.bfloat16)
    ids = jnp.asarray([[2, 2], [1, 3], [-1, -1], [-1, -1]], jnp.int32)
    weights = jnp.asarray([[0.25, 0.75], [0.5, 0.5], [np.nan] * 2, [np.nan] * 2], jnp.float32)
    counts, y = run(params.experts, x, ids, weights)
    assert counts.tolist() == [0, 1, 1, 1]  # the two halves of expert 2 travel as one
    np.testing.assert_allclose(y[:, 0], [2.19317574, 2.19317574, 0, 0], rtol=1e-2)


@pytest.mark.parametrize("fused", [False, True])
def test_f10_f11_scaled_once_and_shared_once(model, mesh_of, fused):
    config, params = marker_layer(4, 2, shared=4.0, fused=fused, scaling=2.5)
    routing = Routing(jnp.tile(jnp.array([[0, 1]], jnp.int32), (4, 1)), jnp.tile(jnp.array([[1.5, 1.0]]), (4, 1)))
    sizes = {"tokens": 2, "hidden": 128, "num_experts": 4, "top_k": 2 + fused, "replicated": int(fused)}
    context = model.ModelContext("d", 2, **sizes)
    sharded = shard_params(params, config, EP, mesh_of(2))
    x = jnp.ones((4, 128), jnp.bfloat16)
    y = moe_parallel(sharded, x, config, EP, mesh_of(2), routing=routing, transport=DeepEP(context))
    np.testing.assert_allclose(np.float32(y), 5.48293934, rtol=1e-2)


SENT = np.array([[2, 0, 1, 0], [0, 0, 0, 0], [1, 3, 0, 1], [0, 1, 0, 2]])


@pytest.mark.parametrize("format", FORMATS)
def test_f21_round_trip_is_exact(model, mesh_of, format):
    """Identity experts and weights 1, forward and backward, for any send matrix; unused rows hold NaN."""
    tokens = 6
    context = model.ModelContext("d", 4, tokens=tokens, hidden=256, num_experts=4, top_k=1)
    transport = DeepEP(context, format)

    def rank(x, ids):
        sent = transport.dispatch(x, ids, jnp.ones(ids.shape, jnp.float32), 4)
        rows = sent.x if isinstance(sent.x, jax.Array) else sent.x.values.reshape(-1, 256)
        return transport.combine(jnp.where((sent.ids < 0), jnp.nan, rows.astype(jnp.float32)), sent)

    over = jax.shard_map(rank, mesh=mesh_of(4), in_specs=P("d"), out_specs=P("d"))
    run = jax.jit(jax.value_and_grad(lambda x, ids: (jnp.sum(over(x, ids) * 3), over(x, ids)), has_aux=True))
    one = 0 * SENT
    one[2, 1] = 3
    for sent in (SENT, 0 * SENT, one):
        x = np.full((4, tokens, 256), np.nan, np.float32)
        ids = np.full((4, tokens, 1), -1, np.int32)
        for i in range(4):
            to = np.repeat(np.arange(4), sent[i])
            x[i, : len(to)] = (100 * i + np.arange(len(to)))[:, None]
            ids[i, : len(to), 0] = to
        used = ids.reshape(-1) >= 0
        (_, y), dx = run(jnp.asarray(x.reshape(-1, 256), jnp.bfloat16), jnp.asarray(ids.reshape(-1, 1)))
        want = np.float32(jnp.asarray(np.where(used[:, None], x.reshape(-1, 256), 0), jnp.bfloat16))
        np.testing.assert_array_equal(y, want)
        np.testing.assert_array_equal(np.float32(dx), np.where(used[:, None], 3.0, 0.0) * np.ones(256))


@pytest.mark.parametrize("format", FORMATS)
def test_f22_unused_rows_never_show(model, mesh_of, format):
    """Rows of the buffer hold NaN, weights too; gradients count real rows only."""
    config, params = marker_layer(2, 1)
    context = model.ModelContext("d", 2, tokens=4, hidden=128, num_experts=2, top_k=1)
    sharded = shard_params(params, config, EP, mesh_of(2))
    valid = jnp.array([True, True, True, False, False, False, False, False])
    x = jnp.where(valid[:, None], jnp.ones((8, 128), jnp.bfloat16), jnp.nan)
    routing = Routing(jnp.zeros((8, 1), jnp.int32), jnp.where(valid[:, None], jnp.ones((8, 1)), jnp.nan))

    def loss(params, weights):
        y = moe_parallel(
            params, x, config, EP, mesh_of(2), valid=valid, routing=Routing(routing.ids, weights),
            transport=DeepEP(context, format),
        )  # fmt: skip
        return jnp.sum(y[:, 0].astype(jnp.float32))

    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(sharded, routing.weights)
    np.testing.assert_allclose(value, 3 * 0.73105858, rtol=1e-2)
    for gradient in jax.tree.leaves(grads):
        assert np.isfinite(np.float32(gradient)).all()
    np.testing.assert_array_equal(np.asarray(grads[1])[3:], 0)


def test_debug_mode_names_an_id_that_is_none(model, mesh_of):
    transport = DeepEP(model.ModelContext("d", 2, tokens=2, hidden=128, num_experts=4, top_k=2))
    body = lambda x, ids, w: transport.dispatch(x, ids, w, 4).ids  # noqa: E731
    run = jax.jit(jax.shard_map(body, mesh=mesh_of(2), in_specs=P("d"), out_specs=P("d")))
    x, ids = jnp.ones((4, 128), jnp.bfloat16), jnp.array([[0, 1], [2, 3], [3, 7], [-1, -1]], jnp.int32)
    local = np.asarray(run(x, ids, jnp.ones((4, 2))))
    assert (local >= 0).sum() == 5  # without debug mode such an id is no expert
    with debug():
        jax.block_until_ready(run(x, jnp.minimum(ids, 3), jnp.ones((4, 2))))
        message = r"1 ids are outside -1\.\.3; the first is 7, of rank 1, token 0, choice 1"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(run(x, ids, jnp.ones((4, 2))))


@pytest.mark.parametrize("format", FORMATS)
def test_bits_of_a_token_do_not_depend_on_others(rng, model, mesh_of, format):
    """Deterministic mode: other batch sizes, the other rank, other neighbours; zero tolerance."""
    config, params = marker_layer(4, 2)
    gate_up = params.experts.gate_up.values
    noise = jnp.asarray(rng.normal(size=gate_up.shape) / 16, gate_up.dtype)
    stack = dataclasses.replace(params.experts, gate_up=dataclasses.replace(params.experts.gate_up, values=noise))
    params = dataclasses.replace(params, experts=stack)
    context = model.ModelContext("d", 2, tokens=17, hidden=128, num_experts=4, top_k=2)
    sharded = shard_params(params, config, EP, mesh_of(2))
    x = rng.normal(size=(34, 128))
    ids = np.argsort(rng.random((34, 4)), axis=1)[:, :2].astype(np.int32)
    weights = rng.random((34, 2)).astype(np.float32)

    def bits(rows):
        y = moe_parallel(
            sharded, jnp.asarray(x[rows], jnp.bfloat16), config, EP, mesh_of(2), Execution(deterministic=True),
            routing=Routing(jnp.asarray(ids[rows]), jnp.asarray(weights[rows])), transport=DeepEP(context, format),
        )  # fmt: skip
        return np.asarray(y).view(np.uint16)

    whole = bits(np.arange(34))
    assert len(np.unique(whole)) > 20
    for rows in (rng.permutation(34), np.roll(np.arange(34), 17), np.arange(9), np.arange(20, 22)):
        np.testing.assert_array_equal(bits(rows), whole[rows])
