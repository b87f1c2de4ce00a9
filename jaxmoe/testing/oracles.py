"""Oracles that are obviously right and inputs that are obviously hostile, for tests of any backend or sharding.

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
from jaxmoe.quant.codecs import E4M3
from jaxmoe.quant.formats import BF16, ActivationQuant, WeightFormat
from jaxmoe.quant.scale_layout import mn_major_f32, pack_ue8m0
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows
from jaxmoe.quant.weights import dequantize, from_canonical

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
    """``1 - 2·⟨a, b⟩ / (⟨a, a⟩ + ⟨b, b⟩)`` in float64, what a format's ``max_diff`` bounds.

    Returns:
      0 for equal arrays (also if all zero), NaN if either holds one.
    """
    a, b = _float64(a), _float64(b)
    norm = (a * a).sum() + (b * b).sum()
    return 0.0 if norm == 0 else float(1 - 2 * (a * b).sum() / norm)


def e4m3_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random finite e4m3 codes, every one of the 254 equally likely (subnormals and both zeros included)."""
    codes = rng.integers(0, 254, shape)
    return (codes + (codes >= 127)).astype(np.uint8).view(E4M3)


def random_weight(
    rng: np.random.Generator, e: int, n: int, k: int, format: WeightFormat, *, exponents: tuple[int, int] = (-6, 2)
) -> GroupedWeight:
    """A stack made of random codes and scales, so that no quantiser stands between a test and its numbers.

    Args:
      rng: source. e, n, k: extents (k even for MXFP4). format: of the stack.
      exponents: bounds (inclusive) of the scales' powers of two; FP8Block's float scales get a random mantissa too.
    """
    if not format.quantized:
        return from_canonical(rng.normal(size=(e, n, k)).astype(jnp.bfloat16), None, format)
    shape = (e, -(-n // format.block_n), -(-k // format.block_k))
    scales = rng.integers(exponents[0], exponents[1] + 1, shape)
    if format.scale == "float32":
        scales = np.ldexp(rng.uniform(1, 2, shape), scales).astype(np.float32)
    else:
        scales = (scales + 127).astype(np.uint8)
    if format.bits == 4:
        return from_canonical(rng.integers(0, 256, (e, n, k // 2), dtype=np.uint8), scales, format)
    return from_canonical(e4m3_codes(rng, (e, n, k)), scales, format)


def random_rows(rng: np.random.Generator, shape: tuple[int, ...], quant: ActivationQuant) -> QuantizedRows:
    """Rows [..., M, Kp] of random codes with scales between 2^-6 and 2^2; Kp must be a multiple of 128."""
    scales = rng.integers(-6, 3, (*shape[:-1], shape[-1] // quant.block))
    if quant.scale == "float32":
        laid_out = mn_major_f32(jnp.asarray(np.ldexp(rng.uniform(1, 2, scales.shape), scales), dtype=jnp.float32))
    else:
        laid_out = pack_ue8m0(jnp.asarray(scales + 127, dtype=jnp.uint8))
    return QuantizedRows(jnp.asarray(e4m3_codes(rng, shape)), laid_out, quant)


def hostile_blocks(block: int) -> dict[str, np.ndarray]:
    """Blocks that break careless quantisers, by name: float32 [block] each."""
    ones = np.ones(block, dtype=np.float32)

    def with_first(value: float) -> np.ndarray:
        return np.concatenate([np.full(1, value, dtype=np.float32), ones[1:]])

    return {
        "zero": 0 * ones,
        "negative zero": -0.0 * ones,
        "tiny": ones * np.float32(1e-30),
        "subnormal": ones * np.float32(1e-40),
        "one tiny": with_first(1e-38),
        "huge": ones * np.finfo(np.float32).max,
        "outlier": with_first(1e30),
        "inf": with_first(np.inf),
        "-inf": with_first(-np.inf),
        "nan": with_first(np.nan),
        "all nan": np.full(block, np.nan, dtype=np.float32),
    }
