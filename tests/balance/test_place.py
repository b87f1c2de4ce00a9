"""A placed layer is the layer it was: on one device to the bit, on many to rounding; and its copies share the load."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import Execution, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.balance import Placement, expert_load, moe_with_load, place_experts, plan_placements
from jaxmoe.errors import ShapeError
from jaxmoe.layer.build import make_params
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.quant.formats import BF16, FORMATS, FP8Block
from jaxmoe.quant.weights import dequantize
from jaxmoe.router import Routing, choose_copies

E, K, H, WIDTH, T = 6, 3, 128, 128, 40
PLACES = [1, 4, 0, 2, 1, 3, 5, 1, 4, 0]
"""10 places on 2 ranks: expert 1 three times, experts 0 and 4 twice."""

run = jax.jit(jaxmoe.moe, static_argnames=("config", "execution"))
counted = jax.jit(moe_with_load, static_argnames=("config", "execution", "layout", "mesh"))


def layer(fmt=BF16, *, shared=None, bias=False, **router):
    """A random layer, hot for expert 1, and tokens of which one is padding that holds NaN."""
    rng = np.random.default_rng(7)
    config = MoEConfig(
        hidden=H,
        intermediate=WIDTH,
        router=RouterConfig(num_experts=E, top_k=K, correction_bias=True, score="sigmoid", **router),
        weights=fmt,
        shared=shared,
        expert_bias=bias,
    )
    sizes = {"gate": (E, WIDTH, H), "up": (E, WIDTH, H), "down": (E, H, WIDTH), "router_kernel": (H, E)}
    if shared is not None:
        sizes |= {"shared_gate": (WIDTH, H), "shared_up": (WIDTH, H), "shared_down": (H, WIDTH)}
    if bias:
        sizes |= {"gate_bias": (E, WIDTH), "up_bias": (E, WIDTH), "down_bias": (E, H)}
    arrays = {n: jnp.asarray(rng.normal(size=s) / 11, jnp.float32) for n, s in sizes.items()}
    arrays["correction_bias"] = jnp.zeros(E, jnp.float32).at[1].set(0.3)
    x = jnp.asarray(rng.normal(size=(T, H)), jnp.float32).at[5].set(jnp.nan)
    return config, make_params(config, **arrays), x, jnp.arange(T) != 5


@pytest.mark.parametrize(
    "fmt, shared, bias, deterministic",
    [
        (BF16, SharedExperts(intermediate=WIDTH, fused=True), True, False),
        (FP8Block, SharedExperts(intermediate=WIDTH), False, True),
    ],
    ids=["BF16", "FP8Block"],
)
def test_the_same_bits(fmt, shared, bias, deterministic):
    config, params, x, valid = layer(fmt, shared=shared, bias=bias)
    execution = Execution(backend="reference", deterministic=deterministic)
    placed, physical = place_experts(params, config, Placement.of(PLACES, 2))
    assert physical.router.num_experts == 10 and physical.router.logical == E
    y = run(params, x, config, execution, valid=valid)
    got, places = counted(placed, x, physical, execution, valid=valid)
    np.testing.assert_array_equal(got, y)
    # Every choice is counted once, at a place of the expert it was for; all places are used.
    ids = jaxmoe.route(params.router, x, config.router, valid=valid, deterministic=deterministic).ids
    load = Placement.of(PLACES, 2).logical_load(places)
    np.testing.assert_array_equal(load, np.bincount(np.asarray(ids)[np.asarray(valid)].ravel(), minlength=E))
    assert load.sum() == K * (T - 1) and load[1] == load.max() and (np.asarray(places) > 0).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_every_format_is_copied_whole(fmt):
    config, params, _, _ = layer(fmt, shared=SharedExperts(intermediate=WIDTH, fused=True), bias=True)
    placed, _ = place_experts(params, config, Placement.of(PLACES, 2))
    order = np.asarray([*PLACES, E])
    for got, want in ((placed.experts.gate_up, params.experts.gate_up), (placed.experts.down, params.experts.down)):
        np.testing.assert_array_equal(dequantize(got), dequantize(want)[order])
    np.testing.assert_array_equal(placed.experts.down_bias, params.experts.down_bias[order])


def test_placing_again_and_back():
    config, params, x, _ = layer(FP8Block)
    placed, physical = place_experts(params, config, Placement.of(PLACES, 2))
    load = expert_load(jaxmoe.route(params.router, x, config.router, valid=jnp.arange(T) != 5), E)
    other = plan_placements(load[None], 3, 3)[0]
    moved, config_of_moved = place_experts(placed, physical, other)
    at_once, config_at_once = place_experts(params, config, other)
    assert config_of_moved == config_at_once
    jax.tree.map(np.testing.assert_array_equal, moved, at_once)
    back, first = place_experts(moved, config_of_moved, Placement.identity(E))
    assert first == config
    jax.tree.map(np.testing.assert_array_equal, back, params)
    with pytest.raises(ShapeError, match="the placement is for 5 experts; the layer has 6"):
        place_experts(params, config, Placement.identity(5))


@pytest.mark.parametrize("fmt, deterministic", [(BF16, True), (FP8Block, False)], ids=str)
def test_on_a_mesh(fmt, deterministic):
    """Expert parallel over 2 ranks, tokens cut and not: to rounding, for the f32 sums over ranks regroup."""
    config, params, x, valid = layer(fmt, shared=None)
    execution = Execution(backend="reference", deterministic=deterministic)
    want = run(params, x, config, execution, valid=valid)
    placement = Placement.of(PLACES, 2)
    placed, physical = place_experts(params, config, placement)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("d", "e"))
    layout = ParallelLayout(tokens=P(("d", "e")) if deterministic else P(), experts="e")
    sharded = shard_params(placed, physical, layout, mesh)
    if deterministic:
        y = moe_parallel(sharded, x, physical, layout, mesh, execution, valid=valid)
    else:
        y, load = counted(sharded, x, physical, execution, layout=layout, mesh=mesh, valid=valid)
        assert load.sum() == K * (T - 1)
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-6 * float(jnp.abs(want).max()))


def test_ranks_get_even_load():
    """A hot expert: counts of the unplaced layer plan the placement, counts of the placed one show it."""
    config, params, _, _ = layer()
    x = jnp.asarray(np.random.default_rng(8).normal(size=(2000, H)), jnp.float32)
    load = expert_load(jaxmoe.route(params.router, x, config.router), E)
    before = Placement.identity(E, 2).imbalance(load)
    (placement,) = plan_placements(np.asarray(load)[None], ranks=2, redundant=4)
    placed, physical = place_experts(params, config, placement)
    for deterministic in (False, True):
        routing = jaxmoe.route(placed.router, x, physical.router, deterministic=deterministic)
        ranks = np.asarray(expert_load(routing, 10)).reshape(2, -1).sum(1)
        assert placement.imbalance(load) < ranks.max() / ranks.mean() < 1.07 < before


def test_copies_by_hand():
    replicas = jnp.array([[0, 4, 6], [1, -1, -1], [2, 5, -1], [3, -1, -1]], jnp.int32)
    ids = jnp.array([[0, 1], [0, 2], [0, 3], [2, 0], [-1, -1], [2, 3]], jnp.int32)
    weights = jnp.full(ids.shape, 0.5, jnp.float32)
    # Indices 0 to 5 and sums of ids 1, 2, 3, 2, 0, 5, modulo the copies.
    chosen = choose_copies(Routing(ids, weights), replicas, by_place=True)
    assert chosen.ids.tolist() == [[4, 1], [0, 5], [6, 3], [5, 6], [-1, -1], [2, 3]]
    np.testing.assert_array_equal(chosen.weights, weights)
    # A hundred equal tokens take copies in turn; without their place, all the same one.
    same = Routing(jnp.broadcast_to(ids[:1], (99, 2)), jnp.ones((99, 2), jnp.float32))
    assert np.bincount(choose_copies(same, replicas, by_place=True).ids[:, 0])[[0, 4, 6]].tolist() == [33, 33, 33]
    (one,) = set(choose_copies(same, replicas, by_place=False).ids[:, 0].tolist())
    assert one in (0, 4, 6)
    # Ones whose weights differ spread.
    weights = jax.random.uniform(jax.random.key(0), (900, 2))
    chosen = choose_copies(Routing(jnp.broadcast_to(ids[:1], (900, 2)), weights), replicas, by_place=False)
    assert np.bincount(chosen.ids[:, 0])[[0, 4, 6]].min() > 250 and (chosen.ids[:, 1] == 1).all()


def test_deterministic_copies_depend_on_the_token_alone():
    config, params, x, _ = layer(FP8Block)
    placed, physical = place_experts(params, config, Placement.of(PLACES, 2))
    route = jax.jit(jaxmoe.route, static_argnames=("config", "deterministic"))
    x = x.at[5].set(1.0)
    whole = route(placed.router, x, physical.router, deterministic=True).ids
    some = route(placed.router, x[::-1][3:10], physical.router, deterministic=True).ids
    np.testing.assert_array_equal(some, whole[::-1][3:10])


@pytest.mark.parametrize("grouped", [False, True])
def test_grouped_and_hash_routers(grouped):
    config, params, x, _ = layer(**({"num_groups": 3, "top_groups": 2} if grouped else {}))
    x = x.at[5].set(0.5)
    ids = None
    if not grouped:
        router = dataclasses.replace(config.router, hash_routing=True, correction_bias=False)
        config = dataclasses.replace(config, router=router)
        table = jnp.asarray([np.random.default_rng(t).permutation(E)[:K] for t in range(9)], jnp.int32)
        params = dataclasses.replace(
            params, router=dataclasses.replace(params.router, tid2eid=table, correction_bias=None)
        )
        ids = jnp.arange(T, dtype=jnp.int32) % 9
    placed, physical = place_experts(params, config, Placement.of(PLACES, 2))
    want = jaxmoe.route(params.router, x, config.router, token_ids=ids)
    got = jaxmoe.route(placed.router, x, physical.router, token_ids=ids)
    np.testing.assert_array_equal(np.asarray(PLACES)[np.asarray(got.ids)], want.ids)
    np.testing.assert_array_equal(got.weights, want.weights)


def test_a_table_goes_with_its_config():
    config, params, x, _ = layer()
    placed, physical = place_experts(params, config, Placement.of(PLACES, 2))
    with pytest.raises(ValueError, match=r"logical_experts=6 and the parameters hold no table"):
        stacks = dataclasses.replace(placed, router=dataclasses.replace(placed.router, replicas=None))
        jaxmoe.moe(stacks, x, physical)
    with pytest.raises(ValueError, match=r"logical_experts=None and the parameters hold a table \[6, 3\]"):
        jaxmoe.route(placed.router, x, config.router)
    with pytest.raises(ShapeError, match="logical_experts is 11 but the stacks hold only 10"):
        dataclasses.replace(physical.router, logical_experts=11)
    with pytest.raises(ShapeError, match="top_k is 7 but there are only 6 experts"):
        dataclasses.replace(physical.router, top_k=7)
    with pytest.raises(ValueError, match="layout and mesh go together"):
        moe_with_load(params, x, config, layout=ParallelLayout())
    with pytest.raises(ValueError, match="fresh parameters hold no copies"):
        jaxmoe.nn.MoE(H, WIDTH, 10, router=physical.router, rngs=nnx.Rngs(0))


def test_a_placed_layer_as_a_module():
    config, params, x, valid = layer()
    placed, physical = place_experts(params, config, Placement.of(PLACES, 2))
    module = jaxmoe.nn.MoE.from_params(physical, placed)
    assert isinstance(module.router.replicas, jaxmoe.nn.Buffer)
    y, load = jax.jit(jaxmoe.nn.MoE.with_load)(module, x, valid=valid)
    np.testing.assert_array_equal(y, run(params, x, config, valid=valid))
    assert load.shape == (10,) and load.sum() == K * (T - 1)


def test_a_layer_that_is_not_asked_counts_nothing():
    """Its program has y as the only result; the one that counts has E numbers more."""
    config, params, x, _ = layer()
    outputs = [jax.jit(f, static_argnums=2).lower(params, x, config).out_info for f in (jaxmoe.moe, moe_with_load)]
    assert [[a.shape for a in jax.tree.leaves(o)] for o in outputs] == [[(T, H)], [(T, H), (E,)]]


def test_a_placed_layer_is_not_saved_as_another_model(tmp_path):
    """A checkpoint has every expert once; the refusal names the router, and undoing the placement saves."""
    path = Path(__file__).parents[2] / "examples" / "data" / "deepseek_v4_fp4"
    layers = {n: jaxmoe.checkpoint.load_moe(path, n, progress=False) for n in (0, 1)}
    placement = Placement.of([0, 1, 2, 3, 4, 5, 6, 7, 0, 1], 2)
    params, config = place_experts(layers[1].params, layers[1].config, placement)
    placed = dataclasses.replace(layers[1], params=params, config=config)
    release = json.loads((path / "config.json").read_text())
    with pytest.raises(jaxmoe.errors.CheckpointError, match="router"):
        jaxmoe.checkpoint.save_moe(tmp_path, release, {0: layers[0], 1: placed})
