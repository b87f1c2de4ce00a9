from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec

import jaxmoe

H, WIDTH, E, K = 128, 128, 8, 2
X = np.random.default_rng(0).standard_normal((2, 3, H), np.float32)


class Block(linen.Module):
    """The layer inside another module, called on arrays and keywords."""

    weights: jaxmoe.quant.formats.WeightFormat

    @linen.compact
    def __call__(self, x, valid=None):
        layer = jaxmoe.nn.linen.MoE(H, WIDTH, E, top_k=K, weights=self.weights, param_dtype=jnp.float32, name="moe")
        return x + layer(x, valid=valid)


@pytest.mark.parametrize("weights", [jaxmoe.BF16, jaxmoe.MXFP4], ids=str)
def test_init_apply_and_grad(weights):
    block, x = Block(weights), jnp.asarray(X)
    boxed = jax.jit(block.init)(jax.random.key(0), x)
    variables = linen.unbox(boxed)
    stacks = {f"moe/experts/{part}/values" for part in ("gate_up", "down")}
    trained = set(flatten_dict(variables["params"], sep="/"))
    if weights.quantized:
        assert trained == {"moe/router/kernel"}
        scales = {name.replace("values", "scales") for name in stacks}
        assert set(flatten_dict(variables["quantized_params"], sep="/")) == stacks | scales
    else:
        assert trained == {"moe/router/kernel"} | stacks
        assert set(variables) == {"params"}

    valid = jnp.array([[True, True, False], [True, False, True]])
    y = jax.jit(block.apply)(variables, x, valid)
    np.testing.assert_array_equal(y[~valid], x[~valid])
    assert jnp.all(jnp.any(y[valid] != x[valid], axis=-1))
    np.testing.assert_array_equal(jax.jit(block.apply)(boxed, x, valid), y)

    frozen = {name: value for name, value in variables.items() if name != "params"}

    def loss(params):
        return jnp.sum(block.apply({"params": params, **frozen}, x) ** 2)

    gradients = jax.jit(jax.grad(loss))(variables["params"])
    assert jax.tree.structure(gradients) == jax.tree.structure(variables["params"])
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(gradients))


def test_it_is_the_same_layer_as_nnx():
    layer, x = jaxmoe.nn.linen.MoE(H, WIDTH, E, top_k=K, param_dtype=jnp.float32), jnp.asarray(X)
    variables = linen.unbox(jax.jit(layer.init)(jax.random.key(0), x))
    p = variables["params"]
    config = jaxmoe.MoEConfig(hidden=H, intermediate=WIDTH, router=jaxmoe.RouterConfig(num_experts=E, top_k=K))
    grouped = jaxmoe.quant.tensors.GroupedWeight
    stacks = [grouped(p["experts"][part]["values"], None, jaxmoe.BF16, H) for part in ("gate_up", "down")]
    params = jaxmoe.MoEParams(
        jaxmoe.layer.params.RouterParams(p["router"]["kernel"]), jaxmoe.layer.params.ExpertWeights(*stacks)
    )
    module = jaxmoe.nn.MoE.from_params(config, params)
    np.testing.assert_array_equal(jax.jit(layer.apply)(variables, x), jax.jit(jaxmoe.nn.MoE.__call__)(module, x))


def test_logical_names_reach_mesh_shardings():
    layer = jaxmoe.nn.linen.MoE(H, WIDTH, E, top_k=K)
    abstract = jax.eval_shape(layer.init, jax.random.key(0), jnp.asarray(X))
    specs = linen.get_partition_spec(abstract)["params"]["experts"]
    assert specs["gate_up"]["values"] == PartitionSpec("expert", "mlp", "embed")
    mesh = jax.make_mesh((8,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    rules = [("expert", "ep"), ("mlp", None), ("embed", None)]
    shardings = linen.logical_to_mesh_sharding(linen.get_partition_spec(abstract), mesh, rules)
    variables = linen.unbox(jax.jit(layer.init, out_shardings=shardings)(jax.random.key(0), jnp.asarray(X)))
    assert variables["params"]["experts"]["down"]["values"].addressable_shards[0].data.shape == (1, H, WIDTH)
