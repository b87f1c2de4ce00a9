"""What is saved is what is loaded, bit for bit; what a family cannot hold is refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

import jaxmoe
from jaxmoe import BF16, MXFP4, MXFP8, Activation, FP8Block, FP8BlockUE8M0, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.checkpoint import LoadedMoE, load_moe, save_moe
from jaxmoe.errors import CheckpointError, FormatError
from jaxmoe.layer.build import make_params
from jaxmoe.quant.scale_layout import pack_ue8m0

H, I, E, K, V = 256, 128, 4, 2, 11  # noqa: E741
V4 = {
    "model_type": "deepseek_v4",
    "vocab_size": V,
    "num_hidden_layers": 2,
    "num_hash_layers": 1,
    "hidden_size": H,
    "moe_intermediate_size": I,
    "n_routed_experts": E,
    "n_shared_experts": 2,
    "num_experts_per_tok": K,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 7.0,
}
FORMATS = [(BF16, BF16), (FP8Block, FP8Block), (MXFP4, FP8BlockUE8M0), (MXFP4, BF16)]


def v4_layer(rng, number, weights=BF16, shared=None, *, hidden=H, width=I, dtype=jnp.bfloat16):
    hashed = number == 0
    config = MoEConfig(
        hidden=hidden,
        intermediate=width,
        router=RouterConfig(
            num_experts=E,
            top_k=K,
            score="sqrtsoftplus",
            scaling_factor=1.5,
            hash_routing=hashed,
            correction_bias=not hashed,
        ),
        weights=weights,
        activation=Activation(kind="clamped", limit=7.0),
        shared=SharedExperts(intermediate=2 * width, weights=None if shared == weights else shared),
        partial_blocks=bool(hidden % weights.block or width % weights.block),
    )
    return LoadedMoE(config, params_of(rng, config, dtype))


def params_of(rng, config, dtype=jnp.bfloat16):
    h, i, e, router = config.hidden, config.intermediate, config.router.num_experts, config.router

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.normal(size=shape) * 2.0 ** rng.integers(-8, 1, shape), dtype)

    extra = {}
    if router.correction_bias:
        extra["correction_bias"] = normal(e, dtype=jnp.float32)
    if router.hash_routing:
        extra["tid2eid"] = np.stack([rng.permutation(e)[: router.top_k] for _ in range(V)])
    if config.shared is not None:
        s = config.shared.intermediate
        extra |= {"shared_gate": normal(s, h), "shared_up": normal(s, h), "shared_down": normal(h, s)}
        if config.shared.gate:
            extra["shared_gate_vector"] = normal(h, dtype=jnp.float32)
    kernel = normal(h, e, dtype=jnp.float32)
    return make_params(
        config, router_kernel=kernel, gate=normal(e, i, h), up=normal(e, i, h), down=normal(e, h, i), **extra
    )


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize(("weights", "shared"), FORMATS, ids=lambda fmt: fmt.name)
def test_round_trip(rng, tmp_path, weights, shared):
    layers = {n: v4_layer(rng, n, weights, shared) for n in (0, 1)}
    other = {"model.embed.weight": rng.normal(size=(V, H)).astype(ml_dtypes.bfloat16), "model.step": np.array(7)}
    path = save_moe(tmp_path / "new" / "checkpoint", V4, layers, other)
    for n, layer in layers.items():
        loaded = load_moe(path, n, progress=False)
        assert loaded.config == layer.config
        assert_same(loaded.params, layer.params)
    # The safetensors library reads the file as well.
    with safe_open(path / "model.safetensors", "numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("model.embed.weight"), other["model.embed.weight"])
        assert file.get_tensor("model.step") == 7
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("fmt", [FP8Block, MXFP4], ids=lambda fmt: fmt.name)
def test_round_trip_of_partial_blocks(rng, tmp_path, fmt):
    """96 and 160 are no multiples of 128: the stacks are padded, the files are not."""
    layer = v4_layer(rng, 1, fmt, fmt, hidden=160, width=96)
    config = V4 | {"num_hidden_layers": 1, "num_hash_layers": 0, "hidden_size": 160, "moe_intermediate_size": 96}
    loaded = load_moe(save_moe(tmp_path, config, {0: layer}), 0, progress=False)
    assert loaded.config == layer.config
    assert_same(loaded.params, layer.params)


def test_f32_stays_f32_and_modules_are_saved(tmp_path):
    router = RouterConfig(num_experts=E, top_k=K)
    module = jaxmoe.nn.MoE(48, 32, E, router=router, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "hidden_size": 48,
        "moe_intermediate_size": 32,
        "num_experts": E,
        "num_experts_per_tok": K,
        "norm_topk_prob": True,
    }
    loaded = load_moe(save_moe(tmp_path, config, {0: module}), 0, progress=False)
    assert loaded.params.experts.down.values.dtype == jnp.float32
    assert_same(loaded.params, module.params)


def test_a_shared_gate_is_saved(rng, tmp_path):
    config = MoEConfig(
        hidden=128,
        intermediate=128,
        router=RouterConfig(num_experts=E, top_k=K, renormalize=False),
        weights=FP8Block,
        shared=SharedExperts(intermediate=256, gate=True),
    )
    said = {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 2,
        "mlp_only_layers": [0],
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "num_experts": E,
        "num_experts_per_tok": K,
        "norm_topk_prob": False,
    }
    layer = LoadedMoE(config, params_of(rng, config))
    loaded = load_moe(save_moe(tmp_path, said, {1: layer}), 1, progress=False)
    assert loaded.config == config
    assert_same(loaded.params, layer.params)


def test_names_and_dtypes_are_those_of_releases(rng, tmp_path):
    stale = {"expert_dtype": "bf16", "quantization_config": {"quant_method": "awq"}}
    path = save_moe(tmp_path, V4 | stale, {n: v4_layer(rng, n, MXFP4, FP8BlockUE8M0) for n in (0, 1)})
    reader = jaxmoe.checkpoint.CheckpointReader(path)
    block = "model.layers.0.ffn."
    assert {name: str(reader.info(block + name)) for name in (
        "gate.weight", "gate.tid2eid", "experts.3.w1.weight", "experts.3.w1.scale", "experts.0.w2.weight",
        "shared_experts.w3.weight", "shared_experts.w3.scale",
    )} == {
        "gate.weight": "F32 [4, 256]",
        "gate.tid2eid": "I64 [11, 2]",
        "experts.3.w1.weight": "I8 [128, 128]",
        "experts.3.w1.scale": "F8_E8M0 [128, 8]",
        "experts.0.w2.weight": "I8 [256, 64]",
        "shared_experts.w3.weight": "F8_E4M3 [256, 256]",
        "shared_experts.w3.scale": "F8_E8M0 [2, 2]",
    }  # fmt: skip
    said = json.loads((path / "config.json").read_text())
    assert said["expert_dtype"] == "fp4"
    assert said["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }
    save_moe(path, said, {n: v4_layer(rng, n, FP8Block) for n in (0, 1)})
    assert str(jaxmoe.checkpoint.CheckpointReader(path).info(block + "experts.0.w2.weight_scale_inv")) == "F32 [2, 1]"
    save_moe(path, said, {n: v4_layer(rng, n) for n in (0, 1)})
    said = json.loads((path / "config.json").read_text())
    assert said["expert_dtype"] == "bf16" and "quantization_config" not in said


V3 = V4 | {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1, "scoring_func": "sqrtsoftplus"}


@pytest.mark.parametrize(
    ("config", "weights", "shared", "error", "message"),
    [
        (V4, MXFP8, MXFP8, FormatError, "deepseek_v4 checkpoints cannot hold MXFP8; .* BF16, FP8Block, FP8BlockUE8M0"),
        (V3, MXFP4, FP8Block, FormatError, "deepseek_v3 checkpoints cannot hold MXFP4; .* BF16, FP8Block with"),
        (V3, FP8Block, FP8BlockUE8M0, FormatError, "deepseek_v3 checkpoints cannot hold FP8BlockUE8M0"),
        (V4 | {"num_hidden_layers": 2}, BF16, BF16, CheckpointError, r"layers to save are \[1\]; .* are \[0, 1\]"),
        (V4 | {"hidden_size": 128}, BF16, BF16, CheckpointError, "layer 1: config.json says hidden is 128, .* 256"),
        (V4 | {"n_shared_experts": 1}, BF16, BF16, CheckpointError, "shared intermediate is 128, the layer's is 256"),
        (V4 | {"routed_scaling_factor": 1.0}, BF16, BF16, CheckpointError, "says router is .*scaling_factor=1.0"),
        (V4 | {"swiglu_limit": 1.0}, BF16, BF16, CheckpointError, "says activation is .*limit=1.0"),
        (V4 | {"model_type": "gpt2"}, BF16, BF16, CheckpointError, "'gpt2' is not one of"),
    ],
)
def test_refusals(rng, tmp_path, config, weights, shared, error, message):
    layers = {1: v4_layer(rng, 1, weights, shared)}
    if "layers to save" not in message:
        layers = {n: v4_layer(rng, 1, weights, shared) for n in (0, 1)}
        config = config | {"num_hash_layers": 0}
        message = message.replace("layer 1", "layer 0")
    with pytest.raises(error, match=message):
        save_moe(tmp_path / "checkpoint", config, layers)
    assert not (tmp_path / "checkpoint").exists()


def test_refused_layers(rng, tmp_path):
    one = V4 | {"num_hidden_layers": 1, "num_hash_layers": 0}
    fused = v4_layer(rng, 1)
    config = dataclasses.replace(fused.config, shared=SharedExperts(intermediate=2 * I, fused=True))
    with pytest.raises(FormatError, match="fuse_shared=False"):
        save_moe(tmp_path, one, {0: LoadedMoE(config, params_of(rng, config))})
    two = V4 | {"num_hash_layers": 0}
    with pytest.raises(FormatError, match=r"BF16, MXFP4; config.json names one format"):
        save_moe(tmp_path, two, {0: v4_layer(rng, 1), 1: v4_layer(rng, 1, MXFP4)})
    router = RouterConfig(num_experts=E, top_k=K, softmax_after_topk=True, logit_bias=True)
    biased = MoEConfig(hidden=64, intermediate=32, router=router, expert_bias=True)
    with pytest.raises(FormatError, match=r"gpt_oss experts .* not written"):
        jaxmoe.checkpoint.save.moe_tensors(v4_layer(rng, 1).params, biased, "gpt_oss")
    # Rows of one block with scales of their own, as a cut inside of a block leaves them.
    cut = v4_layer(rng, 1, FP8BlockUE8M0)
    down = cut.params.experts.down
    bytes_ = jnp.full((E, H, 1), 127, jnp.uint8).at[1, 5].set(126)
    experts = dataclasses.replace(cut.params.experts, down=dataclasses.replace(down, scales=pack_ue8m0(bytes_)))
    with pytest.raises(FormatError, match="scales that change within 128 rows"):
        save_moe(tmp_path, one, {0: LoadedMoE(cut.config, dataclasses.replace(cut.params, experts=experts))})
    assert not list(tmp_path.iterdir())


def test_refused_tensors_and_places(rng, tmp_path):
    one, layer = V4 | {"num_hidden_layers": 1, "num_hash_layers": 0}, v4_layer(rng, 1)
    with pytest.raises(CheckpointError, match=r"model.layers.0.ffn.extra has a name of layer 0's MoE block"):
        save_moe(tmp_path, one, {0: layer}, {"model.layers.0.ffn.extra": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match="odd is complex64, which safetensors has no name for"):
        save_moe(tmp_path, one, {0: layer}, {"odd": np.zeros(3, np.complex64)})
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="a checkpoint of several files"):
        save_moe(tmp_path, one, {0: layer})
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_write_leaves_what_was_there(rng, tmp_path, monkeypatch):
    one, layer = V4 | {"num_hidden_layers": 1, "num_hash_layers": 0}, v4_layer(rng, 1)
    save_moe(tmp_path, one, {0: layer})
    before = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.setattr(jaxmoe.checkpoint.save, "_safetensors", lambda tensors: [b"half", None])
    with pytest.raises(TypeError):
        save_moe(tmp_path, one, {0: v4_layer(rng, 1)})
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
