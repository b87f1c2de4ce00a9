from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import RouterConfig
from jaxmoe.layer.params import RouterParams
from jaxmoe.router import check_routing, route

X = jnp.zeros((3, 4))
KERNEL = jnp.zeros((4, 8))
PLAIN = {"kernel": KERNEL}
TABLE = jnp.zeros((16, 2), jnp.int32).at[:, 1].set(1)


@pytest.mark.parametrize(
    ("params", "config", "inputs", "message"),
    [
        (PLAIN, {}, {"x": None}, "both are None"),
        (PLAIN, {}, {"x": jnp.zeros((3, 5))}, r"\(3, 5\).*\[T, 4\]"),
        (PLAIN, {}, {"x": jnp.zeros((1, 3, 4))}, r"\(1, 3, 4\)"),
        (PLAIN, {}, {"x": jnp.zeros((3, 4), jnp.int32)}, "x is int32"),
        ({"kernel": jnp.zeros((4, 7))}, {}, {}, r"\(4, 7\).*\[H, 8\]"),
        (PLAIN, {}, {"logits": jnp.zeros((3, 8), jnp.int32)}, "logits is int32"),
        (PLAIN, {}, {"logits": jnp.zeros((3, 8), jnp.float16)}, "logits is float16"),
        (PLAIN, {}, {"logits": jnp.zeros((3, 9))}, r"\(3, 9\).*\[T, 8\]"),
        (PLAIN, {}, {"logits": jnp.zeros((2, 8))}, r"\(3, 4\).*\(2, 8\)"),
        (PLAIN, {}, {"valid": jnp.ones(2, bool)}, r"\(2,\).*3 tokens"),
        (PLAIN, {}, {"valid": jnp.ones(3)}, "valid is float32"),
        (PLAIN, {"correction_bias": True}, {}, "correction_bias=True but"),
        (PLAIN, {"logit_bias": True}, {}, "logit_bias=True but"),
        ({**PLAIN, "correction_bias": jnp.zeros(8)}, {}, {}, "correction_bias=False"),
        ({**PLAIN, "logit_bias": jnp.zeros(8)}, {}, {}, "logit_bias=False"),
        ({**PLAIN, "correction_bias": jnp.zeros((1, 8))}, {"correction_bias": True}, {}, r"\(1, 8\).*\[8\]"),
        ({**PLAIN, "correction_bias": jnp.zeros(8, jnp.bfloat16)}, {"correction_bias": True}, {}, "bfloat16"),
        (PLAIN, {"hash_routing": True}, {}, "no tid2eid"),
        ({**PLAIN, "tid2eid": TABLE}, {}, {}, "hash_routing=False"),
        ({**PLAIN, "tid2eid": TABLE}, {"hash_routing": True}, {}, "pass token_ids"),
        ({**PLAIN, "tid2eid": TABLE[:, :1]}, {"hash_routing": True}, {"token_ids": jnp.zeros(3, int)}, r"\(16, 1\)"),
        ({**PLAIN, "tid2eid": TABLE}, {"hash_routing": True}, {"token_ids": jnp.zeros(2, int)}, r"\(2,\).*3 tokens"),
        ({**PLAIN, "tid2eid": TABLE}, {"hash_routing": True}, {"token_ids": jnp.zeros(3)}, "token_ids is float32"),
    ],
)
def test_bad_inputs_are_named(params: dict, config: dict, inputs: dict, message: str) -> None:
    inputs = {"x": X, **inputs}
    with pytest.raises(ValueError, match=message):
        route(RouterParams(**params), inputs.pop("x"), RouterConfig(num_experts=8, top_k=2, **config), **inputs)


@pytest.mark.parametrize(
    ("ids", "weights", "sizes", "message"),
    [
        (np.array([[0, 8]], np.int32), np.ones((1, 2), np.float32), {}, r"ids\[0, 1\] is 8.*\[0, 8\)"),
        (np.array([[0, -2]], np.int32), np.ones((1, 2), np.float32), {}, r"ids\[0, 1\] is -2"),
        (np.array([[0, 1]], np.int32), np.ones((1, 3), np.float32), {}, r"\(1, 3\).*\(1, 2\)"),
        (np.array([0, 1], np.int32), np.ones(2, np.float32), {}, r"\(2,\)"),
        (np.array([[0, 1]], np.int64), np.ones((1, 2), np.float32), {}, "ids is int64"),
        (np.array([[0, 1]], np.int32), np.ones((1, 2), np.float64), {}, "weights is float64"),
        (np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32), {"top_k": 3}, "2 experts per token; expected 3"),
        (np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32), {"tokens": 4}, "1 tokens; expected 4"),
    ],
)
def test_bad_routings_are_named(ids: np.ndarray, weights: np.ndarray, sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_routing(ids, weights, 8, **sizes)


def test_good_and_traced_routings_pass() -> None:
    ids, weights = np.array([[0, 7], [-1, -1]], np.int32), np.ones((2, 2), np.float32)
    check_routing(ids, weights, 8, tokens=2, top_k=2)
    check_routing(np.array([[3, 3]], np.int32), weights[:1], 8)
    check_routing(jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2)), 8)
    jax.jit(lambda i, w: check_routing(i, w, 4))(ids, weights)


@pytest.mark.parametrize("change", [{"renormalize_floor": 0.0}, {"scaling_factor": float("nan")}])
def test_config_numbers(change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        RouterConfig(num_experts=8, top_k=2, **change)
