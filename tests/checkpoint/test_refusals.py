"""What does not fit is refused by name before anything is loaded."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxmoe import BF16, MXFP4, MXFP8
from jaxmoe.checkpoint import load_config, load_moe, moe_layers
from jaxmoe.errors import CheckpointError, FormatError, ShapeError

E, H, I = 3, 128, 256  # noqa: E741
P = "model.layers.0.mlp."
CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": H,
    "num_hidden_layers": 1,
    "moe_intermediate_size": I,
    "n_routed_experts": E,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def tensors():
    t = {f"{P}gate.weight": np.ones((E, H), np.float32), f"{P}gate.e_score_correction_bias": np.ones(E, np.float32)}
    for place in (*(f"experts.{e}" for e in range(E)), "shared_experts"):
        for part, (n, k) in {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}.items():
            t[f"{P}{place}.{part}.weight"] = np.ones((n, k), ml_dtypes.float8_e4m3fn)
            t[f"{P}{place}.{part}.weight_scale_inv"] = np.ones((n // 128, k // 128), np.float32)
    return t


def refused(write, message, config=None, change=None, **options):
    t = tensors() | (change or {})
    path = write({**CONFIG, **(config or {})}, {k: v for k, v in t.items() if v is not None})
    with pytest.raises(CheckpointError, match=message):
        load_moe(path, 0, progress=False, **options)


def test_the_base_itself_loads(write_checkpoint, capsys):
    path = write_checkpoint(
        CONFIG, tensors() | {"model.layers.0.self_attn.q.weight": np.ones(1), "lm_head": np.ones(1)}
    )
    assert load_moe(path, 0).config == load_config(path, 0)
    assert moe_layers(path) == [0]
    bar = capsys.readouterr().err
    assert "model.layers.0.mlp: 100%" in bar and "12/12" in bar


def test_a_layer_needs_its_own_shards_only(tmp_path):
    first = tensors()
    second = {k.replace("layers.0", "layers.1"): v for k, v in first.items()}
    save_file(first, tmp_path / "one.safetensors")
    weight_map = dict.fromkeys(first, "one.safetensors") | dict.fromkeys(second, "two.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}))
    load_moe(tmp_path, 0, progress=False)
    with pytest.raises(CheckpointError, match=r"two\.safetensors: cannot be read"):
        load_moe(tmp_path, 1, progress=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not one of mixtral"),
        ({"model_type": None}, "lacks 'model_type'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"scoring_func": "tanh"}, "scoring_func is 'tanh'; choose"),
        ({"num_experts": 4}, "contradicts itself.*num_experts.*n_routed_experts"),
        ({"moe_intermediate_size": "256"}, "'moe_intermediate_size' is '256'; it must be a positive integer"),
        ({"num_experts_per_tok": None}, "lacks 'num_experts_per_tok'"),
        ({"norm_topk_prob": None}, "lacks 'norm_topk_prob'"),
        ({"first_k_dense_replace": "x"}, "first_k_dense_replace is 'x'"),
        ({"mlp_layer_types": []}, r"mlp_layer_types is \[\]"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not supported"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}}, "weight_block_size is 128"),
        ({"quantization_config": {"weight_block_size": [64, 64]}}, r"F32 for weight_block_size \[64, 64\]; supported"),
        ({"quantization_config": {"weight_block_size": [256, 128]}}, r"weight_block_size \[256, 128\]"),
        ({"quantization_config": {}}, "has no weight_block_size.*never guessed from shapes"),
        ({"expert_dtype": "fp4"}, "expert_dtype is 'fp4', but .*experts are fp8"),
        ({"moe_intermediate_size": 320}, r"is F8_E4M3 \[256, 128\], expected F8_E4M3 \[320, 128\]"),
        ({"n_routed_experts": 2}, r"gate.weight is F32 \[3, 128\], expected.*\[2, 128\]"),
    ],
)
def test_config(write_checkpoint, config, message):
    refused(write_checkpoint, message, config)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gate.weight", None, r"the router is missing: no tensor model\.layers\.0\.mlp\.gate\.weight"),
        ("gate.e_score_correction_bias", None, "correction bias is missing"),
        ("gate.bias", np.ones(E), r"unexpected tensors model\.layers\.0\.mlp\.gate\.bias"),
        ("experts.3.up_proj.weight", np.ones((I, H)), r"unexpected tensors.*experts\.3\.up_proj"),
        ("experts.1.up_proj.input_scale", np.ones(1), r"unexpected tensors.*experts\.1\.up_proj\.input_scale"),
        (
            "experts.1.up_proj.weight",
            np.ones((I, H), np.float32),
            r"experts\.1\.up_proj\.weight is F32 .*expected F8_E4M3",
        ),
        (
            "experts.1.up_proj.weight",
            np.ones((H, I), ml_dtypes.float8_e4m3fn),
            r"1\.up_proj\.weight.*\[128, 256\], expected",
        ),
        ("experts.0.gate_proj.weight", np.ones((I, H), ml_dtypes.float8_e5m2), "F8_E5M2.*expected BF16 or F32"),
        (
            "experts.2.down_proj.weight_scale_inv",
            np.ones((1, 1), np.float32),
            r"2\.down_proj.*\[1, 1\], expected.*\[1, 2\]",
        ),
        ("experts.2.down_proj.weight_scale_inv", np.ones((1, 2), np.int32), "is I32.*expected F32 or BF16"),
        ("experts.2.down_proj.scale", np.ones((1, 2), np.float32), "given twice, by .*weight_scale_inv and .*scale"),
        ("experts.2.down_proj.weight_scale_inv", np.full((1, 2), np.nan, np.float32), "down_proj.*nan"),
        ("shared_experts.up_proj.weight", None, "shared expert's up_proj weight is missing"),
    ],
)
def test_tensor(write_checkpoint, name, value, message):
    refused(write_checkpoint, message, change={P + name: value})


def test_no_block_at_all(write_checkpoint):
    path = write_checkpoint(CONFIG, {"model.layers.1.mlp.gate.weight": np.ones(1)})
    with pytest.raises(CheckpointError, match=r"no tensors under any of model\.layers\.0\.mlp\., layers\.0\.mlp\."):
        load_config(path, 0)
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        moe_layers(path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"experts": range(0)}, ShapeError, r"range\(0, 0\) are no contiguous part of the layer's 3"),
        ({"experts": range(2, 4)}, ShapeError, r"range\(2, 4\)"),
        ({"experts": range(0, 3, 2)}, ShapeError, "contiguous"),
        ({"tp": (2, 2)}, ShapeError, r"rank 2 of 2; the rank must be within 0\.\.1"),
        ({"tp": (0, 3)}, ShapeError, "intermediate 256 does not divide by tp 3"),
        ({"fuse_shared": True, "experts": range(1)}, ShapeError, "only range.* are loaded; set fuse_shared=False"),
        ({"fuse_shared": True, "shared_weights": BF16}, ShapeError, "shared_weights is jaxmoe.BF16"),
        ({"weights": "fp8"}, FormatError, "weights is 'fp8'; a format such as jaxmoe.FP8Block, None or 'auto'"),
        ({"shared_weights": "bf16"}, FormatError, "shared_weights is 'bf16'"),
        ({"weights": MXFP8}, FormatError, "no conversion from FP8Block to MXFP8"),
        ({"shared_weights": MXFP4}, FormatError, "no conversion from FP8Block to MXFP4"),
    ],
)
def test_options(write_checkpoint, options, error, message):
    path = write_checkpoint(CONFIG, tensors())
    with pytest.raises(error, match=message):
        load_moe(path, 0, progress=False, **options)


def test_fused_without_shared(write_checkpoint):
    t = {k: v for k, v in tensors().items() if "shared" not in k}
    path = write_checkpoint({**CONFIG, "n_shared_experts": None}, t)
    with pytest.raises(ShapeError, match="this layer has none"):
        load_moe(path, 0, fuse_shared=True, progress=False)


@pytest.mark.parametrize(("family", "message"), [("gpt_oss", "their rows alternate"), ("qwen3_moe", "meet at row 192")])
def test_stacked_halves_that_share_blocks(write_checkpoint, family, message):
    """One scale over rows of gate and of up: neither half could keep its scales."""
    e4m3, i = ml_dtypes.float8_e4m3fn, 192
    t = {
        f"{P}router.weight": np.ones((E, H)),
        f"{P}gate.weight": np.ones((E, H), np.float32),
        f"{P}experts.gate_up_proj": np.ones((E, 2 * i, H), e4m3),
        f"{P}experts.gate_up_proj_scale_inv": np.ones((E, 3, 1), np.float32),
        f"{P}experts.down_proj": np.ones((E, H, i), e4m3),
        f"{P}experts.down_proj_scale_inv": np.ones((E, 1, 2), np.float32),
    }
    for name, shape in {"router.weight": (E, H), "router.bias": (E,)}.items():
        t[P + name] = np.ones(shape, np.float32)
    config = {**CONFIG, "model_type": family, "moe_intermediate_size": i, "intermediate_size": i, "swiglu_limit": 7.0}
    with pytest.raises(CheckpointError, match=message):
        load_config(write_checkpoint(config, t), 0)
