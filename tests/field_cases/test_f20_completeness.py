"""F20: expert tensors missing or ignored at load, without an error."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxmoe.checkpoint import load_moe
from jaxmoe.errors import CheckpointError
from jaxmoe.quant.weights import dequantize

E, H, I = 12, 128, 128  # noqa: E741
P = "model.layers.0.block_sparse_moe."
CONFIG = {
    "model_type": "mixtral",
    "hidden_size": H,
    "num_hidden_layers": 1,
    "intermediate_size": I,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
PARTS = ("w1", "w3", "w2")


def separate(suffix="weight_scale_inv"):
    """Every tensor of expert e is e + 1, scales too."""
    t = {f"{P}gate.weight": np.zeros((E, H), np.float32)}
    for e in range(E):
        for part in PARTS:
            t[f"{P}experts.{e}.{part}.weight"] = np.full((128, 128), e + 1, ml_dtypes.float8_e4m3fn)
            t[f"{P}experts.{e}.{part}.{suffix}"] = np.full((1, 1), e + 1, np.float32)
    return t


def stacked():
    number = np.arange(1, E + 1, dtype=np.float32)[:, None, None]
    t = {f"{P}gate.weight": np.zeros((E, H), np.float32)}
    for name, n in (("gate_up_proj", 2 * I), ("down_proj", H)):
        t[f"{P}experts.{name}"] = np.broadcast_to(number, (E, n, 128)).astype(ml_dtypes.float8_e4m3fn)
        t[f"{P}experts.{name}_scale_inv"] = np.broadcast_to(number, (E, n // 128, 1))
    return t


def load(write, tensors, **options):
    return load_moe(write(CONFIG, tensors), 0, progress=False, **options)


def assert_holds(loaded, experts):
    want = np.float32([(e + 1) ** 2 for e in experts])[:, None, None]
    for w in (loaded.params.experts.gate_up, loaded.params.experts.down):
        got = np.asarray(dequantize(w))
        np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


@pytest.mark.parametrize("tensors", [separate, stacked])
def test_f20_a_slot_e_holds_expert_e(write_checkpoint, tensors):
    assert_holds(load(write_checkpoint, tensors()), range(E))


@pytest.mark.parametrize(
    ("gone", "tensor", "expert"),
    [
        (lambda name: name == f"{P}experts.3.w2.weight_scale_inv", r"experts\.3\.w2\.weight_scale_inv", "expert 3"),
        (lambda name: "scale" in name, r"experts\.0\.w1\.weight_scale_inv", "expert 0"),
        (lambda name: name == f"{P}experts.0.w1.weight", r"experts\.0\.w1\.weight", "expert 0"),
        (lambda name: ".11." in name, r"experts\.11\.w1\.weight", "expert 11"),
    ],
    ids=["one scale", "all scales", "expert 0's gate", "expert 11"],
)
@pytest.mark.parametrize("experts", [None, range(6, 9)])
def test_f20_b_missing(write_checkpoint, gone, tensor, expert, experts):
    """Also on a rank that holds none of the experts concerned."""
    left = {k: v for k, v in separate().items() if not gone(k)}
    with pytest.raises(CheckpointError, match=f"{expert}.*missing.*{tensor}"):
        load(write_checkpoint, left, experts=experts)


@pytest.mark.parametrize("gone", ["gate_up_proj", "down_proj", "gate_up_proj_scale_inv", "down_proj_scale_inv"])
def test_f20_b_missing_stack(write_checkpoint, gone):
    left = {k: v for k, v in stacked().items() if k != f"{P}experts.{gone}"}
    with pytest.raises(CheckpointError, match=rf"missing: no tensor .*experts\.{gone}"):
        load(write_checkpoint, left)


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scale", "weight_scale"])
def test_f20_c_scale_by_another_name(write_checkpoint, suffix):
    assert_holds(load(write_checkpoint, separate(suffix)), range(E))


@pytest.mark.parametrize(
    "extra", ["experts.3.w4.weight", "experts.12.w1.weight", "experts.3.w2.input_scale", "w1.weight"]
)
def test_f20_c_unknown_tensor_is_reported(write_checkpoint, extra):
    with pytest.raises(CheckpointError, match=f"unexpected tensors {P}{extra}".replace(".", r"\.")):
        load(write_checkpoint, separate() | {P + extra: np.ones((128, 128), np.float32)})


@pytest.mark.parametrize("tensors", [separate, stacked])
def test_f20_d_no_slot_keeps_what_it_held_before(write_checkpoint, tensors, monkeypatch):
    """Buffers that start as NaN (all bits set, in every float format here) end without one."""
    zeros = np.zeros

    def poisoned(shape, dtype=float, **kwargs):
        out = zeros(shape, dtype, **kwargs)
        out.reshape(-1).view(np.uint8)[:] = 0xFF
        return out

    path = write_checkpoint(CONFIG, tensors())
    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", poisoned)
        loaded = load_moe(path, 0, progress=False)
    assert not any(np.isnan(np.asarray(a).astype(np.float32)).any() for a in jax.tree.leaves(loaded.params))
    assert_holds(loaded, range(E))


@pytest.mark.parametrize("tensors", [separate, stacked])
def test_f20_d_expert_shards(write_checkpoint, tensors):
    path = write_checkpoint(CONFIG, tensors())
    for rank in range(4):
        mine = range(3 * rank, 3 * rank + 3)
        loaded = load_moe(path, 0, experts=mine, progress=False)
        assert loaded.config.router.num_experts == E
        assert_holds(loaded, mine)
