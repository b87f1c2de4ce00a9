"""The token's way, room by room:

router ─► dispatch ─► pre_permute ─► gemm1 ─► activation ─► gemm2 ─► post_permute ─► combine
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.config import Execution, MoEConfig
from jaxmoe.dispatch.base import Dispatch
from jaxmoe.dispatch.local import Local
from jaxmoe.errors import FormatError
from jaxmoe.layer.checks import check_inputs, check_params
from jaxmoe.layer.layout import choose_layout, tile_rows
from jaxmoe.layer.params import ExpertWeights, MoEParams, SharedParams
from jaxmoe.layer.shared_experts import shared_gate
from jaxmoe.layer.straight_through import straight_through
from jaxmoe.ops.dense_gemm import dense_gemm
from jaxmoe.ops.gated_act import gated_act
from jaxmoe.ops.grouped_gemm import grouped_gemm, row_alignment
from jaxmoe.ops.permute import group_tokens, permute, unpermute
from jaxmoe.ops.quantize import quantize
from jaxmoe.ops.rows import GroupedRows
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
    shared = shared_experts(params.shared, x, config, execution, valid=valid)
    with jax.named_scope("dispatch"):
        dispatched = transport.dispatch(x, routing.ids, routing.weights, config.router.num_experts)
    # Results that stay here meet the shared expert's as they are summed; one loop for both may round otherwise with T.
    together = isinstance(transport, Local) and not execution.deterministic
    y = experts(
        params.experts,
        dispatched.x,
        dispatched.ids,
        dispatched.weights,
        config,
        execution,
        add=shared if together else None,
        expected=dispatched.expected,
        out_dtype=x.dtype if together else jnp.float32,
    )
    with jax.named_scope("combine"):
        y = transport.combine(y, dispatched)
        y = y if together or shared is None else y + shared.astype(jnp.float32)
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
    """What a shared expert kept apart makes of x [T, H]: [T, H], f32 or x's dtype, or None where the layer has none.

    Every token takes it, so its GEMMs are dense and no row moves. Rows that are not valid must be finite.
    """
    if shared is None or shared.experts is None:
        return None
    if execution.forward_format is not None:

        def room(given: tuple[SharedParams, Array], valid: Array | None, execution: Execution) -> Array:
            y = shared_experts(*given, config, execution, valid=valid)
            assert y is not None
            return y

        return straight_through(room, execution, (shared, x), valid)
    mlp = shared.experts
    quant = mlp.gate_up.format.activation if execution.quantize_activations else None
    by_row, dtype, tokens = _by_row(execution), x.dtype, x.shape[0]
    options: dict[str, Any] = {"out_dtype": dtype, "backend": execution.backend}
    alignment = execution.row_alignment or row_alignment(execution.backend)

    def gemm(rows: Array | QuantizedRows, weight: GroupedWeight, bias: Array | None) -> Array:
        if execution.deterministic:  # as one group, for dense kernels choose tiles by T
            ends = jnp.full(1, tokens, jnp.int32)
            group = GroupedRows(rows, ends, "psum", alignment)
            y = grouped_gemm(group, weight, expected_m=tile_rows(execution, tokens, 1), **options)
        else:
            y = dense_gemm(rows, weight, **options)
        return y if bias is None else (y.astype(jnp.float32) + bias).astype(dtype)

    with jax.named_scope("shared"):
        rows = jnp.pad(x, [(0, -tokens % alignment), (0, 0)]) if execution.deterministic else x
        rows = rows if quant is None else quantize(rows, quant, backend=by_row)
        h = gemm(rows, mlp.gate_up, mlp.gate_up_bias)
        a = gated_act(h, config.activation, quant=quant, backend=by_row)
        y = gemm(a, mlp.down, mlp.down_bias)[:tokens]
        gate = shared_gate(shared, x, deterministic=execution.deterministic)
        y = y if gate is None else y.astype(jnp.float32) * gate[:, None]
        y = y if valid is None else jnp.where(valid[:, None], y, jnp.zeros((), y.dtype))
        return jax.lax.optimization_barrier(y) if execution.deterministic else y


def experts(
    weights: ExpertWeights,
    x: Array | QuantizedRows | GroupedRows,
    ids: Array,
    combine_weights: Array,
    config: MoEConfig,
    execution: Execution,
    *,
    add: Array | None = None,
    out_dtype: Any = jnp.float32,
    expected: int | None = None,
) -> Array:
    """The rooms between the transports: pre_permute, both GEMMs with the activation between them, post_permute.

    Args:
      weights: El local experts, in any format.
      x: [N, H], bf16, f32 or quantised; rows without an id may hold anything. Or rows grouped by expert already, whose
        layout is taken as it is; N counts all of their rows, and K is 1.
      ids: int32 [N, K], local expert ids, -1 for none.
      combine_weights: f32 [N, K].
      add: [N, H], added to the sums in f32.
      expected: choices that are likely here, for which GEMMs choose tiles; None: N·K.

    Returns:
      [N, H] in ``out_dtype``: the weighted sum over each row's local experts, 0 for a row without any, and ``add``.

    Raises:
      FormatError: x is quantised and ``execution`` says that rows are not.
    """
    if execution.forward_format is not None:
        if not isinstance(x, jax.Array):
            raise FormatError("forward_format needs rows that are not quantised; have the transport carry bf16 rows")

        def room(given: tuple[ExpertWeights, Array, Array], ids: Array, execution: Execution) -> Array:
            weights, combine_weights, x = given
            return experts(weights, x, ids, combine_weights, config, execution, expected=expected)

        y = straight_through(room, execution, (weights, combine_weights, x), ids)
        return (y if add is None else y + add.astype(jnp.float32)).astype(out_dtype)
    num_experts, (tokens, choices) = weights.gate_up.num_experts, ids.shape
    alignment = execution.row_alignment or row_alignment(execution.backend)
    quant = weights.gate_up.format.activation if execution.quantize_activations else None
    given = x.rows if isinstance(x, GroupedRows) else x
    if isinstance(given, QuantizedRows) and quant is None:
        raise FormatError(
            f"rows arrived quantised as {given.quant} for {weights.gate_up.format.name} experts that run on "
            "unquantised ones; have the transport carry bf16 rows, or set quantize_activations=True"
        )
    by_row = _by_row(execution)
    gemm = functools.partial(
        grouped_gemm,
        out_dtype=jnp.bfloat16 if isinstance(given, QuantizedRows) else given.dtype,
        expected_m=tile_rows(execution, tokens * choices if expected is None else expected, num_experts),
        backend=execution.backend,
    )

    with jax.named_scope("pre_permute"):
        if quant is not None and not isinstance(given, QuantizedRows):
            given = quantize(given, quant, backend=by_row)
        if isinstance(x, GroupedRows):
            slots, rows, valid = None, x.with_rows(given), (ids >= 0).reshape(x.values.shape[:-1])
        else:
            layout, _ = choose_layout(execution, tokens, choices, num_experts, alignment=alignment)
            capacity = execution.masked_capacity
            grouping = group_tokens(
                ids, num_experts, layout=layout, alignment=alignment, capacity=capacity, backend=by_row
            )
            slots, rows, valid = grouping.slots, permute(given, grouping, backend=by_row), grouping.valid
    with jax.named_scope("gemm1"):
        h = gemm(rows, weights.gate_up, bias=weights.gate_up_bias)
    with jax.named_scope("activation"):
        a = gated_act(h, config.activation, quant=quant, valid=valid, backend=by_row)
    with jax.named_scope("gemm2"):
        y = gemm(rows.with_rows(a), weights.down, bias=weights.down_bias)
    with jax.named_scope("post_permute"):
        if slots is None:
            y = combine_weights * jnp.where(ids >= 0, y.reshape(tokens, -1).astype(jnp.float32), 0.0)
            y = (y if add is None else y + add.astype(jnp.float32)).astype(out_dtype)
        else:
            y = unpermute(y, slots, combine_weights, add=add, out_dtype=out_dtype, backend=by_row)
        # As one loop with what comes next, the compiler may contract products and sums in some sizes, not in others.
        return jax.lax.optimization_barrier(y) if execution.deterministic else y


def _by_row(execution: Execution) -> str:
    """The backend of the rooms between the GEMMs: the names in ``execution`` are the GEMMs' own."""
    return "reference" if execution.backend == "reference" else "auto"
