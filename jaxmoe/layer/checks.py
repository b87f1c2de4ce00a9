"""Do parameters, inputs and config fit together? Every refusal holds the numbers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxmoe.config import MoEConfig
from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.layer.params import ExpertWeights, MoEParams
from jaxmoe.quant.formats import WeightFormat
from jaxmoe.quant.tensors import GroupedWeight, scales_like
from jaxmoe.router import Routing, check_replicas, check_routing
from jaxmoe.sizes import round_up

Host = Array | np.ndarray


def stored_width(intermediate: int, fmt: WeightFormat) -> int:
    """Ip: the intermediate width as stored, I padded to what the format's kernels take."""
    return round_up(intermediate, fmt.k_multiple)


def check_params(params: MoEParams, config: MoEConfig, *, held: int | None = None) -> None:
    """Refuses parameters that do not fit the config.

    Args:
      params: the layer's parameters.
      config: what the layer is.
      held: experts in the stacks; None: all E of them and the fused slots.

    Raises:
      ShapeError, FormatError: names the parameter, what it is and what it must be.
    """
    k = config.router.top_k
    held = config.router.num_experts + config.fused_slots if held is None else held
    kernel, table = params.router.kernel, params.router.tid2eid
    if kernel.shape != (config.hidden, config.router.logical):
        raise ShapeError(
            f"router kernel is {list(kernel.shape)}; the config says [H, E] = {[config.hidden, config.router.logical]}"
        )
    check_replicas(params.router.replicas, config.router)
    if table is not None and (table.ndim != 2 or table.shape[1] != k):
        raise ShapeError(f"tid2eid is {list(table.shape)}; with top_k {k} it must be [V, {k}]")
    _check_mlp("experts", params.experts, config, config.weights, config.intermediate, held)
    shared = params.shared
    if config.shared is None:
        if shared is not None:
            raise ShapeError("the parameters hold a shared expert but config.shared is None; set it or drop them")
        return
    apart = shared is not None and shared.experts is not None
    if apart == config.shared.fused:
        have = "one" if apart else "none"
        raise ShapeError(
            f"config.shared.fused is {config.shared.fused} but the parameters hold {have} apart from the routed experts"
        )
    gate = None if shared is None else shared.gate
    if (gate is not None) != config.shared.gate or (gate is not None and gate.shape != (config.hidden,)):
        have = None if gate is None else list(gate.shape)
        raise ShapeError(
            f"config.shared.gate is {config.shared.gate} but the gate vector is {have}; "
            f"[H] = [{config.hidden}] goes with True"
        )
    if shared is not None and shared.experts is not None:
        _check_mlp("shared.experts", shared.experts, config, config.shared_format, config.shared.intermediate, 1)


def _check_mlp(
    name: str, w: ExpertWeights, config: MoEConfig, fmt: WeightFormat, intermediate: int, count: int
) -> None:
    width, h, e = stored_width(intermediate, fmt), config.hidden, w.gate_up.num_experts
    if e != count:
        raise ShapeError(
            f"{name}.gate_up holds {e} experts; the config says {count} "
            f"({config.router.num_experts} routed, {config.fused_slots} fused shared, over all devices)"
        )
    _check_weight(f"{name}.gate_up", w.gate_up, fmt, e, 2 * width, {h})
    _check_weight(f"{name}.down", w.down, fmt, e, h, {intermediate, width})
    if w.down.k_padded != width:
        raise ShapeError(f"{name}.down stores {w.down.k_padded} columns; gate_up gives {width}")
    has_bias = config.expert_bias and name == "experts"
    for part, bias, n in (("gate_up_bias", w.gate_up_bias, 2 * width), ("down_bias", w.down_bias, h)):
        if name == "experts" and (bias is not None) != has_bias:
            raise ShapeError(
                f"config.expert_bias is {has_bias} but {name}.{part} is {'given' if bias is not None else 'missing'}"
            )
        if bias is not None and (bias.shape != (e, n) or bias.dtype != jnp.float32):
            raise ShapeError(f"{name}.{part} is {bias.dtype}{list(bias.shape)}; it must be float32[{e}, {n}]")


def _check_weight(name: str, w: GroupedWeight, fmt: WeightFormat, e: int, n: int, ks: set[int]) -> None:
    if w.format != fmt:
        raise FormatError(
            f"{name} is {w.format.name}, the config says {fmt.name}; convert the weights or change the config"
        )
    if w.num_experts != e or w.n != n or w.k not in ks:
        want = " or ".join(str([e, n, k]) for k in sorted(ks))
        raise ShapeError(f"{name} is [E, N, K] = {[w.num_experts, w.n, w.k]}; the config ({fmt.name}) says {want}")
    scales, want = w.scales, scales_like(fmt, e, n, w.k_padded)
    if want is not None and (scales is None or scales.shape != want.shape or scales.dtype != want.dtype):
        have = "missing" if scales is None else f"{scales.dtype}{list(scales.shape)}"
        raise ShapeError(
            f"{name}'s scales are {have}; {fmt.name} values {list(w.values.shape)} go with "
            f"{want.dtype}{list(want.shape)}; jaxmoe.quant.from_canonical lays a checkpoint's scales out"
        )


def check_inputs(
    x: Host, config: MoEConfig, *, token_ids: Host | None, valid: Host | None, routing: Routing | None
) -> None:
    """Refuses inputs that do not fit the config or each other; see :func:`jaxmoe.layer.pipeline.moe`."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise FormatError(f"x is {x.dtype}; it must be bfloat16 or float32")
    if x.ndim < 2 or x.shape[-1] != config.hidden:
        raise ShapeError(f"x is {list(x.shape)}; it must be [..., H] with H = {config.hidden}")
    lead = x.shape[:-1]
    for name, value, dtype in (("token_ids", token_ids, jnp.int32), ("valid", valid, jnp.bool_)):
        if value is not None and (value.shape != lead or value.dtype != dtype):
            raise ShapeError(
                f"{name} is {value.dtype}{list(value.shape)}; x {list(x.shape)} needs {jnp.dtype(dtype)}{list(lead)}"
            )
    if routing is not None:
        tokens = x.size // config.hidden
        check_routing(routing.ids, routing.weights, config.router.num_experts, tokens=tokens)
