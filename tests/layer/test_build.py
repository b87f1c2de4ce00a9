"""Parameters from arrays: padding, joining and what is refused."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import MoEConfig, RouterConfig, SharedExperts
from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.layer.build import expert_weights, make_params
from jaxmoe.quant.formats import BF16, FORMATS, MXFP4, MXFP8, FP8Block
from jaxmoe.quant.weights import dequantize, quantize_weight


@pytest.mark.parametrize("name", FORMATS)
def test_halves_keep_their_values_and_scales(rng: np.random.Generator, name: str) -> None:
    """I = 160, padded inside for quantised formats: both halves decode to what each projection decodes to alone."""
    fmt = FORMATS[name]
    gate, up, down = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 160, 96), (3, 160, 96), (3, 96, 160)))
    gate, up, down = (quantize_weight(w * scale, fmt) for w, scale in ((gate, 1.0), (up, 300.0), (down, 0.01)))
    bias = [jnp.asarray(rng.normal(size=(3, n)), jnp.float32) for n in (160, 160, 96)]
    w = expert_weights(gate, up, down, *bias)
    width = 256 if fmt.quantized else 160
    assert w.gate_up.n == 2 * width and w.down.k_padded == width and w.down is down
    joined = np.asarray(dequantize(w.gate_up))
    for start, part, b in ((0, gate, bias[0]), (width, up, bias[1])):
        np.testing.assert_array_equal(joined[:, start : start + 160], dequantize(part))
        assert (joined[:, start + 160 : start + width] == 0).all()
        assert w.gate_up_bias is not None
        np.testing.assert_array_equal(w.gate_up_bias[:, start : start + 160], b)
        assert (np.asarray(w.gate_up_bias)[:, start + 160 : start + width] == 0).all()


def test_refusals(rng: np.random.Generator) -> None:
    w = {f: quantize_weight(jnp.ones((2, 128, 128), jnp.float32), f) for f in (BF16, FP8Block, MXFP8, MXFP4)}
    with pytest.raises(FormatError, match="FP8Block, FP8Block and MXFP4"):
        expert_weights(w[FP8Block], w[FP8Block], w[MXFP4])
    with pytest.raises(ShapeError, match=r"\[1, 128, 128\]"):
        expert_weights(w[BF16], w[BF16], dataclasses.replace(w[BF16], values=w[BF16].values[:1]))
    with pytest.raises(ShapeError, match="or none of them"):
        expert_weights(w[BF16], w[BF16], w[BF16], jnp.zeros((2, 128), jnp.float32))
    ones = jnp.ones((2, 128, 128), jnp.bfloat16)
    config = MoEConfig(hidden=128, intermediate=128, router=RouterConfig(num_experts=2, top_k=1))
    with pytest.raises(ShapeError, match=r"down is \[1, 128, 128\]; the config says \[2, 128, 128\]"):
        make_params(config, gate=ones, up=ones, down=ones[:1])
    with pytest.raises(ShapeError, match=r"config.shared is None"):
        make_params(config, gate=ones, up=ones, down=ones, shared_gate=ones[0])
    shared = dataclasses.replace(config, shared=SharedExperts(intermediate=128, fused=True))
    with pytest.raises(ShapeError, match="give shared_gate, shared_up and shared_down"):
        make_params(shared, gate=ones, up=ones, down=ones)
    with pytest.raises(FormatError, match="float32, the routed ones bfloat16"):
        parts = {f"shared_{p}": jnp.ones((128, 128), jnp.float32) for p in ("gate", "up", "down")}
        make_params(shared, gate=ones, up=ones, down=ones, **parts)
