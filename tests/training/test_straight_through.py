"""FP8 forward, bf16 backward: values are the quantised layer's, gradients are the unquantised one's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import Execution, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.errors import FormatError
from jaxmoe.layer.build import make_params
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.quant.formats import BF16, MXFP4, FP8Block
from jaxmoe.quant.tensors import GroupedWeight

E, K, T, H, WIDTH = 4, 2, 12, 128, 96
FP8_FORWARD = Execution(forward_format=FP8Block)


def layer(fmt=BF16, *, bias=True):
    """I = 96 is padded inside of quantised formats; a shared expert is apart."""
    config = MoEConfig(
        hidden=H,
        intermediate=WIDTH,
        router=RouterConfig(num_experts=E, top_k=K),
        weights=fmt,
        expert_bias=bias,
        shared=SharedExperts(intermediate=WIDTH, gate=True),
        partial_blocks=True,
    )
    sizes = {"gate": (E, WIDTH, H), "up": (E, WIDTH, H), "down": (E, H, WIDTH), "router_kernel": (H, E)}
    sizes |= {"shared_gate": (WIDTH, H), "shared_up": (WIDTH, H), "shared_down": (H, WIDTH), "shared_gate_vector": (H,)}
    if bias:
        sizes |= {"gate_bias": (E, WIDTH), "up_bias": (E, WIDTH), "down_bias": (E, H)}
    rng = np.random.default_rng(3)
    arrays = {n: jnp.asarray(rng.normal(size=s) / 11, jnp.float32) for n, s in sizes.items()}
    x, dy = (jnp.asarray(rng.normal(size=(T, H)), jnp.float32) for _ in range(2))
    return config, arrays, x, dy


@jax.jit(static_argnames=("config", "execution"))
def gradients(trained, frozen, x, dy, valid, config, execution):
    def loss(trained, x):
        params = jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda a: a is None)
        y = jaxmoe.moe(params, x, config, execution, valid=valid)
        return jnp.sum(dy * y), y

    (_, y), gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(trained, x)
    return y, gradient


def all_trained(params):
    return params, jax.tree.map(lambda a: None, params)


def test_masters():
    """Forward: the bits of a layer whose weights are FP8. Backward: the bits of the layer without FP8."""
    config, arrays, x, dy = layer()
    masters = make_params(config, **arrays)
    valid = jnp.arange(T) != 4
    y, (d_params, dx) = gradients(*all_trained(masters), x, dy, valid, config, FP8_FORWARD)
    plain, (want_params, want_dx) = gradients(*all_trained(masters), x, dy, valid, config, Execution())
    fp8 = dataclasses.replace(config, weights=FP8Block)
    quantised = jax.jit(jaxmoe.moe, static_argnums=2)(make_params(fp8, **arrays), x, fp8, valid=valid)
    np.testing.assert_array_equal(y, quantised)
    assert 1e-3 < jnp.abs(y - plain).max() / jnp.abs(plain).max() < 0.1
    assert len(jax.tree.leaves(d_params)) == 8
    for (path, got), want in zip(
        jax.tree.leaves_with_path((d_params, dx)), jax.tree.leaves((want_params, want_dx)), strict=True
    ):
        scale = float(jnp.abs(want).max())
        assert scale > 0
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * scale, err_msg=jax.tree_util.keystr(path))


def test_quantised_weights():
    """They get no gradient; x, the router, the gate and the biases get that of the dequantised layer."""
    fmt = MXFP4
    config, arrays, x, dy = layer(fmt)
    params = make_params(config, **arrays)

    def split(node, quantised):
        return node if (isinstance(node, GroupedWeight) and node.format.quantized) == quantised else None

    def stacks(node):
        return isinstance(node, GroupedWeight)

    trained, frozen = (jax.tree.map(lambda n, q=q: split(n, q), params, is_leaf=stacks) for q in (False, True))
    valid = jnp.ones(T, bool)
    y, (d_params, dx) = gradients(trained, frozen, x, dy, valid, config, Execution(forward_format=fmt))
    exact, (want_params, want_dx) = gradients(
        trained, frozen, x, dy, valid, config, Execution(quantize_activations=False)
    )
    assert 0 < jnp.abs(y - exact).max() < 0.2 * jnp.abs(exact).max()
    for got, want in zip(jax.tree.leaves((d_params, dx)), jax.tree.leaves((want_params, want_dx)), strict=True):
        scale = float(jnp.abs(want).max())
        assert scale > 0
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * scale)
    # Without the option, differentiating says why it cannot and what to do.
    with pytest.raises(NotImplementedError, match="forward_format"):
        jax.eval_shape(jax.grad(lambda x: jaxmoe.moe(params, x, config).sum()), x)


def test_on_a_mesh():
    """Expert and tensor parallel: values and gradients of one device, to rounding."""
    config, _, x, dy = layer(bias=False)
    config = dataclasses.replace(config, intermediate=256, shared=None)
    rng = np.random.default_rng(4)
    sizes = {"gate": (E, 256, H), "up": (E, 256, H), "down": (E, H, 256), "router_kernel": (H, E)}
    masters = make_params(config, **{n: jnp.asarray(rng.normal(size=s) / 11, jnp.float32) for n, s in sizes.items()})
    y, (d_params, dx) = gradients(*all_trained(masters), x, dy, jnp.ones(T, bool), config, FP8_FORWARD)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("e", "t"))
    layout = ParallelLayout(tokens=P("e"), experts="e", intermediate="t")

    @jax.jit
    def parallel(params, x):
        def loss(params, x):
            y = moe_parallel(params, x, config, layout, mesh, FP8_FORWARD)
            return jnp.sum(dy * y), y

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    (_, got_y), (got_params, got_dx) = parallel(shard_params(masters, config, layout, mesh), x)
    want = shard_params(d_params, config, layout, mesh)
    for got, wanted in zip(jax.tree.leaves((got_y, got_dx, got_params)), jax.tree.leaves((y, dx, want)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * float(jnp.abs(wanted).max()))


def test_refusals():
    with pytest.raises(FormatError, match="forward_format is BF16, which is not quantised"):
        Execution(forward_format=BF16)
    with pytest.raises(ValueError, match="choose one of them"):
        Execution(forward_format=FP8Block, quantize_activations=False)
    config, arrays, x, _ = layer(FP8Block)
    params = make_params(config, **arrays)
    with pytest.raises(NotImplementedError, match="quantised weights have no gradient"):
        jax.eval_shape(jax.grad(lambda p: jaxmoe.moe(p, x, config, FP8_FORWARD).sum(), allow_int=True), params)
