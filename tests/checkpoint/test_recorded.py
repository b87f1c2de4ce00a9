"""Blocks of recorded checkpoints give what transformers gave in float32 (moe_io.npz holds its inputs and outputs)."""

from __future__ import annotations

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import BF16, MXFP4, Execution, FP8Block, FP8BlockUE8M0, moe
from jaxmoe.checkpoint import load_config, load_moe, moe_layers
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.target import target
from jaxmoe.errors import ShapeError
from jaxmoe.testing import calc_diff

ROOT = pathlib.Path(__file__).parents[2]
OWN = [ROOT / "examples/data/deepseek_v4_fp4", ROOT / "tests/data/deepseek_v3_fp8", ROOT / "tests/data/gpt_oss_mxfp4"]
SHARED = pathlib.Path(os.environ.get("JAXMOE_SHARED", ROOT.parent / "shared")) / "checkpoints"
ALL = {p.name: p for p in (*OWN, *sorted(p.parent for p in SHARED.glob("*/moe_io.npz")))}.values()
BLOCKS = [pytest.param(p, n, id=f"{p.parent.name}-{p.name}-{n}") for p in ALL for n in moe_layers(p)]
run = jax.jit(moe, static_argnames=("config", "execution"))


def recorded(path, layer):
    io = np.load(path / "moe_io.npz")
    name = f"model.layers.{layer}.mlp"
    return jnp.asarray(io[f"{name}|x"]), io[f"{name}|y"], jnp.asarray(io["input_ids"].astype(np.int32))


def output(loaded, x, ids, **execution):
    ids = ids if loaded.config.router.hash_routing else None
    return np.asarray(run(loaded.params, x, config=loaded.config, execution=Execution(**execution), token_ids=ids))


@pytest.mark.parametrize(("path", "layer"), BLOCKS)
def test_block_reproduces_recorded_output(path, layer):
    x, y, ids = recorded(path, layer)
    loaded = load_moe(path, layer, progress=False)
    assert loaded.config == load_config(path, layer)
    exact = output(loaded, x, ids, quantize_activations=False)
    assert np.abs(exact - y).max() <= 1e-5 * np.abs(y).max()
    # Rows are quantised twice, before either GEMM, and the format's bound is for one.
    assert calc_diff(output(loaded, x, ids), y) < 2 * loaded.config.weights.max_diff


def test_a_loaded_layer_is_called():
    """Eagerly, jitted as it is, and with its parameters passed in: the same bits, as its own execution says."""
    x, y, ids = recorded(OWN[0], 0)
    loaded = load_moe(OWN[0], 0, execution=Execution(layout="masked", quantize_activations=False), progress=False)
    got = np.asarray(jax.jit(loaded)(x, token_ids=ids))
    assert np.abs(got - y).max() <= 1e-5 * np.abs(y).max()
    np.testing.assert_array_equal(got, output(loaded, x, ids, layout="masked", quantize_activations=False))
    valid = jnp.zeros(x.shape[:-1], bool)
    assert (jax.jit(loaded)(x, token_ids=ids, valid=valid) == 0).all()
    plan = loaded.plan(4096, device="H200")
    assert (plan.layout, plan.tokens, plan.config) == ("masked", 4096, loaded.config)
    assert plan == jaxmoe.plan(loaded.config, 4096, loaded.execution, device="H200")


def test_a_shard_of_experts_is_not_called():
    loaded = load_moe(OWN[2], 0, experts=range(2), progress=False)
    with pytest.raises(ShapeError, match="gate_up holds 2 experts; the config says 8"):
        loaded(jnp.ones((1, loaded.config.hidden), jnp.bfloat16))


def test_weights_stay_quantised():
    names = {p.name: (c.weights.name, c.shared_format.name) for p in OWN for c in [load_config(p, 0)]}
    assert names == {
        "deepseek_v4_fp4": ("MXFP4", "FP8BlockUE8M0"),
        "deepseek_v3_fp8": ("FP8Block", "FP8Block"),
        "gpt_oss_mxfp4": ("MXFP4", "MXFP4"),
    }


@pytest.mark.parametrize(("path", "fmt"), [(OWN[0], FP8Block), (OWN[1], BF16), (OWN[2], FP8Block)])
def test_converted_at_load(path, fmt):
    """e2m1 to e4m3 blocks and e8m0 to f32 scales are exact here; bf16 rounds what an f32 scale multiplied."""
    x, y, ids = recorded(path, 0)
    loaded = load_moe(path, 0, weights=fmt, shared_weights=fmt, progress=False)
    assert loaded.config.weights == fmt and loaded.params.experts.down.format == fmt
    tolerance = 1e-2 if fmt == BF16 and path.name == "deepseek_v3_fp8" else 1e-5
    exact = output(loaded, x, ids, quantize_activations=False)
    assert np.abs(exact - y).max() <= tolerance * np.abs(y).max()


def test_auto_takes_the_format_that_kernels_run():
    def formats(**options):
        config = load_moe(OWN[0], 0, weights="auto", progress=False, **options).config
        return config.weights, config.shared_format

    assert formats() == (MXFP4, FP8BlockUE8M0), "the reference takes what there is"
    with target(Arch("sm_90a", 132)):
        assert formats() == (FP8Block, FP8Block)
        assert formats(shared_weights=BF16) == (FP8Block, BF16)
    with target(Arch("sm_100f", 148)):
        assert formats() == (MXFP4, FP8BlockUE8M0)


@pytest.mark.parametrize(("path", "weights"), [(OWN[1], None), (OWN[0], FP8BlockUE8M0)])
def test_fused_shared_experts_change_nothing(path, weights):
    x, y, ids = recorded(path, 0)
    loaded = load_moe(path, 0, weights=weights, fuse_shared=True, progress=False)
    assert loaded.params.experts.gate_up.num_experts == 9 and loaded.config.fused_slots == 1
    exact = output(loaded, x, ids, quantize_activations=False)
    assert np.abs(exact - y).max() <= 1e-5 * np.abs(y).max()


@pytest.mark.parametrize(("path", "ranks"), [(OWN[0], 2), (OWN[1], 4), (OWN[2], 4)])
def test_tensor_parallel_parts_sum_to_the_whole(path, ranks):
    """I = 128 in FP8 blocks of 128: every cut falls inside a block (of shared experts, in V4), and the sum is exact."""
    x, y, ids = recorded(path, 0)
    parts = [load_moe(path, 0, tp=(r, ranks), progress=False) for r in range(ranks)]
    assert len({p.config for p in parts}) == 1
    total = sum(output(p, x, ids, quantize_activations=False).astype(np.float64) for p in parts)
    assert np.abs(total - y).max() <= 1e-5 * np.abs(y).max()


def test_expert_shards_are_slices_of_the_whole():
    whole = load_moe(OWN[2], 0, progress=False)
    for first in range(0, 8, 2):
        part = load_moe(OWN[2], 0, experts=range(first, first + 2), progress=False)
        assert part.config == whole.config
        for a, b in zip(jax.tree.leaves(part.params.experts), jax.tree.leaves(whole.params.experts), strict=True):
            np.testing.assert_array_equal(a, b[first : first + 2])
