"""Parameters from plain float arrays, and expert weights from their three projections."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.config import MoEConfig
from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.layer.checks import check_params, stored_width
from jaxmoe.layer.params import ExpertWeights, MoEParams, RouterParams, SharedParams
from jaxmoe.quant.formats import BF16, WeightFormat
from jaxmoe.quant.sharding import concat_n, pad_n
from jaxmoe.quant.tensors import GroupedWeight
from jaxmoe.quant.weights import quantize_weight

Array = jax.Array


def make_params(
    config: MoEConfig,
    *,
    gate: Any,
    up: Any,
    down: Any,
    gate_bias: Any = None,
    up_bias: Any = None,
    down_bias: Any = None,
    router_kernel: Any = None,
    logit_bias: Any = None,
    correction_bias: Any = None,
    tid2eid: Any = None,
    shared_gate: Any = None,
    shared_up: Any = None,
    shared_down: Any = None,
    shared_gate_vector: Any = None,
) -> MoEParams:
    """Builds a layer's parameters from float arrays, quantising into the config's formats.

    BF16 weights keep the dtype they come in, bf16 or f32. Fused shared experts become the last experts of the stacks.

    Args:
      config: what the layer is.
      gate, up: [E, I, H]. down: [E, H, I].
      gate_bias, up_bias: [E, I]. down_bias: [E, H]. All three or none.
      router_kernel: [H, E]; None is zeros (for layers whose routing is always given).
      logit_bias, correction_bias: [E]. tid2eid: int [V, K].
      shared_gate, shared_up: [Is, H]. shared_down: [H, Is], Is the shared experts' total width.
      shared_gate_vector: [H].

    Raises:
      ShapeError, FormatError: the arrays do not fit the config.
    """
    h, e, i = config.hidden, config.router.num_experts, config.intermediate
    gate, up, down = (jnp.asarray(a) for a in (gate, up, down))
    for name, a, want in (("gate", gate, (e, i, h)), ("up", up, (e, i, h)), ("down", down, (e, h, i))):
        if a.shape != want:
            raise ShapeError(f"{name} is {list(a.shape)}; the config says {list(want)}")
    biases = [None if b is None else jnp.asarray(b, dtype=jnp.float32) for b in (gate_bias, up_bias, down_bias)]
    shared = None
    if config.shared is not None:
        width = config.shared.intermediate
        if shared_gate is None or shared_up is None or shared_down is None:
            raise ShapeError("config.shared is set: give shared_gate, shared_up and shared_down")
        parts = [jnp.asarray(a) for a in (shared_gate, shared_up, shared_down)]
        for name, a, want in zip(("gate", "up", "down"), parts, ((width, h), (width, h), (h, width)), strict=True):
            if a.shape != want:
                raise ShapeError(f"shared_{name} is {list(a.shape)}; the config says {list(want)}")
        separate = None
        if config.shared.fused:
            slots = config.fused_slots
            if any(a.dtype != gate.dtype for a in parts):
                raise FormatError(
                    f"fused shared experts are {parts[0].dtype}, the routed ones {gate.dtype}; cast one of them"
                )
            gate, up = (
                jnp.concatenate([a, s.reshape(slots, i, h)]) for a, s in zip((gate, up), parts[:2], strict=True)
            )
            down = jnp.concatenate([down, parts[2].reshape(h, slots, i).swapaxes(0, 1)])
            biases = [None if b is None else jnp.pad(b, [(0, slots), (0, 0)]) for b in biases]
        else:
            stacks = [_store(a[None], config.shared_format) for a in parts]
            separate = expert_weights(stacks[0], stacks[1], stacks[2])
        vector = None if shared_gate_vector is None else jnp.asarray(shared_gate_vector, dtype=jnp.float32)
        shared = SharedParams(separate, vector)
    elif any(a is not None for a in (shared_gate, shared_up, shared_down, shared_gate_vector)):
        raise ShapeError("shared expert arrays are given but config.shared is None")
    router = RouterParams(
        jnp.zeros((h, e), jnp.float32) if router_kernel is None else jnp.asarray(router_kernel, dtype=jnp.float32),
        None if logit_bias is None else jnp.asarray(logit_bias, dtype=jnp.float32),
        None if correction_bias is None else jnp.asarray(correction_bias, dtype=jnp.float32),
        None if tid2eid is None else jnp.asarray(tid2eid, dtype=jnp.int32),
    )
    stacks = [_store(a, config.weights) for a in (gate, up, down)]
    params = MoEParams(router, expert_weights(stacks[0], stacks[1], stacks[2], *biases), shared)
    check_params(params, config)
    return params


def _store(w: Array, fmt: WeightFormat) -> GroupedWeight:
    if fmt == BF16 and w.dtype in (jnp.bfloat16, jnp.float32):
        return GroupedWeight(w, None, BF16, w.shape[-1])
    return quantize_weight(w, fmt)


def expert_weights(
    gate: GroupedWeight,
    up: GroupedWeight,
    down: GroupedWeight,
    gate_bias: Array | None = None,
    up_bias: Array | None = None,
    down_bias: Array | None = None,
) -> ExpertWeights:
    """Joins three projections, quantised or not, into the form the pipeline eats; values and scales are not changed.

    Args:
      gate, up: [E, I, H]. down: [E, H, I], with columns stored up to Ip.
      gate_bias, up_bias: f32 [E, I]. down_bias: f32 [E, H].

    Returns:
      Weights whose gate and up halves are padded with zeros (scales 1) to Ip rows each.

    Raises:
      FormatError: formats differ. ShapeError: sizes differ.
    """
    if not gate.format == up.format == down.format:
        raise FormatError(
            f"gate, up and down are {gate.format.name}, {up.format.name} and {down.format.name}; make them one format"
        )
    sizes = [(w.num_experts, w.n, w.k) for w in (gate, up, down)]
    if sizes[0] != sizes[1] or sizes[2] != (gate.num_experts, gate.k, gate.n):
        raise ShapeError(
            f"gate, up and down are [E, N, K] = {', '.join(map(str, map(list, sizes)))}; "
            "they must be [E, I, H], [E, I, H], [E, H, I]"
        )
    if (gate_bias is None) != (up_bias is None) or (gate_bias is None) != (down_bias is None):
        raise ShapeError("give gate_bias, up_bias and down_bias, or none of them")
    width = stored_width(gate.n, gate.format)
    gate_up = concat_n([pad_n(gate, width), pad_n(up, width)])
    if gate_bias is None or up_bias is None:
        return ExpertWeights(gate_up, down)
    pad = [(0, 0), (0, width - gate.n)]
    return ExpertWeights(gate_up, down, jnp.concatenate([jnp.pad(gate_bias, pad), jnp.pad(up_bias, pad)], 1), down_bias)
