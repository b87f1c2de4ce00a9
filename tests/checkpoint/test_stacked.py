"""The same experts stored in other ways: stacked, and with one scale per matrix.

Stacked names are those of transformers 5 (``conversion_mapping.py``).
"""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxmoe.checkpoint import load_config, load_moe
from jaxmoe.errors import CheckpointError

H, I, E, K = 64, 32, 8, 2  # noqa: E741
MODEL = {"hidden_size": H, "num_hidden_layers": 4, "hidden_act": "silu", "num_experts_per_tok": K}
QWEN3 = MODEL | {"model_type": "qwen3_moe", "num_experts": E, "norm_topk_prob": True}


def same(a, b):
    assert a.config == b.config and jax.tree.structure(a.params) == jax.tree.structure(b.params)
    for left, right in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def restack(tensors, old, new, names, suffixes):
    """Per-expert tensors as transformers 5 keeps them: [gate; up] stacked, and down."""
    out = {k.replace(old, new): v for k, v in tensors.items() if ".experts." not in k}
    for target, parts in (("gate_up_proj", names[:2]), ("down_proj", names[2:])):
        for suffix, to in suffixes.items():
            each = [[tensors[f"{old}experts.{e}.{p}.{suffix}"] for p in parts] for e in range(E)]
            out[f"{new}experts.{target}{to}"] = np.stack([np.concatenate(pair) for pair in each])
    return out


def test_stacked_names_load_the_same(new_layer, write_checkpoint):
    config = MODEL | {"model_type": "mixtral", "intermediate_size": I, "num_local_experts": E}
    layer = new_layer("model.layers.0.block_sparse_moe.")
    layer.bf16("gate.weight", E, H)
    for e in range(E):
        layer.mlp(f"experts.{e}", I, names=("w1", "w3", "w2"))
    separate = load_moe(write_checkpoint(config, layer.tensors), 0, progress=False)
    stacked = restack(layer.tensors, layer.prefix, "model.layers.0.mlp.", ("w1", "w3", "w2"), {"weight": ""})
    same(load_moe(write_checkpoint(config, stacked, "stacked"), 0, progress=False), separate)
    both = layer.tensors | stacked
    with pytest.raises(CheckpointError, match=r"layer 0 is there twice.*block_sparse_moe.*mlp"):
        load_config(write_checkpoint(config, both, "both"), 0)
    both = layer.tensors | {k.replace("mlp", "block_sparse_moe"): v for k, v in stacked.items()}
    with pytest.raises(CheckpointError, match=r"experts are there twice.*w1.*stacked.*down_proj"):
        load_config(write_checkpoint(config, both, "both"), 0)


def test_stacked_fp8_loads_the_same(new_layer, write_checkpoint):
    config = QWEN3 | {
        "moe_intermediate_size": 128,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    layer = new_layer("model.layers.0.mlp.")
    layer.bf16("gate.weight", E, H)
    for e in range(E):
        layer.mlp(f"experts.{e}", 128, make=layer.fp8)
    separate = load_moe(write_checkpoint(config, layer.tensors), 0, progress=False)
    names, suffixes = ("gate_proj", "up_proj", "down_proj"), {"weight": "", "weight_scale_inv": "_scale_inv"}
    stacked = restack(layer.tensors, layer.prefix, layer.prefix, names, suffixes)
    same(load_moe(write_checkpoint(config, stacked, "stacked"), 0, progress=False), separate)


@pytest.mark.parametrize("stacked_shape", [(), (1,), (E,), (E, 1, 1)])
def test_per_tensor_scales(rng, new_layer, write_checkpoint, stacked_shape):
    """One scale per matrix (no weight_block_size) is repeated over blocks, and any TP cut is exact."""
    config = QWEN3 | {"moe_intermediate_size": I, "quantization_config": {"quant_method": "fp8"}}
    layer = new_layer("model.layers.0.mlp.")
    layer.bf16("gate.weight", E, H)
    t = layer.tensors
    t["model.layers.0.mlp.experts.gate_up_proj"] = rng.normal(size=(E, 2 * I, H)).astype(ml_dtypes.float8_e4m3fn)
    t["model.layers.0.mlp.experts.down_proj"] = rng.normal(size=(E, H, I)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.random(stacked_shape).astype(np.float32).reshape(stacked_shape)
    for part in ("gate_up_proj", "down_proj"):
        t[f"model.layers.0.mlp.experts.{part}_scale_inv"] = np.asarray(scale)
    path = write_checkpoint(config, t)
    loaded = load_moe(path, 0, progress=False)
    assert loaded.config.weights.name == "FP8Block" and loaded.config.partial_blocks
    want = np.broadcast_to(scale.reshape(-1), E)
    for w in (loaded.params.experts.gate_up, loaded.params.experts.down):
        np.testing.assert_array_equal(w.scales, np.broadcast_to(want[:, None, None], w.scales.shape))
    part = load_moe(path, 0, tp=(1, 4), progress=False)
    assert part.config.intermediate == 8
    np.testing.assert_array_equal(
        np.asarray(part.params.experts.gate_up.values).astype(np.float32)[:, 128:136, :H],
        t["model.layers.0.mlp.experts.gate_up_proj"].astype(np.float32)[:, I + 8 : I + 16],
    )
