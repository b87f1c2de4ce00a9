"""The token's way, room by room:

router ─► dispatch ─► pre_permute ─► gemm1 ─► activation ─► gemm2 ─► post_permute ─► combine
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxmoe.config import Execution, Layout, MoEConfig
from jaxmoe.dispatch.base import Dispatch
from jaxmoe.dispatch.local import Local
from jaxmoe.layer.checks import check_inputs, check_params
from jaxmoe.layer.params import ExpertWeights, MoEParams, SharedParams
from jaxmoe.layer.shared_experts import everyone, shared_gate
from jaxmoe.ops.gated_act import gated_act
from jaxmoe.ops.grouped_gemm import grouped_gemm, row_alignment
from jaxmoe.ops.permute import group_tokens, permute, unpermute
from jaxmoe.ops.quantize import quantize
from jaxmoe.router import Routing, append_shared_slots, route

Array = jax.Array


def moe(
    params: MoEParams,
    x: Array,
    config: MoEConfig,
    execution: Execution | None = None,
    *,
    token_ids: Array | None = None,
    valid: Array | None = None,
    routing: Routing | None = None,
    transport: Dispatch | None = None,
) -> Array:
    """One MoE layer: ``y = Σ_k weight_k · expert_k(x) + shared(x)``, summed in f32 and rounded once.

    Works eagerly and under ``jax.jit`` with ``config`` and ``execution`` static; one compile serves every routing of
    a shape.

    Args:
      params: the layer's parameters.
      x: [..., H], bf16 or f32; the leading axes together are T tokens.
      config: what the layer is.
      execution: how it runs; None is ``Execution()``.
      token_ids: int32 [...], needed by hash routing.
      valid: bool [...]; rows where it is False may hold anything, take no expert and come out as exactly 0.
      routing: ids and final weights [T, K] to use in place of the router's; ``routed_scaling_factor`` must
        already be in the weights. A repeated id counts each time. Where the ids are known, one outside -1..E-1 is an
        error; when traced, it is no expert.
      transport: how tokens reach experts on other devices, inside ``shard_map``; ``params`` then hold this device's
        experts only. None: all experts are here.

    Returns:
      [..., H] in x's dtype.

    Raises:
      ShapeError, FormatError, ValueError: parameters, inputs and config do not fit; the message has the numbers.
    """
    execution = Execution() if execution is None else execution
    transport = Local() if transport is None else transport
    check_params(params, config, held=transport.held(config.router.num_experts, config.fused_slots))
    check_inputs(x, config, token_ids=token_ids, valid=valid, routing=routing)
    shape = x.shape
    x = x.reshape(-1, config.hidden)
    if valid is not None:
        valid = valid.reshape(-1)
        x = jnp.where(valid[:, None], x, jnp.zeros((), x.dtype))

    tokens = None if token_ids is None else token_ids.reshape(-1)
    routing = choose_experts(params, x, config, execution, token_ids=tokens, valid=valid, routing=routing)
    dispatched = transport.dispatch(x, routing.ids, routing.weights, config.router.num_experts)
    routed = experts(params.experts, dispatched.x, dispatched.ids, dispatched.weights, config, execution)
    y = transport.combine(routed, dispatched)

    shared = shared_experts(params.shared, x, config, execution, valid=valid)
    y = y if shared is None else y + shared
    return y.astype(x.dtype).reshape(shape)


def choose_experts(
    params: MoEParams,
    x: Array,
    config: MoEConfig,
    execution: Execution,
    *,
    token_ids: Array | None = None,
    valid: Array | None = None,
    routing: Routing | None = None,
) -> Routing:
    """Where tokens x [T, H] go, fused shared experts included; see :func:`moe`."""
    if routing is None:
        routing = route(
            params.router, x, config.router, token_ids=token_ids, valid=valid, deterministic=execution.deterministic
        )
    elif valid is not None:
        ids = jnp.where(valid[:, None], routing.ids, -1)
        routing = Routing(ids, jnp.where(ids >= 0, routing.weights, 0.0))
    if config.fused_slots:
        gate = shared_gate(params.shared, x, deterministic=execution.deterministic)
        routing = append_shared_slots(routing, config.router.num_experts, config.fused_slots, gate, valid)
    return routing


def shared_experts(
    shared: SharedParams | None, x: Array, config: MoEConfig, execution: Execution, *, valid: Array | None = None
) -> Array | None:
    """What a shared expert kept apart makes of x [T, H]: f32 [T, H], or None where the layer has none."""
    if shared is None or shared.experts is None:
        return None
    all_tokens = everyone(shared, x, valid, deterministic=execution.deterministic)
    return experts(shared.experts, x, all_tokens.ids, all_tokens.weights, config, execution)


def experts(
    weights: ExpertWeights, x: Array, ids: Array, combine_weights: Array, config: MoEConfig, execution: Execution
) -> Array:
    """The rooms between the transports: pre_permute, both GEMMs with the activation between them, post_permute.

    Args:
      weights: El local experts, in any format.
      x: [N, H], bf16 or f32; rows without an id may hold anything.
      ids: int32 [N, K], local expert ids, -1 for none.
      combine_weights: f32 [N, K].

    Returns:
      f32 [N, H]: the weighted sum over each row's local experts, 0 for a row without any.
    """
    grouping = group_tokens(
        ids,
        weights.gate_up.num_experts,
        layout=choose_layout(execution),
        alignment=execution.row_alignment or row_alignment(execution.backend),
        capacity=execution.masked_capacity,
    )
    quant = weights.gate_up.format.activation if execution.quantize_activations else None
    backend, valid = execution.backend, grouping.valid
    by_row = "reference" if backend == "reference" else "auto"  # other names are the GEMMs' own
    gemm = functools.partial(
        grouped_gemm,
        out_dtype=x.dtype,
        expected_m=expected_rows(ids.shape[0], ids.shape[1], weights.gate_up.num_experts),
        backend=backend,
    )

    rows = permute(x, grouping)
    if quant is not None:
        rows = rows.with_rows(quantize(rows.values, quant, valid=valid, backend=by_row))
    h = gemm(rows, weights.gate_up, bias=weights.gate_up_bias)
    a = gated_act(h, config.activation, quant=quant, valid=valid, backend=by_row)
    y = gemm(rows.with_rows(a), weights.down, bias=weights.down_bias)
    y = unpermute(y, grouping.slots, combine_weights, out_dtype=jnp.float32)
    # As one loop with what comes next, the compiler may contract products and sums in some sizes and not in others.
    return jax.lax.optimization_barrier(y) if execution.deterministic else y


def expected_rows(tokens: int, choices: int, experts: int) -> int:
    """Rows per expert that tiles are chosen for: those of even routing, at least 1."""
    return max(-(-tokens * choices // experts), 1)


def choose_layout(execution: Execution) -> Layout:
    """The layout a run takes: the one asked for; ``auto`` is psum."""
    return "psum" if execution.layout == "auto" else execution.layout
