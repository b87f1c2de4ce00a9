"""Experts that see every token, kept apart from the routed ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxmoe.config import Execution, MoEConfig
from jaxmoe.layer.params import ExpertWeights, SharedParams
from jaxmoe.ops.gated_act import gated_act
from jaxmoe.ops.grouped_gemm import grouped_gemm, row_alignment
from jaxmoe.ops.quantize import quantize
from jaxmoe.ops.rows import GroupedRows

Array = jax.Array


def shared_gate(shared: SharedParams | None, x: Array) -> Array | None:
    """σ(x · gate) in f32, [T], for x [T, H]; None where the layer has no gate."""
    if shared is None or shared.gate is None:
        return None
    logits = jnp.dot(x.astype(jnp.float32), shared.gate.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return jax.nn.sigmoid(logits)


def shared_mlp(
    weights: ExpertWeights, x: Array, config: MoEConfig, execution: Execution, *, gate: Array | None = None
) -> Array:
    """The shared experts' output, one expert of the grouped GEMM.

    Args:
      weights: stacks of one.
      x: [T, H], bf16 or f32.
      config, execution: of the layer.
      gate: f32 [T] from :func:`shared_gate`, multiplied in; None is 1.

    Returns:
      f32 [T, H]. Rows do not depend on each other: a NaN row stays alone.
    """
    fmt = config.shared_format
    t = x.shape[0]
    align = execution.row_alignment or row_alignment(execution.backend)
    padded = jnp.pad(x, [(0, -t % align), (0, 0)])
    quant = fmt.activation if execution.quantize_activations else None
    backend, valid = execution.backend, jnp.arange(padded.shape[0]) < t

    rows = GroupedRows(padded, jnp.full(1, t, jnp.int32), "psum", align)
    if quant is not None:
        rows = rows.with_rows(quantize(padded, quant, valid=valid, backend=backend))
    h = grouped_gemm(rows, weights.gate_up, bias=weights.gate_up_bias, out_dtype=x.dtype, backend=backend)
    a = gated_act(h, config.activation, quant=quant, valid=valid, backend=backend)
    y = grouped_gemm(rows.with_rows(a), weights.down, bias=weights.down_bias, out_dtype=x.dtype, backend=backend)
    y = y[:t].astype(jnp.float32)
    return y if gate is None else gate[:, None] * y
