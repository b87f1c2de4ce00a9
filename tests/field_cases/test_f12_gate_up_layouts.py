"""F12: gate and up halves swapped, read interleaved as halves, or cut across by TP."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe import BF16, Execution, moe
from jaxmoe.checkpoint import load_moe
from jaxmoe.errors import ShapeError

GATE, UP = np.float32([[1], [2], [3], [4]]), np.float32([[10], [20], [30], [40]])
DOWN = np.ones((1, 4), np.float32)
LAYOUTS = ["separate", "w1w3w2", "halves", "alternating"]
EXACT = Execution(quantize_activations=False)


def layer(layout, gate, up, down, scales=None, **quantization):
    """Config and tensors of two equal experts in one of four layouts; scales likewise, if any."""
    hidden, i = gate.shape[1], gate.shape[0]
    bits4 = gate.dtype == np.uint8
    config = {
        "hidden_size": hidden * (2 if bits4 else 1),
        "num_hidden_layers": 1,
        "num_experts": 2,
        "num_experts_per_tok": 2,
    }
    config |= {"moe_intermediate_size": i, "intermediate_size": i, "norm_topk_prob": True, "swiglu_limit": 1e6}
    config |= {"quantization_config": {"quant_method": "fp8", **quantization}} if quantization else {}
    p, t = "model.layers.0.mlp.", {}
    hidden = config["hidden_size"]
    if layout in ("separate", "w1w3w2"):
        config["model_type"] = "qwen3_moe" if layout == "separate" else "mixtral"
        names = ("gate_proj", "up_proj", "down_proj") if layout == "separate" else ("w1", "w3", "w2")
        p = p if layout == "separate" else "model.layers.0.block_sparse_moe."
        for e in range(2):
            for n, part in enumerate((gate, up, down)):
                t[f"{p}experts.{e}.{names[n]}.weight"] = part
                if scales:
                    t[f"{p}experts.{e}.{names[n]}.weight_scale_inv"] = scales[n]
        t[f"{p}gate.weight"] = np.zeros((2, hidden), np.float32)
        return config, t
    alternating = layout == "alternating"

    def fused(a, b):
        return np.stack([a, b], 1).reshape(-1, *a.shape[1:]) if alternating else np.concatenate([a, b])

    if alternating:
        t[f"{p}router.weight"], t[f"{p}router.bias"] = np.zeros((2, hidden), np.float32), np.zeros(2, np.float32)
        t[f"{p}experts.gate_up_proj_bias"] = np.zeros((2, 2 * i), np.float32)
        t[f"{p}experts.down_proj_bias"] = np.zeros((2, hidden), np.float32)
    else:
        t[f"{p}gate.weight"] = np.zeros((2, hidden), np.float32)
    config["model_type"] = "gpt_oss" if alternating else "qwen3_moe"
    for name, part in (("gate_up_proj", fused(gate, up)), ("down_proj", down)):
        plain = alternating and not scales
        t[f"{p}experts.{name}"] = np.stack([part.T if plain else part] * 2)
    for name, part in (("gate_up_proj", fused(*scales[:2])), ("down_proj", scales[2])) if scales else ():
        t[f"{p}experts.{name}_scale_inv"] = np.stack([part] * 2)
    return config, t


def projections(loaded):
    """Dequantised gate, up and down of expert 0, whatever the layout of the file was."""
    from jaxmoe.quant.weights import dequantize

    gate_up = np.asarray(dequantize(loaded.params.experts.gate_up))[0]
    half, i = gate_up.shape[0] // 2, loaded.config.intermediate
    return gate_up[:i], gate_up[half : half + i], np.asarray(dequantize(loaded.params.experts.down))[0]


def silu_mlp(loaded, x):
    gate, up, down = (a.astype(np.float64) for a in projections(loaded))
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("layout", LAYOUTS)
def test_f12_a_four_layouts(write_checkpoint, layout):
    loaded = load_moe(write_checkpoint(*layer(layout, GATE, UP, DOWN)), 0, progress=False)
    np.testing.assert_array_equal(projections(loaded)[0], GATE)
    np.testing.assert_array_equal(projections(loaded)[1], UP)
    np.testing.assert_allclose(silu_mlp(loaded, np.ones((1, 1))), 285.396347, rtol=1e-7)
    if layout != "alternating":  # that family's activation is another one
        y = moe(loaded.params, jnp.ones((1, 1)), loaded.config, EXACT)
        np.testing.assert_allclose(y, 285.396347, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_f12_b_tp_partial_sums(write_checkpoint, layout):
    path = write_checkpoint(*layer(layout, GATE, UP, DOWN))
    for rank, want in ((0, 42.5424689), (1, 242.853878)):
        loaded = load_moe(path, 0, tp=(rank, 2), progress=False)
        assert loaded.config.intermediate == 2
        np.testing.assert_allclose(silu_mlp(loaded, np.ones((1, 1))), want, rtol=1e-7)
        if layout != "alternating":
            np.testing.assert_allclose(moe(loaded.params, jnp.ones((1, 1)), loaded.config, EXACT), want, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp", [None, (1, 2)])
def test_f12_c_scales_follow_the_halves(write_checkpoint, layout, tp):
    """Marker experts of 256 by 256. Blocks of 128 rows cannot tell alternating rows apart: 1 by 32 there."""
    n, block = 256, [1, 32] if layout == "alternating" else [128, 128]
    shape = (n // block[0], n // block[1])
    dtype = ml_dtypes.float8_e8m0fnu if layout == "alternating" else np.float32
    codes = np.ones((n, n), ml_dtypes.float8_e4m3fn)
    scales = [np.full(shape, 1 / 256, np.float32).astype(dtype) for _ in range(3)]
    doubled = [scales[0], (2 * scales[1].astype(np.float32)).astype(dtype), scales[2]]
    x = np.ones((1, n))
    once, twice = (
        load_moe(
            write_checkpoint(*layer(layout, codes, codes, codes, s, weight_block_size=block)), 0, tp=tp, progress=False
        )
        for s in (scales, doubled)
    )
    np.testing.assert_array_equal(once.params.experts.gate_up.values, twice.params.experts.gate_up.values)
    want = 0.73105858 / (1 if tp is None else 2)
    np.testing.assert_allclose(silu_mlp(once, x), np.full((1, n), want), rtol=1e-6)
    np.testing.assert_allclose(silu_mlp(twice, x), 2 * silu_mlp(once, x), rtol=1e-12)


@pytest.mark.parametrize("weights", [None, BF16])
def test_f12_d_intermediate_must_divide(write_checkpoint, weights):
    path = write_checkpoint(*layer("separate", GATE[:3], UP[:3], DOWN[:, :3]))
    with pytest.raises(ShapeError, match=r"intermediate 3 does not divide by tp 2.*divides 3"):
        load_moe(path, 0, tp=(0, 2), weights=weights, progress=False)
