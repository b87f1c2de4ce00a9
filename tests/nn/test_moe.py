from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import jaxmoe
from jaxmoe import Execution, MoEConfig, RouterConfig, Routing, SharedExperts
from jaxmoe.nn import SHARDING, Buffer, MoE, QuantizedParam

H, WIDTH, E, K = 128, 128, 8, 2


# One compiled program per (layer, shape) for all tests: eager calls compile every operation by itself.
forward = jax.jit(MoE.__call__)


def layer(**kwargs) -> MoE:
    kwargs = {"top_k": K, "rngs": nnx.Rngs(0), **kwargs}
    return MoE(H, WIDTH, E, **kwargs)


def tokens(*lead: int, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(7), (*lead, H), dtype)


@functools.cache
def every_option() -> MoE:
    router = RouterConfig(num_experts=E, top_k=K, score="sigmoid", correction_bias=True, logit_bias=True)
    shared = SharedExperts(intermediate=2 * WIDTH, gate=True, weights=jaxmoe.FP8Block)
    return layer(router=router, weights=jaxmoe.MXFP4, expert_bias=True, shared=shared)


def paths(module: nnx.Module, kind=...) -> set[str]:
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, kind))}


# --- parameters


def test_parameter_names_and_types():
    module = every_option()
    assert paths(module, nnx.Param) == {
        "router.kernel",
        "router.logit_bias",
        "experts.gate_up_bias",
        "experts.down_bias",
        "shared.gate",
    }
    assert paths(module, QuantizedParam) == {
        f"{part}.{projection}.{leaf}"
        for part in ("experts", "shared.experts")
        for projection in ("gate_up", "down")
        for leaf in ("values", "scales")
    }
    assert paths(module, Buffer) == {"router.correction_bias"}
    assert paths(layer(), nnx.Param) == {"router.kernel", "experts.gate_up.values", "experts.down.values"}


def test_params_are_the_functional_tree():
    module = every_option()
    params = module.params
    assert isinstance(params, jaxmoe.MoEParams)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    assert params.experts.gate_up.format == jaxmoe.MXFP4
    assert params.shared.experts.gate_up.format == jaxmoe.FP8Block


def test_quantised_values_are_the_quantised_initial_ones():
    from jaxmoe.quant.weights import dequantize

    plain = layer(param_dtype=jnp.float32).params.experts
    packed = layer(param_dtype=jnp.float32, weights=jaxmoe.MXFP8).params.experts
    assert packed.gate_up.values.dtype == jnp.float8_e4m3fn
    w, q = plain.gate_up.values, dequantize(packed.gate_up)
    assert 0 < jnp.abs(q - w).max() <= 2**-4 * jnp.abs(w).max()


def test_initial_weights_have_the_fan_in_of_one_expert():
    experts = layer(param_dtype=jnp.float32).params.experts
    for values in (experts.gate_up.values, experts.down.values):
        assert jnp.std(values) == pytest.approx(values.shape[-1] ** -0.5, rel=0.05)
    assert not jnp.array_equal(experts.gate_up.values[0], experts.gate_up.values[1])
    assert jnp.std(layer().params.router.kernel) == pytest.approx(H**-0.5, rel=0.1)


def test_split_and_merge_keep_everything():
    module = every_option()
    graph, state = nnx.split(module)
    merged = nnx.merge(graph, state)
    assert jax.tree.structure(merged.params) == jax.tree.structure(module.params)
    assert (merged.config, merged.execution) == (module.config, module.execution)
    jax.tree.map(np.testing.assert_array_equal, merged.params, module.params)


def test_from_params_takes_arrays_as_they_are():
    source = every_option()
    module = MoE.from_params(source.config, source.params, Execution(layout="masked"))
    assert module.config == source.config
    for ours, theirs in zip(jax.tree.leaves(module.params), jax.tree.leaves(source.params), strict=True):
        assert ours is theirs
    assert module.execution.layout == "masked"


def test_hash_routing_needs_its_table():
    router = RouterConfig(num_experts=E, top_k=K, hash_routing=True)
    with pytest.raises(ValueError, match="tid2eid is missing"):
        layer(router=router)
    with pytest.raises(ValueError, match="tid2eid is given"):
        layer(tid2eid=jnp.zeros((4, K), jnp.int32))
    table = jnp.array([[0, 1], [2, 3], [4, 5], [6, 7]], jnp.int32)
    module = layer(router=router, tid2eid=table)
    assert paths(module, Buffer) == {"router.tid2eid"}
    x, ids = tokens(2, 3), jnp.array([[3, 0, 1], [1, 2, 9]], jnp.int32)
    y = forward(module, x, token_ids=ids)
    routing = Routing(table[jnp.minimum(ids, 3)], jnp.full((2, 3, 2), 0.5, jnp.float32))
    assert jnp.all(jnp.any(y != 0, axis=-1) == (ids < 4))
    assert not jnp.array_equal(y, forward(module, x, routing=routing))


# --- calling


@pytest.mark.parametrize(
    ("x_dtype", "param_dtype", "dtype", "result"),
    [
        (jnp.bfloat16, jnp.bfloat16, None, jnp.bfloat16),
        (jnp.float32, jnp.float32, None, jnp.float32),
        (jnp.bfloat16, jnp.float32, None, jnp.float32),
        (jnp.float32, jnp.bfloat16, None, jnp.float32),
        (jnp.float32, jnp.float32, jnp.bfloat16, jnp.bfloat16),
    ],
)
def test_dtypes_promote_as_in_flax(x_dtype, param_dtype, dtype, result):
    module = layer(param_dtype=param_dtype, dtype=dtype)
    x = tokens(2, 3, dtype=x_dtype)
    y = forward(module, x)
    assert y.dtype == result
    module.dtype = jnp.float32
    wide = forward(module, x.astype(jnp.float32))
    np.testing.assert_allclose(y.astype(jnp.float32), wide, atol=0.05 * float(jnp.abs(wide).max()))


def test_quantised_weights_follow_x():
    for dtype in (jnp.bfloat16, jnp.float32):
        y = jax.eval_shape(MoE.__call__, every_option(), tokens(2, 3, dtype=dtype))
        assert (y.shape, y.dtype) == ((2, 3, H), dtype)


def test_every_way_of_calling_gives_the_same_bits():
    module, x = layer(), tokens(2, 3)
    y = module(x)
    assert y.shape == x.shape
    ways = {
        "jit of the module": jax.jit(module)(x),
        "module as an argument": forward(module, x),
        "nnx.jit": nnx.jit(lambda m, x: m(x))(module, x),
        "functional": jax.jit(jaxmoe.moe, static_argnums=(2, 3))(module.params, x, module.config, module.execution),
    }
    for way, other in ways.items():
        np.testing.assert_array_equal(y, other, err_msg=way)


def test_a_module_passed_in_is_not_baked_in():
    module, x = layer(), tokens(2, 3)
    before, programs = forward(module, x), forward._cache_size()
    module.experts.down.values[...] = module.experts.down.values[...] * 2
    np.testing.assert_array_equal(forward(module, x), 2 * before)
    assert forward._cache_size() == programs
    arguments = jax.tree.leaves(forward.lower(module, x).args_info)
    assert len(arguments) == len(jax.tree.leaves(module.params)) + 1


def test_leading_axes_tokens_and_padding():
    module, x = layer(), tokens(2, 3)
    valid = jnp.array([[True, True, False], [True, False, False]])
    y = forward(module, jnp.where(valid[..., None], x, jnp.nan), valid=valid)
    np.testing.assert_array_equal(y[~valid], 0)
    np.testing.assert_array_equal(y[valid], forward(module, x)[valid])
    assert forward(module, tokens(0)).shape == (0, H)


def test_given_routing_has_the_leading_axes_of_x():
    module, x = layer(), tokens(2, 3)
    ids = jnp.broadcast_to(jnp.array([5, -1], jnp.int32), (2, 3, 2))
    routing = Routing(ids, jnp.ones((2, 3, 2), jnp.float32))
    flat = jax.tree.map(lambda a: a.reshape(6, 2), routing)
    y = forward(module, x, routing=routing).reshape(6, H)
    np.testing.assert_array_equal(y, jaxmoe.moe(module.params, x.reshape(6, H), module.config, routing=flat))
    with pytest.raises(ValueError, match=r"routing ids are \(6, 2\).*\(2, 3\)"):
        module(x, routing=flat)


def test_inside_scan():
    module, x = layer(), tokens(4, 2, 3)
    _, scanned = jax.lax.scan(lambda carry, block: (carry, module(block)), 0, x)
    np.testing.assert_array_equal(scanned[2], forward(module, x[2]))


def test_layers_stack_and_scan_as_in_flax():
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return layer(rngs=rngs, weights=jaxmoe.MXFP4)

    stacked, x = create(nnx.Rngs(0).split(2)), tokens(2, 3)
    assert stacked.experts.gate_up.values.shape == (2, E, 2 * WIDTH, H // 2)

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(module, x):
        return x + module(x)

    graph, state = nnx.split(stacked)
    by_hand = x
    for index in range(2):
        one = nnx.merge(graph, jax.tree.map(lambda leaf, index=index: leaf[index], state))
        by_hand = by_hand + forward(one, by_hand)
    np.testing.assert_array_equal(run(stacked, x), by_hand)


def test_plan():
    plan = layer(execution=Execution(layout="masked")).plan(tokens=4096, device="H200")
    assert (plan.layout, plan.tokens) == ("masked", 4096)
    wide, narrow = layer(param_dtype=jnp.float32).plan(16), layer().plan(16)
    assert wide.memory.weights == 2 * narrow.memory.weights
    for module in (layer(), every_option()):
        assert module.plan(16) == jaxmoe.plan(module.config, 16)
    assert layer(weights=jaxmoe.MXFP4, dtype=jnp.float32).plan(16).memory.outputs == 2 * narrow.memory.outputs


def test_plan_knows_the_bytes_of_every_parameter():
    fused = SharedExperts(intermediate=2 * WIDTH, gate=True, fused=True)
    for module in (every_option(), layer(), layer(weights=jaxmoe.FP8Block, shared=fused)):
        memory = module.plan(16).memory
        stored = sum(leaf.nbytes for leaf in jax.tree.leaves(module.params))
        assert memory.weights + memory.scales + memory.router == stored


# --- sharding


def test_logical_names_reach_partition_specs():
    specs = nnx.get_partition_spec(nnx.state(layer(weights=jaxmoe.MXFP4)))
    assert specs.experts.gate_up["values"].get_raw_value() == PartitionSpec("expert", "mlp", "embed")
    assert specs.experts.down["scales"].get_raw_value() == PartitionSpec("expert", None, None)
    with nnx.logical_axis_rules([("expert", "ep"), ("mlp", None), ("embed", None)]):
        specs = nnx.get_partition_spec(nnx.state(layer()))
    assert specs.experts.gate_up["values"].get_raw_value() == PartitionSpec("ep", None, None)


@pytest.mark.parametrize("weights", [jaxmoe.BF16, jaxmoe.MXFP4], ids=str)
def test_parameters_are_created_sharded(weights):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("ep", "tp"))
    rules = [("expert", "ep"), ("mlp", "tp"), ("embed", None)]

    def create():
        return nnx.split(layer(weights=weights))

    with nnx.logical_axis_rules(rules):
        graph, abstract = nnx.split(nnx.eval_shape(lambda: layer(weights=weights)))
        shardings = nnx.get_named_sharding(abstract, mesh)
        state = jax.jit(lambda: create()[1], out_shardings=shardings)()
    values = state.experts.gate_up["values"].get_value()
    assert values.sharding.spec == PartitionSpec("ep", "tp", None)
    assert values.addressable_shards[0].data.shape == (E // 4, WIDTH, values.shape[2])
    sharded = nnx.merge(graph, state)
    x, whole = tokens(2, 3), layer(weights=weights)
    y, z = (forward(module, x).astype(jnp.float32) for module in (sharded, whole))
    np.testing.assert_allclose(y, z, atol=0.02 * float(jnp.abs(z).max()))


def test_own_axis_names():
    module = layer(sharding={"experts.down.values": ("e", None, None), "router.kernel": None})
    specs = nnx.get_partition_spec(nnx.state(module))
    assert specs.experts.down["values"].get_raw_value() == PartitionSpec("e", None, None)
    assert specs.router["kernel"].get_raw_value() == PartitionSpec()
    with pytest.raises(ValueError, match=r"no parameter 'experts.up'.*experts.gate_up.values"):
        layer(sharding={"experts.up": ("e",)})
    with pytest.raises(ValueError, match=r"router.kernel names 1 axes.*\(128, 8\)"):
        layer(sharding={"router.kernel": ("e",)})


def test_every_parameter_has_names():
    module = every_option()
    assert paths(module) <= set(SHARDING)
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        assert len(variable.out_sharding) == variable.ndim, path


# --- refusals


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"top_k": None}, "top_k is missing"),
        ({"top_k": 9}, "top_k is 9 but there are only 8 experts"),
        ({"rngs": None}, "rngs is missing"),
        ({"router": RouterConfig(num_experts=4, top_k=2)}, "router has 4 experts and top_k 2.*num_experts 8"),
        ({"router": RouterConfig(num_experts=E, top_k=3)}, "top_k 3, but.*top_k 2"),
        ({"param_dtype": jnp.int8}, "param_dtype is int8"),
    ],
)
def test_wrong_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        layer(**kwargs)


def test_wrong_parameters_and_inputs_are_named():
    module = layer()
    config = MoEConfig(hidden=H, intermediate=WIDTH, router=RouterConfig(num_experts=4, top_k=2))
    with pytest.raises(ValueError, match=r"router kernel is \[128, 8\].*\[128, 4\]"):
        MoE.from_params(config, module.params)(tokens(2))
    with pytest.raises(ValueError, match=r"H = 128"):
        module(jnp.ones((2, 64), jnp.bfloat16))
    with pytest.raises(ValueError, match="x is int32; it must be floating point"):
        module(jnp.ones((2, H), jnp.int32))


# --- training


@pytest.mark.parametrize("weights", [jaxmoe.BF16, jaxmoe.MXFP4], ids=str)
def test_a_training_loop_lowers_the_loss_and_leaves_quantised_weights_alone(weights):
    module = layer(
        weights=weights, param_dtype=jnp.float32, shared=SharedExperts(intermediate=WIDTH, weights=jaxmoe.BF16)
    )
    optimizer = nnx.Optimizer(module, optax.sgd(0.3, momentum=0.9), wrt=nnx.Param)
    x = tokens(32, dtype=jnp.float32)
    target = jnp.tanh(jnp.roll(x, 1, axis=-1))
    frozen = jax.tree.map(jnp.copy, nnx.state(module, QuantizedParam))

    @nnx.jit
    def step(module, optimizer):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - target) ** 2))(module)
        optimizer.update(module, gradients)
        return loss

    losses = [float(step(module, optimizer)) for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]
    after = nnx.state(module, QuantizedParam)
    assert len(jax.tree.leaves(after)) == (4 if weights.quantized else 0)
    jax.tree.map(np.testing.assert_array_equal, frozen, after)
