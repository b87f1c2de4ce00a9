"""Oracles that are obviously right, for tests of any backend, transport or sharding.

Marker experts have constant weights, so that the output says which expert a token met: with H = I = 128 and a token of
all c, every element of expert e's output is ``(e + 1) · marker(c)``.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmoe.config import Activation, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.layer.build import make_params
from jaxmoe.layer.params import MoEParams
from jaxmoe.quant.formats import BF16, WeightFormat
from jaxmoe.quant.weights import dequantize

MARKER_WIDTH = 128
"""H and I of the marker layer."""


def marker(c: Any) -> Any:
    """``c · silu(c)``, what expert 0 of the marker layer makes of a token of all c."""
    c = np.asarray(c, np.float64)
    return c * c / (1 + np.exp(-c))


def marker_layer(
    num_experts: int,
    top_k: int,
    *,
    weights: WeightFormat = BF16,
    dtype: Any = jnp.bfloat16,
    shared: float | None = None,
    fused: bool = False,
    scaling: float = 1.0,
) -> tuple[MoEConfig, MoEParams]:
    """A layer of marker experts.

    MXFP4 cannot hold every marker exactly: use it for e + 1 in {1, 2, 3, 4, 6, 8}.

    Args:
      num_experts, top_k: E, K.
      weights: format. dtype: of the weights before they are quantised.
      shared: marker value of a shared expert, or None. fused: make it a slot of the routed experts.
      scaling: ``routed_scaling_factor``.
    """
    e, n = num_experts, MARKER_WIDTH
    config = MoEConfig(
        hidden=n,
        intermediate=n,
        router=RouterConfig(num_experts=e, top_k=top_k, scaling_factor=scaling),
        weights=weights,
        shared=None if shared is None else SharedExperts(intermediate=n, fused=fused),
    )

    def full(*values: float) -> Any:
        return jnp.asarray(np.broadcast_to(np.asarray(values)[:, None, None] / n, (len(values), n, n)), dtype=dtype)

    ones, shared_arrays = full(*[1.0] * e), {}
    if shared is not None:
        shared_arrays = {"shared_gate": full(1)[0], "shared_up": full(shared)[0], "shared_down": full(1)[0]}
    return config, make_params(config, gate=ones, up=full(*range(1, e + 1)), down=ones, **shared_arrays)


def dense_moe(params: MoEParams, x: Any, config: MoEConfig, ids: Any, weights: Any, *, valid: Any = None) -> np.ndarray:
    """The layer's formula in float64: every expert on every token, with dequantised weights.

    Args:
      params, config: of the layer. Fused shared experts are taken from the end of the stacks.
      x: [T, H]. ids, weights: [T, K], -1 for none. valid: bool [T].

    Returns:
      float64 [T, H].
    """
    x, ids, combine = _float64(x), np.asarray(ids), np.where(np.asarray(ids) >= 0, _float64(weights), 0)
    routed, shared, activation = params.experts, params.shared, config.activation
    gate = np.ones(len(x))
    if shared is not None and shared.gate is not None:
        gate = 1 / (1 + np.exp(-x @ _float64(shared.gate)))
    y = np.zeros_like(x)
    gate_up, down = _float64(dequantize(routed.gate_up)), _float64(dequantize(routed.down))
    for e in range(len(gate_up)):
        biases = [None if b is None else _float64(b[e]) for b in (routed.gate_up_bias, routed.down_bias)]
        weight = np.where(ids == e, combine, 0).sum(1) if e < config.router.num_experts else gate
        y += np.where(weight[:, None] != 0, weight[:, None] * _mlp(x, gate_up[e], down[e], activation, *biases), 0)
    if shared is not None and shared.experts is not None:
        own = [_float64(dequantize(w)[0]) for w in (shared.experts.gate_up, shared.experts.down)]
        y += gate[:, None] * _mlp(x, own[0], own[1], activation)
    return y if valid is None else np.where(np.asarray(valid)[:, None], y, 0)


def _float64(a: Any) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


def _mlp(x: np.ndarray, gate_up: Any, down: Any, a: Activation, gate_up_bias: Any = None, down_bias: Any = None) -> Any:
    h = x @ gate_up.T + (0 if gate_up_bias is None else gate_up_bias)
    return dense_act(h, a)[:, : down.shape[1]] @ down.T + (0 if down_bias is None else down_bias)


def dense_act(h: Any, a: Activation) -> np.ndarray:
    """The gated activation of h [..., 2·I] in float64."""
    g, u = np.split(np.asarray(h, np.float64), 2, axis=-1)

    def sigmoid(z: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-z))

    if a.limit is not None:
        g, u = np.minimum(g, a.limit), np.clip(u, -a.limit, a.limit)
    if a.kind == "oai":
        return g * sigmoid(a.alpha * g) * (u + 1)
    if a.kind == "situ":
        return a.beta_gate * np.tanh(g / a.beta_gate) * sigmoid(g) * a.beta_up * np.tanh(u / a.beta_up)
    return g * sigmoid(g) * u


def calc_diff(a: Any, b: Any) -> float:
    """``1 - 2·⟨a, b⟩ / (⟨a, a⟩ + ⟨b, b⟩)`` in float64: what a format's ``max_diff`` bounds; 0 for two zero arrays."""
    a, b = _float64(a), _float64(b)
    norm = (a * a).sum() + (b * b).sum()
    return 0.0 if norm == 0 else float(1 - 2 * (a * b).sum() / norm)
