"""Every family's names and router, on generated layers against float64 formulas written here from the public models.

The sources are those that jaxmoe/checkpoint/families.py names. No real release was read here: these layers are
generated, and show that names and formulas are what the sources say.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe import Execution, moe
from jaxmoe.checkpoint import load_config, load_moe, moe_layers
from jaxmoe.errors import CheckpointError

run = jax.jit(moe, static_argnames=("config", "execution"))
E8M0 = ml_dtypes.float8_e8m0fnu
T, H, I, E, K = 11, 64, 32, 8, 2  # noqa: E741


def silu(g, u):
    return g / (1 + np.exp(-g)) * u


def clamped(limit):
    return lambda g, u: silu(np.minimum(g, limit), np.clip(u, -limit, limit))


def ffn(x, weights, act=silu):
    gate, up, down = weights
    return act(x @ gate.T, x @ up.T) @ down.T


def mix(x, ids, w, experts, act=silu):
    y = np.zeros_like(x)
    for e, weights in enumerate(experts):
        y += (w * (ids == e)).sum(1, keepdims=True) * ffn(x, weights, act)
    return y


def softmax(z):
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def top(selection, weights, k=K):
    ids = np.argsort(-selection, axis=1, kind="stable")[:, :k]
    return ids, np.take_along_axis(weights, ids, 1)


def normed(w):
    return w / w.sum(1, keepdims=True)


def check(path, layer, x, want, token_ids=None, tolerance=1e-5):
    loaded = load_moe(path, layer, progress=False)
    execution = Execution(quantize_activations=False)
    ids = None if token_ids is None else jnp.asarray(token_ids)
    got = run(loaded.params, jnp.asarray(x, jnp.float32), config=loaded.config, execution=execution, token_ids=ids)
    assert np.abs(np.asarray(got) - want).max() <= tolerance * np.abs(want).max()
    assert loaded.config == load_config(path, layer)
    return loaded


def inputs(rng, hidden=H):
    return rng.normal(size=(T, hidden)).astype(np.float32).astype(np.float64)


def base(model_type, **more):
    return {"model_type": model_type, "hidden_size": H, "num_hidden_layers": 4, "hidden_act": "silu", **more}


@pytest.mark.parametrize("norm", [False, True])
def test_qwen2_moe(rng, new_layer, write_checkpoint, norm):
    """Softmax over all, top-k, weights left as they are unless norm_topk_prob; σ-gated shared expert; sparse step."""
    config = base(
        "qwen2_moe",
        moe_intermediate_size=I,
        shared_expert_intermediate_size=48,
        num_experts=E,
        norm_topk_prob=norm,
        num_experts_per_tok=K,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        intermediate_size=99,
    )
    layer = new_layer("model.layers.1.mlp.")
    router = layer.bf16("gate.weight", E, H)
    experts = [layer.mlp(f"experts.{e}", I) for e in range(E)]
    shared, vector = layer.mlp("shared_expert", 48), layer.bf16("shared_expert_gate.weight", 1, H)
    path = write_checkpoint(config, layer.tensors)
    x = inputs(rng)
    p = softmax(x @ router.T)
    ids, w = top(p, p)
    want = mix(x, ids, normed(w) if norm else w, experts) + ffn(x, shared) / (1 + np.exp(-(x @ vector.T)))
    loaded = check(path, 1, x, want)
    assert loaded.config.shared.gate and loaded.config.shared.intermediate == 48
    assert moe_layers(path) == [1]
    for dense in (0, 2, 3):
        with pytest.raises(CheckpointError, match=rf"layer {dense} has no MoE.*\[1\]"):
            load_moe(path, dense, progress=False)
    with pytest.raises(CheckpointError, match="no layer 4; layers are 0 to 3"):
        load_config(path, 4)


def test_qwen3_moe(rng, new_layer, write_checkpoint):
    config = base("qwen3_moe", moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K, norm_topk_prob=True)
    layer = new_layer("model.layers.3.mlp.")
    router, experts = layer.bf16("gate.weight", E, H), [layer.mlp(f"experts.{e}", I) for e in range(E)]
    x = inputs(rng)
    p = softmax(x @ router.T)
    ids, w = top(p, p)
    check(write_checkpoint(config, layer.tensors), 3, x, mix(x, ids, normed(w), experts))


def test_olmoe(rng, new_layer, write_checkpoint):
    """Softmax over all experts, not renormalised; I is the config's intermediate_size."""
    config = base("olmoe", intermediate_size=I, num_experts=E, num_experts_per_tok=K, norm_topk_prob=False)
    layer = new_layer("model.layers.0.mlp.")
    router, experts = layer.bf16("gate.weight", E, H), [layer.mlp(f"experts.{e}", I) for e in range(E)]
    x = inputs(rng)
    p = softmax(x @ router.T)
    check(write_checkpoint(config, layer.tensors), 0, x, mix(x, *top(p, p), experts))


def test_mixtral(rng, new_layer, write_checkpoint):
    config = base("mixtral", intermediate_size=I, num_local_experts=E, num_experts_per_tok=K)
    layer = new_layer("model.layers.0.block_sparse_moe.")
    router = layer.bf16("gate.weight", E, H)
    experts = [layer.mlp(f"experts.{e}", I, names=("w1", "w3", "w2")) for e in range(E)]
    x = inputs(rng)
    ids, z = top(x @ router.T, x @ router.T)
    check(write_checkpoint(config, layer.tensors), 0, x, mix(x, ids, softmax(z), experts))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_deepseek_v3_and_glm4(rng, new_layer, write_checkpoint, model_type):
    """Sigmoid; the bias and groups (sum of a group's best two) choose; unbiased scores, renormalised, times scaling."""
    config = base(
        model_type,
        moe_intermediate_size=I,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
    )
    layer = new_layer("model.layers.2.mlp.")
    router = layer.bf16("gate.weight", E, H, scale=0.2)
    bias = rng.normal(size=E).astype(np.float32)
    layer.tensors["model.layers.2.mlp.gate.e_score_correction_bias"] = bias
    experts, shared = [layer.mlp(f"experts.{e}", I) for e in range(E)], layer.mlp("shared_experts", 2 * I)
    x = inputs(rng)
    s = 1 / (1 + np.exp(-(x @ router.T)))
    choice = (s + bias).reshape(T, 4, 2)
    groups = np.argsort(-choice.sum(2), axis=1)[:, :2]
    keep = (groups[:, :, None] == np.arange(4)).any(1)
    ids, w = top(np.where(keep[:, :, None], choice, -np.inf).reshape(T, E), s)
    path = write_checkpoint(config, layer.tensors)
    check(path, 2, x, mix(x, ids, 2.5 * normed(w), experts) + ffn(x, shared))
    assert moe_layers(path) == [1, 2, 3]


def test_kimi_k2_fp8_with_partial_blocks(rng, new_layer, write_checkpoint):
    """DeepSeek-V3's layout, one group; FP8 with a last block of 32 rows and one of 64 columns."""
    h, i = 192, 160
    config = base(
        "kimi_k2",
        moe_intermediate_size=i,
        n_routed_experts=4,
        num_experts_per_tok=K,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.827,
        first_k_dense_replace=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    config["hidden_size"] = h
    layer = new_layer("model.layers.1.mlp.")
    router, bias = layer.bf16("gate.weight", 4, h), layer.bf16("gate.e_score_correction_bias", 4)
    experts = [layer.mlp(f"experts.{e}", i, h, make=layer.fp8) for e in range(4)]
    shared = layer.mlp("shared_experts", i, h, make=layer.fp8)
    x = inputs(rng, h) / 16
    s = 1 / (1 + np.exp(-(x @ router.T)))
    ids, w = top(s + bias, s)
    want = mix(x, ids, 2.827 * normed(w), experts) + ffn(x, shared)
    loaded = check(write_checkpoint(config, layer.tensors), 1, x, want)
    assert loaded.config.partial_blocks and loaded.config.weights.name == "FP8Block"


def test_ernie_4_5_moe(rng, new_layer, write_checkpoint):
    """Softmax; the bias [1, E] chooses; unbiased scores renormalised with a floor; no scaling."""
    config = base(
        "ernie4_5_moe",
        moe_intermediate_size=I,
        moe_num_experts=E,
        moe_k=K,
        moe_num_shared_experts=2,
        use_bias=False,
        moe_layer_start_index=1,
        moe_layer_end_index=2,
        moe_layer_interval=1,
        moe_norm_min=1e-12,
    )
    layer = new_layer("model.layers.1.mlp.")
    router = rng.normal(size=(E, H)).astype(np.float32) / 8
    layer.tensors["model.layers.1.mlp.gate.weight"] = router
    bias = rng.normal(size=(1, E)).astype(np.float32) / 4
    layer.tensors["model.layers.1.mlp.moe_statics.e_score_correction_bias"] = bias
    experts, shared = [layer.mlp(f"experts.{e}", I) for e in range(E)], layer.mlp("shared_experts", 2 * I)
    x = inputs(rng)
    p = softmax(x @ router.T.astype(np.float64))
    ids, w = top(p + bias, p)
    path = write_checkpoint(config, layer.tensors)
    loaded = check(path, 1, x, mix(x, ids, normed(w), experts) + ffn(x, shared))
    assert moe_layers(path) == [1, 2] and loaded.config.router.renormalize_floor == 1e-12
    with pytest.raises(CheckpointError, match="use_bias is True"):
        load_config(write_checkpoint({**config, "use_bias": True}, layer.tensors), 1)


def test_minimax_m2(rng, new_layer, write_checkpoint):
    """Sigmoid, bias at the block, no groups, no shared expert; FP8 experts under w1, w2, w3."""
    config = base(
        "minimax_m2",
        intermediate_size=128,
        num_local_experts=4,
        num_experts_per_tok=K,
        scoring_func="sigmoid",
        use_routing_bias=True,
        shared_intermediate_size=0,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    config["hidden_size"] = 128
    layer = new_layer("model.layers.0.block_sparse_moe.")
    router, bias = layer.bf16("gate.weight", 4, 128, scale=0.1), layer.bf16("e_score_correction_bias", 4)
    names = ("w1", "w3", "w2")
    experts = [layer.mlp(f"experts.{e}", 128, 128, names, layer.fp8) for e in range(4)]
    x = inputs(rng, 128) / 16
    s = 1 / (1 + np.exp(-(x @ router.T)))
    ids, w = top(s + bias, s)
    check(write_checkpoint(config, layer.tensors), 0, x, mix(x, ids, normed(w), experts))


@pytest.mark.parametrize("expert_dtype", [True, False])
@pytest.mark.parametrize("layer_index", [0, 1])
def test_deepseek_v4_release_names(rng, new_layer, write_checkpoint, expert_dtype, layer_index):
    """No ``model.`` prefix, num_hash_layers, int8-packed experts, shared experts e4m3 with e8m0 blocks; all clamped."""
    config = base(
        "deepseek_v4",
        moe_intermediate_size=128,
        n_routed_experts=4,
        num_experts_per_tok=K,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        scoring_func="sqrtsoftplus",
        swiglu_limit=1.0,
        num_hash_layers=1,
        vocab_size=17,
        topk_method="noaux_tc",
        quantization_config={"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    )
    config |= {"hidden_size": 128} | ({"expert_dtype": "fp4"} if expert_dtype else {})
    layer = new_layer(f"layers.{layer_index}.ffn.")
    router, names = layer.bf16("gate.weight", 4, 128, scale=0.1), ("w1", "w3", "w2")
    experts = [layer.mlp(f"experts.{e}", 128, 128, names, layer.fp4) for e in range(4)]
    shared = layer.mlp("shared_experts", 128, 128, names, layer.fp8, suffix="scale", scale_dtype=E8M0)
    x, tokens = inputs(rng, 128) / 32, rng.integers(0, 17, T).astype(np.int32)
    s = np.sqrt(np.log1p(np.exp(x @ router.T)))
    if layer_index == 0:
        table = np.argsort(rng.random((17, 4)), axis=1)[:, :K]
        layer.tensors[layer.prefix + "gate.tid2eid"] = table
        ids, w = table[tokens], np.take_along_axis(s, table[tokens], 1)
    else:
        ids, w = top(s + layer.bf16("gate.bias", 4), s)
    act = clamped(1.0)
    want = mix(x, ids, 1.5 * normed(w), experts, act) + ffn(x, shared, act)
    path = write_checkpoint(config, layer.tensors)
    loaded = check(path, layer_index, x, want, tokens if layer_index == 0 else None)
    assert (loaded.config.weights.name, loaded.config.shared_format.name) == ("MXFP4", "FP8BlockUE8M0")
    if layer_index == 0:
        layer.tensors[layer.prefix + "gate.tid2eid"] = table + 3
        with pytest.raises(CheckpointError, match=r"tid2eid holds expert ids 3 to 6; they must be in 0\.\.3"):
            load_moe(write_checkpoint(config, layer.tensors), 0, progress=False)


def test_gpt_oss_bf16(rng, new_layer, write_checkpoint):
    """Stacks stored [E, in, out] with alternating gate and up columns; biases everywhere; alpha from the config."""
    config = base(
        "gpt_oss",
        intermediate_size=I,
        num_local_experts=E,
        num_experts_per_tok=K,
        experts_per_token=K,
        swiglu_limit=1.0,
        swiglu_alpha=1.5,
    )
    layer = new_layer("model.layers.0.mlp.")
    router, router_bias = layer.bf16("router.weight", E, H), layer.bf16("router.bias", E)
    gate_up, down = layer.bf16("experts.gate_up_proj", E, H, 2 * I), layer.bf16("experts.down_proj", E, I, H)
    b1, b2 = layer.bf16("experts.gate_up_proj_bias", E, 2 * I), layer.bf16("experts.down_proj_bias", E, H)
    x = inputs(rng)
    ids, z = top(x @ router.T + router_bias, x @ router.T + router_bias)
    w, want = softmax(z), np.zeros_like(x)
    for e in range(E):
        h = x @ gate_up[e] + b1[e]
        g, u = np.minimum(h[:, 0::2], 1.0), np.clip(h[:, 1::2], -1.0, 1.0)
        y = (g / (1 + np.exp(-1.5 * g)) * (u + 1)) @ down[e] + b2[e]
        want += (w * (ids == e)).sum(1, keepdims=True) * y
    path = write_checkpoint(config, layer.tensors)
    check(path, 0, x, want)
    parts = [load_moe(path, 0, tp=(r, 2), progress=False) for r in range(2)]
    total = sum(np.asarray(run(p.params, jnp.asarray(x, jnp.float32), config=p.config)) for p in parts)
    assert np.abs(total - want).max() <= 1e-5 * np.abs(want).max()
