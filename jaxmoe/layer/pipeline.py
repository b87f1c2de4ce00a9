"""The token's way, room by room:

router ─► dispatch ─► pre_permute ─► gemm1 ─► activation ─► gemm2 ─► post_permute ─► combine
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxmoe.config import Execution, MoEConfig
from jaxmoe.dispatch.base import Dispatch
from jaxmoe.dispatch.local import Local
from jaxmoe.layer.checks import check_inputs, check_params
from jaxmoe.layer.layout import choose_layout, expected_rows
from jaxmoe.layer.params import ExpertWeights, MoEParams, SharedParams
from jaxmoe.layer.shared_experts import shared_gate
from jaxmoe.ops.dense_gemm import dense_gemm
from jaxmoe.ops.gated_act import gated_act
from jaxmoe.ops.grouped_gemm import grouped_gemm, row_alignment
from jaxmoe.ops.permute import group_tokens, permute, unpermute
from jaxmoe.ops.quantize import quantize
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows
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
    with jax.named_scope("router"):
        routing = choose_experts(params, x, config, execution, token_ids=tokens, valid=valid, routing=routing)
    with jax.named_scope("dispatch"):
        dispatched = transport.dispatch(x, routing.ids, routing.weights, config.router.num_experts)
    routed = experts(params.experts, dispatched.x, dispatched.ids, dispatched.weights, config, execution)
    with jax.named_scope("combine"):
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
    """What a shared expert kept apart makes of x [T, H]: f32 [T, H], or None where the layer has none.

    Every token takes it, so its GEMMs are dense and no row moves. Rows that are not valid must be finite.
    """
    if shared is None or shared.experts is None:
        return None
    mlp = shared.experts
    quant = mlp.gate_up.format.activation if execution.quantize_activations else None
    by_row = _by_row(execution)

    def gemm(rows: Array | QuantizedRows, weight: GroupedWeight, bias: Array | None) -> Array:
        y = dense_gemm(rows, weight, out_dtype=x.dtype, backend=execution.backend)
        return y if bias is None else (y.astype(jnp.float32) + bias).astype(x.dtype)

    with jax.named_scope("shared"):
        rows = x if quant is None else quantize(x, quant, backend=by_row)
        h = gemm(rows, mlp.gate_up, mlp.gate_up_bias)
        a = gated_act(h, config.activation, quant=quant, backend=by_row)
        y = gemm(a, mlp.down, mlp.down_bias).astype(jnp.float32)
        gate = shared_gate(shared, x, deterministic=execution.deterministic)
        y = y if gate is None else y * gate[:, None]
        y = y if valid is None else jnp.where(valid[:, None], y, 0.0)
        return jax.lax.optimization_barrier(y) if execution.deterministic else y


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
    num_experts, (tokens, choices) = weights.gate_up.num_experts, ids.shape
    alignment = execution.row_alignment or row_alignment(execution.backend)
    layout, _ = choose_layout(execution, tokens, choices, num_experts, alignment=alignment)
    quant = weights.gate_up.format.activation if execution.quantize_activations else None
    by_row = _by_row(execution)
    gemm = functools.partial(
        grouped_gemm,
        out_dtype=x.dtype,
        expected_m=expected_rows(tokens, choices, num_experts),
        backend=execution.backend,
    )

    with jax.named_scope("pre_permute"):
        capacity = execution.masked_capacity
        grouping = group_tokens(ids, num_experts, layout=layout, alignment=alignment, capacity=capacity)
        valid = grouping.valid
        rows = permute(x, grouping)
        if quant is not None:
            rows = rows.with_rows(quantize(rows.values, quant, valid=valid, backend=by_row))
    with jax.named_scope("gemm1"):
        h = gemm(rows, weights.gate_up, bias=weights.gate_up_bias)
    with jax.named_scope("activation"):
        a = gated_act(h, config.activation, quant=quant, valid=valid, backend=by_row)
    with jax.named_scope("gemm2"):
        y = gemm(rows.with_rows(a), weights.down, bias=weights.down_bias)
    with jax.named_scope("post_permute"):
        y = unpermute(y, grouping.slots, combine_weights, out_dtype=jnp.float32)
        # As one loop with what comes next, the compiler may contract products and sums in some sizes, not in others.
        return jax.lax.optimization_barrier(y) if execution.deterministic else y


def _by_row(execution: Execution) -> str:
    """The backend of the rooms between the GEMMs: the names in ``execution`` are the GEMMs' own."""
    return "reference" if execution.backend == "reference" else "auto"
