"""What a user gets wrong: each is a ValueError that holds the numbers, and says what to do where that is not plain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import BF16, MXFP4, MXFP8, FP8Block, MoEConfig, MoEParams, RouterConfig, Routing, SharedExperts
from jaxmoe.layer.build import make_params
from jaxmoe.quant import from_canonical
from jaxmoe.testing import marker_layer

CONFIG, PARAMS = marker_layer(4, 2)
FP8_CONFIG, FP8_PARAMS = marker_layer(2, 1, weights=FP8Block)
X = jnp.ones((3, 128), jnp.bfloat16)
FLOATS = jnp.ones((2, 128, 128), jnp.bfloat16)


def config(hidden: int = 128, intermediate: int = 128, **options: Any) -> MoEConfig:
    router = RouterConfig(num_experts=4, top_k=2)
    return MoEConfig(hidden=hidden, intermediate=intermediate, router=router, **options)


def routed(ids: list[list[int]]) -> jax.Array:
    routing = Routing(jnp.array(ids, jnp.int32), jnp.ones((3, 2), jnp.float32))
    return jaxmoe.moe(PARAMS, X, CONFIG, routing=routing)


def with_fp8_stack(**changes: Any) -> MoEParams:
    """Parameters whose gate and up projections are changed."""
    experts = FP8_PARAMS.experts
    stack = dataclasses.replace(experts.gate_up, **changes)
    return dataclasses.replace(FP8_PARAMS, experts=dataclasses.replace(experts, gate_up=stack))


def zeros(dtype: Any, *shape: int) -> np.ndarray:
    return np.zeros(shape, dtype)


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "dtype of x": (lambda: jaxmoe.moe(PARAMS, X.astype(jnp.float16), CONFIG), "x is float16.*bfloat16 or float32"),
    "dtype of ids": (
        lambda: jaxmoe.moe(PARAMS, X, CONFIG, routing=Routing(jnp.zeros((3, 2)), jnp.ones((3, 2)))),
        "ids is float32; convert it to int32",
    ),
    "dtype of values": (
        lambda: from_canonical(zeros(np.uint8, 1, 128, 128), zeros(np.float32, 1, 1, 1), FP8Block),
        "FP8Block values have dtype uint8; they must be float8_e4m3fn",
    ),
    "dtype of scales": (
        lambda: from_canonical(zeros(np.uint8, 1, 2, 64), zeros(np.float16, 1, 2, 4), MXFP4),
        "MXFP4 scales have dtype float16; they must be uint8",
    ),
    "rank of x": (lambda: jaxmoe.moe(PARAMS, X[0], CONFIG), r"x is \[128\]; it must be \[\.\.\., H\] with H = 128"),
    "rank of values": (lambda: from_canonical(FLOATS[0], None, BF16), r"shape \(128, 128\); expected \[E, N, K\]"),
    "K > E": (lambda: RouterConfig(num_experts=4, top_k=5), "top_k is 5 but there are only 4 experts; lower top_k"),
    "id >= E": (lambda: routed([[0, 1], [2, 4], [0, 1]]), r"ids\[1, 1\] is 4; expert ids must be in \[0, 4\)"),
    "id < -1": (lambda: routed([[0, 1], [2, 3], [-2, 1]]), r"ids\[2, 0\] is -2"),
    "H off the block": (lambda: config(hidden=192, weights=FP8Block), "hidden 192.*FP8Block.*128; set partial_blocks"),
    "I off the block": (
        lambda: config(intermediate=48, weights=MXFP4),
        "intermediate 48.*MXFP4.*block 32; set partial",
    ),
    "shared I off the block": (
        lambda: config(weights=MXFP8, shared=SharedExperts(intermediate=192, weights=FP8Block)),
        "shared intermediate 192.*FP8Block's shared expert block 128",
    ),
    "fused, another format": (
        lambda: config(weights=MXFP4, shared=SharedExperts(intermediate=128, fused=True, weights=FP8Block)),
        "routed experts' format MXFP4, got FP8Block; set fused=False",
    ),
    "config of another format": (
        lambda: jaxmoe.moe(FP8_PARAMS, X, dataclasses.replace(FP8_CONFIG, weights=MXFP8)),
        "experts.gate_up is FP8Block, the config says MXFP8; convert",
    ),
    "no scales": (lambda: from_canonical(zeros(np.uint8, 1, 2, 64), None, MXFP4), "MXFP4 weights need scales"),
    "scales of BF16": (lambda: from_canonical(FLOATS, FLOATS, BF16), r"BF16 weights take no scales.*\(2, 128, 128\)"),
    "scales of another shape": (
        lambda: from_canonical(zeros(np.uint8, 1, 2, 64), zeros(np.uint8, 1, 2, 3), MXFP4),
        r"shape \(1, 2, 3\); 1 matrices of 2×128 in blocks of 1×32 need \(1, 2, 4\)",
    ),
    "parameters without scales": (
        lambda: jaxmoe.moe(with_fp8_stack(scales=None), X, FP8_CONFIG),
        r"gate_up's scales are missing; .*\[2, 256, 128\] go with float32\[2, 2, 1\]",
    ),
    "parameters with others' scales": (
        lambda: jaxmoe.moe(with_fp8_stack(scales=jnp.ones((2, 1, 1))), X, FP8_CONFIG),
        r"scales are float32\[2, 1, 1\]; FP8Block values .* go with float32\[2, 2, 1\]",
    ),
    "weights of another size": (
        lambda: make_params(config(), gate=FLOATS, up=FLOATS, down=FLOATS),
        r"gate is \[2, 128, 128\]; the config says \[4, 128, 128\]",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_is_refused_with_its_numbers(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()
