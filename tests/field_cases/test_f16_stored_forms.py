"""F16, part D: MXFP4 stored per expert or stacked, with uint8 or e8m0 scales, gives identical weights."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jaxmoe.checkpoint import load_moe
from jaxmoe.quant.weights import dequantize

E, H, I = 3, 32, 32  # noqa: E741
P = "model.layers.0.mlp."
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": H,
    "num_hidden_layers": 1,
    "moe_intermediate_size": I,
    "num_experts": E,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
# Rows of case B; the scale bytes of case C that are numbers, over the rows.
ROW = np.array([0x10, 0x32, 0x54, 0x76] * 4, np.uint8)
BYTES = np.array([0, 120, 127, 130, 254], np.uint8)


def codes(n):
    return np.stack([np.roll(ROW, r) for r in range(n)])


def scales(e, n):
    return BYTES[(np.arange(n) + e) % 5][:, None]


def separate(code_dtype, scale_dtype):
    t = {f"{P}gate.weight": np.zeros((E, H), np.float32)}
    for e in range(E):
        for m, part in enumerate(("gate_proj", "up_proj", "down_proj")):
            t[f"{P}experts.{e}.{part}.weight"] = codes(32).view(code_dtype)
            t[f"{P}experts.{e}.{part}.scale"] = scales(e + m, 32).view(scale_dtype)
    return t


def stacked(code_dtype, scale_dtype, blocks, names):
    t = {f"{P}gate.weight": np.zeros((E, H), np.float32)}
    gate_up = np.stack([np.concatenate([scales(e, 32), scales(e + 1, 32)]) for e in range(E)])
    for part, n, s in (
        ("gate_up_proj", 64, gate_up),
        ("down_proj", 32, np.stack([scales(e + 2, 32) for e in range(E)])),
    ):
        c = np.stack([np.concatenate([codes(32)] * (n // 32))] * E).view(code_dtype)
        t[f"{P}experts.{part}{names[0]}"] = c.reshape(E, n, 1, 16) if blocks else c
        t[f"{P}experts.{part}{names[1]}"] = s.view(scale_dtype)
    return t


FORMS = {
    "separate-e8m0": separate(np.int8, ml_dtypes.float8_e8m0fnu),
    "separate-uint8": separate(np.uint8, np.uint8),
    "stacked": stacked(np.uint8, np.uint8, False, ("", "_scale")),
    "stacked-e8m0": stacked(np.int8, ml_dtypes.float8_e8m0fnu, False, ("", "_scale_inv")),
    "blocks": stacked(np.uint8, np.uint8, True, ("_blocks", "_scales")),
}


@pytest.mark.parametrize("form", FORMS)
def test_f16_d_stored_forms_agree(write_checkpoint, form):
    loaded = load_moe(write_checkpoint(CONFIG, FORMS[form]), 0, progress=False)
    assert loaded.config.weights.name == "MXFP4"
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 4)
    rows = np.stack([np.roll(values, 2 * r) for r in range(32)])
    gate_up, down = (np.asarray(dequantize(w)) for w in (loaded.params.experts.gate_up, loaded.params.experts.down))
    half = gate_up.shape[1] // 2
    for e in range(E):
        for m, got in enumerate((gate_up[e, :32], gate_up[e, half : half + 32], down[e])):
            scale = 2.0 ** (scales(e + m, 32).astype(np.float64) - 127)
            with np.errstate(over="ignore"):  # 3 · 2^127 is beyond float32
                want = (rows * scale).astype(np.float32)
            # Subnormal results may be flushed by the device; all others are exact.
            normal = np.abs(want) >= np.finfo(np.float32).tiny
            np.testing.assert_array_equal(got[normal | (want == 0)], want[normal | (want == 0)])


def test_f16_d_nan_byte_is_refused(write_checkpoint):
    from jaxmoe.errors import CheckpointError

    t = separate(np.int8, np.uint8)
    t[f"{P}experts.1.up_proj.scale"] = np.full((32, 1), 255, np.uint8)
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj.*expert 1.*255.*NaN"):
        load_moe(write_checkpoint(CONFIG, t), 0, progress=False)
