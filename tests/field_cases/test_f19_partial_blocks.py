"""F19: a block size that does not divide the matrix, or the TP shard."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe import BF16, Execution, moe
from jaxmoe.checkpoint import load_moe
from jaxmoe.quant.weights import dequantize

P = "model.layers.0.mlp."
SCALES = np.float32([[1, 2], [4, 8], [16, 32]])
run = jax.jit(moe, static_argnames=("config", "execution"))


def blocks(n, k):
    return -(-n // 128), -(-k // 128)


def layer(hidden, i, experts=2, rng=None, up_scale=None, down_scale=None):
    """FP8 experts; without ``rng`` all codes are 1 and all scales 1 except those given."""
    config = {"model_type": "qwen3_moe", "hidden_size": hidden, "num_hidden_layers": 1, "moe_intermediate_size": i}
    config |= {"num_experts": experts, "num_experts_per_tok": 1, "norm_topk_prob": True}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    t = {f"{P}gate.weight": np.zeros((experts, hidden), np.float32)}
    if rng is not None:
        t[f"{P}gate.weight"] = rng.normal(size=(experts, hidden)).astype(np.float32)
    given = {"gate_proj": None, "up_proj": up_scale, "down_proj": down_scale}
    for e in range(experts):
        for part, scale in given.items():
            n, k = (hidden, i) if part == "down_proj" else (i, hidden)
            codes = np.ones((n, k)) if rng is None else rng.normal(size=(n, k))
            if scale is None:
                scale = np.ones(blocks(n, k)) if rng is None else rng.uniform(0.01, 0.2, blocks(n, k))
            t[f"{P}experts.{e}.{part}.weight"] = codes.astype(ml_dtypes.float8_e4m3fn)
            t[f"{P}experts.{e}.{part}.weight_scale_inv"] = scale.astype(np.float32)
    return config, t


def up_of(loaded):
    gate_up = np.asarray(dequantize(loaded.params.experts.gate_up))[0]
    return gate_up[gate_up.shape[0] // 2 :]


def test_f19_a_partial_last_blocks(write_checkpoint):
    loaded = load_moe(write_checkpoint(*layer(192, 320, up_scale=SCALES)), 0, progress=False)
    assert loaded.config.partial_blocks and loaded.config.intermediate == 320
    w = up_of(loaded)
    assert (w[127, 127], w[107, 0], w[128, 127], w[319, 191]) == (1, 1, 4, 32)
    assert w.sum() == 425984


@pytest.mark.parametrize("weights", [None, BF16])
def test_f19_b_rows_over_two_ranks(write_checkpoint, weights):
    """Rank 1's 160 rows start inside block 1: they are stored from row 128 on, after 32 rows of zeros."""
    path = write_checkpoint(*layer(192, 320, up_scale=SCALES))
    first, second = (up_of(load_moe(path, 0, tp=(r, 2), weights=weights, progress=False)) for r in range(2))
    assert first.sum() == 65536 and second.sum() == 360448
    assert not first[160:].any() and not second[:32].any()
    local = second[32:192]
    assert (local[0, 0], local[95, 0], local[96, 0]) == (4, 4, 16)


@pytest.mark.parametrize(("intermediate", "ranks"), [(320, 2), (1536, 8), (256, 4)])
def test_f19_c_tp_sums_to_the_whole_layer(write_checkpoint, rng, intermediate, ranks):
    path = write_checkpoint(*layer(128, intermediate, rng=rng))
    x = jnp.asarray(rng.normal(size=(5, 128)).astype(np.float32))
    exact = Execution(quantize_activations=False)
    whole = load_moe(path, 0, progress=False)
    want = np.asarray(run(whole.params, x, config=whole.config, execution=exact)).astype(np.float64)
    parts = [load_moe(path, 0, tp=(r, ranks), progress=False) for r in range(ranks)]
    assert len({p.config for p in parts}) == 1
    total = sum(np.asarray(run(p.params, x, config=p.config, execution=exact)).astype(np.float64) for p in parts)
    np.testing.assert_allclose(total, want, atol=1e-5 * np.abs(want).max())


def test_f19_d_columns_cut(write_checkpoint):
    """Down [320, 192]: rank 1 of 2 holds columns 96 to 191, whose scales are those of columns 0 to 127, then 128 on."""
    path = write_checkpoint(*layer(320, 192, down_scale=SCALES))
    whole, first, second = (
        np.asarray(dequantize(load_moe(path, 0, tp=tp, progress=False).params.experts.down))[0]
        for tp in (None, (0, 2), (1, 2))
    )
    assert whole.sum() == 425984
    np.testing.assert_array_equal(first[:, :96], whole[:, :96])
    np.testing.assert_array_equal(second[:, 96:192], whole[:, 96:])
    assert not first[:, 96:].any() and not second[:, :96].any() and not second[:, 192:].any()
    assert (second[0, 127], second[0, 128], second[319, 128]) == (1, 2, 32)
