"""A short training run on two devices is that on one: losses, parameters, selection bias, loads.

Over two processes, which may share a GPU: ``python -m jaxmoe.testing.ranks 2 -m pytest tests/training``.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import Execution, RouterConfig, SharedExperts
from jaxmoe.balance import load_balancing_loss, router_z_loss, update_correction_bias
from jaxmoe.nn import MoE
from jaxmoe.parallel import AllToAll, DeepEP, EpContext, ParallelLayout, moe_parallel, shard_params
from jaxmoe.router import router_logits
from jaxmoe.testing.ranks import spread, whole

B, S, H, WIDTH, E, K = 4, 6, 128, 64, 4, 2
STEPS, RATE = 6, 2.0
EXPERTS = ParallelLayout(tokens=P("d"), experts="d")


def train(layout=None, mesh=None, execution=None, *, dtype=jnp.float32, transport=None):
    """Gradient descent on one layer with a balance loss, a z-loss and the bias step; experts and x in ``dtype``."""
    first = MoE(
        H,
        WIDTH,
        E,
        router=RouterConfig(num_experts=E, top_k=K, score="sigmoid", correction_bias=True),
        shared=SharedExperts(intermediate=WIDTH, gate=True),
        partial_blocks=True,
        param_dtype=jnp.float32,
        rngs=nnx.Rngs(1),
    )
    params = jax.tree.map(lambda a: a.astype(dtype) if a.ndim == 3 else a, first.params)
    layer = MoE.from_params(first.config, params, execution, layout=layout, mesh=mesh, transport=transport)
    x = jax.random.normal(jax.random.key(2), (B, S, H), dtype)
    target = jnp.sin(2 * jnp.roll(x.astype(jnp.float32), 1, axis=-1))
    if mesh is not None:
        x, target = (spread(np.asarray(a), mesh, layout.tokens) for a in (x, target))

    @nnx.jit
    def step(layer, x, target):
        def loss(layer):
            config = layer.config.router
            logits = router_logits(layer.params.router, x)
            routing = jaxmoe.route(layer.params.router, None, config, logits=logits.reshape(-1, E))
            routing = jax.tree.map(lambda a: a.reshape(B, S, K), routing)
            y, load = layer.with_load(x, routing=routing)
            balance = load_balancing_loss(logits, routing.ids, config, sequence_wise=True)
            error = jnp.mean((y.astype(jnp.float32) - target) ** 2)
            return error + 0.01 * balance + 0.001 * router_z_loss(logits), load

        (value, load), gradient = nnx.value_and_grad(loss, has_aux=True)(layer)
        state = nnx.state(layer, nnx.Param)
        nnx.update(layer, jax.tree.map(lambda p, g: (p - RATE * g).astype(p.dtype), state, gradient))
        bias = layer.router.correction_bias
        bias[...] = update_correction_bias(bias[...], load, 0.01)
        return value, load

    steps = [step(layer, x, target) for _ in range(STEPS)]
    return [float(v) for v, _ in steps], np.stack([load for _, load in steps]), layer.params


def two_devices():
    return Mesh(np.array(jax.devices()[:2]), ("d",))


def compare(found, want, *, losses, parameters, choices=0):
    """Up to how much losses and parameters differ, relatively, and how many choices an expert may have more."""
    np.testing.assert_allclose(found[0], want[0], rtol=losses)
    assert np.abs(found[1] - want[1]).max() <= choices
    for (path, got), like in zip(jax.tree.leaves_with_path(found[2]), jax.tree.leaves(want[2]), strict=True):
        got, like = np.float32(whole(got)), np.float32(like)
        np.testing.assert_allclose(
            got, like, rtol=0, atol=parameters * np.abs(like).max(), err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.devices(2)
def test_expert_parallel():
    want = train()
    assert want[0][-1] < 0.9 * want[0][0]
    found = train(EXPERTS, two_devices())
    assert found[2].experts.down.values.sharding.spec == P("d")
    compare(found, want, losses=2e-5, parameters=1e-4)


@pytest.mark.devices(2)
def test_expert_parallel_in_bf16():
    """On GPUs, kernels run forward and backward: nothing falls back."""
    execution = Execution(backend="deepgemm" if jax.default_backend() == "gpu" else "auto")
    want = train(execution=execution, dtype=jnp.bfloat16)
    assert want[0][-1] < 0.9 * want[0][0]
    found = train(EXPERTS, two_devices(), execution, dtype=jnp.bfloat16)
    compare(found, want, losses=5e-3, parameters=2e-2, choices=1)


@pytest.mark.multigpu(2)
@pytest.mark.usefixtures("deep_ep_toolchain")
@pytest.mark.parametrize("format", ["v2", "v2_psum"])
def test_expert_parallel_over_deepep(format):
    execution = Execution(backend="deepgemm")
    want = train(execution=execution, dtype=jnp.bfloat16)
    mesh = two_devices()
    with EpContext(
        mesh, "d", tokens=B * S // mesh.size, hidden=H, num_experts=E, top_k=K, timeout_seconds=10
    ) as context:
        found = train(EXPERTS, mesh, execution, dtype=jnp.bfloat16, transport=DeepEP(context, format))
    compare(found, want, losses=5e-3, parameters=2e-2, choices=1)


@pytest.mark.devices(4)
def test_a_layer_cut_over_a_mesh_is_the_layer():
    """Widths cut too, and what does not go together is refused."""
    first = MoE(H, WIDTH, E, top_k=K, param_dtype=jnp.float32, rngs=nnx.Rngs(1))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("e", "t"))
    layout = ParallelLayout(experts="e", intermediate="t")
    cut = MoE.from_params(first.config, first.params, layout=layout, mesh=mesh)
    assert cut.experts.gate_up.values.shape == (2 * E, WIDTH, H)
    x = jax.random.normal(jax.random.key(2), (5, H), jnp.float32)
    want, wanted_load = jax.jit(MoE.with_load)(first, x)
    y, load = jax.jit(MoE.with_load)(cut, x)
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))
    np.testing.assert_array_equal(load, wanted_load)
    for part in ({"layout": layout}, {"mesh": mesh}, {"transport": AllToAll("e")}):
        with pytest.raises(ValueError, match="layout and mesh go together"):
            MoE.from_params(first.config, first.params, **part)
    # Tokens in rounds of two rows give the same.
    rounds = MoE.from_params(first.config, first.params, layout=layout, mesh=mesh, transport=AllToAll("e", capacity=2))
    np.testing.assert_allclose(rounds(x), y, rtol=0, atol=1e-6 * float(jnp.abs(want).max()))


@pytest.mark.devices(4)
def test_bf16_gradients_on_a_mesh():
    """Tokens, experts and widths cut: every gradient is in its dtype and near the f32 one of a single device."""
    first = MoE(H, 2 * WIDTH, E, top_k=K, param_dtype=jnp.float32, rngs=nnx.Rngs(3))
    x, dy = (jax.random.normal(jax.random.key(n), (B * S, H), jnp.float32) for n in (4, 5))

    def gradients(params, x, layer):
        return jax.jit(jax.grad(lambda p, x: jnp.sum((layer(p, x) * dy).astype(jnp.float32)), argnums=(0, 1)))(
            params, x
        )

    want, want_x = gradients(first.params, x, lambda p, x: jaxmoe.moe(p, x, first.config))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("e", "t"))
    layout = ParallelLayout(tokens=P("e"), experts="e", intermediate="t")
    stacks = jax.tree.map(lambda a: a.astype(jnp.bfloat16), first.params.experts)
    params = shard_params(dataclasses.replace(first.params, experts=stacks), first.config, layout, mesh)
    dy = dy.astype(jnp.bfloat16)
    got, got_x = gradients(params, x.astype(jnp.bfloat16), lambda p, x: moe_parallel(p, x, first.config, layout, mesh))
    assert got_x.dtype == got.experts.down.values.dtype == jnp.bfloat16 and got.router.kernel.dtype == jnp.float32
    want = shard_params(want, first.config, layout, mesh)
    for (path, a), b in zip(jax.tree.leaves_with_path((got, got_x)), jax.tree.leaves((want, want_x)), strict=True):
        a, b = np.asarray(a).astype(np.float32), np.asarray(b)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert 0 < error < 0.02, (jax.tree_util.keystr(path), error)
