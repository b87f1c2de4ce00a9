"""The grouped GEMM on DeepGEMM's kernels: Hopper and data-centre Blackwell.

bf16 is differentiable: the input gradient is the same kernel over the same weights, read as [G, k, n]; the weight
gradient is the plain JAX loop over experts, because no correct kernel for it is known to us.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.cuda import target
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.deepgemm.call import GemmCall, call_gemm
from jaxmoe.errors import BackendUnavailable
from jaxmoe.ops.grouped_gemm import reference
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.formats import WeightFormat
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows

Array = jax.Array

# Formats by kernel family; the rest are converted when a checkpoint is loaded.
_FORMATS = {"sm90": ("BF16", "FP8Block"), "sm100": ("BF16", "FP8BlockUE8M0", "MXFP8", "MXFP4")}


def grouped_gemm(
    rows: GroupedRows,
    weight: GroupedWeight,
    *,
    bias: Array | None,
    out_dtype: Any,
    expected_m: int | None = None,
    num_sms: int | None = None,
    pdl: bool = False,
) -> Array:
    """See :func:`jaxmoe.ops.grouped_gemm.grouped_gemm`. Rows of no expert come out undefined."""
    arch = target.current()
    _check(rows, weight, arch, out_dtype)
    call = gemm_call(
        weight.format, rows.layout, arch, alignment=rows.alignment, expected_m=expected_m, num_sms=num_sms, pdl=pdl
    )
    if isinstance(rows.rows, QuantizedRows):
        assert weight.scales is not None
        y = call_gemm(call, (rows.rows.values, rows.rows.scales, weight.values, weight.scales, rows.group))
    else:
        y = _bf16(call, rows.rows, weight.values, rows.group)
    return y if bias is None else _add_bias(y, bias, rows)


def gemm_call(
    fmt: WeightFormat,
    layout: Any,
    arch: Arch,
    *,
    alignment: int = 128,
    expected_m: int | None = None,
    num_sms: int | None = None,
    pdl: bool = False,
    d: Any = "bf16",
) -> GemmCall:
    """The static part of a GEMM with weights of format ``fmt``.

    Raises:
      BackendUnavailable: ``arch`` has no kernel for the format.
    """
    if fmt.name not in _FORMATS[arch.family]:
        raise BackendUnavailable(
            f"{arch.name} has no DeepGEMM kernel for {fmt.name} weights, only for {', '.join(_FORMATS[arch.family])}; "
            f"convert them at load: load_moe(..., weights=jaxmoe.{'FP8Block' if arch.family == 'sm90' else 'FP8BlockUE8M0'})"
        )
    quant = fmt.activation
    return GemmCall(
        arch=arch,
        layout=layout,
        a="bf16" if quant is None else "e4m3",
        b="bf16" if quant is None else "e2m1" if fmt.bits == 4 else "e4m3",
        d=d,
        gran_a=128 if quant is None else quant.block,
        gran_b=max(fmt.block_k, 32) if quant is not None else 128,
        expected_m=(expected_m or 0) if layout in ("psum", "masked") else 0,
        alignment=alignment,
        num_sms=num_sms,
        pdl=pdl,
    )


def _check(rows: GroupedRows, weight: GroupedWeight, arch: Arch, out_dtype: Any) -> None:
    if out_dtype != jnp.bfloat16:
        raise BackendUnavailable(
            f"grouped DeepGEMM kernels give bfloat16, not {out_dtype}; use bf16 rows or backend='reference'"
        )
    if isinstance(rows.rows, QuantizedRows):
        return
    if weight.format.quantized:
        raise BackendUnavailable(
            f"unquantised rows with {weight.format.name} weights have no kernel; quantise the rows, or use backend='reference'"
        )
    for what, array in (("rows", rows.rows), ("weights", weight.values)):
        if array.dtype != jnp.bfloat16:
            raise BackendUnavailable(
                f"DeepGEMM takes bfloat16 {what}, got {array.dtype}; cast them, or use backend='reference'"
            )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bf16(call: GemmCall, rows: Array, weight: Array, group: Array) -> Array:
    return call_gemm(call, (rows, weight, group))


def _bf16_fwd(call: GemmCall, rows: Array, weight: Array, group: Array) -> tuple[Array, Any]:
    return _bf16(call, rows, weight, group), (rows, weight, group)


def _bf16_bwd(call: GemmCall, saved: Any, dy: Array) -> tuple[Array, Array, Any]:
    rows, weight, group = saved
    grouping = GroupedRows(dy, group, call.layout, call.alignment)
    # Rows of no expert hold anything, in dy as well: they are selected away before a sum or a tile can see them.
    valid = (reference.row_labels(grouping, weight.shape[0]) >= 0).reshape(*dy.shape[:-1], 1)
    zero = jnp.zeros((), jnp.bfloat16)
    dy = jnp.where(valid, dy, zero)
    d_rows = call_gemm(dataclasses.replace(call, b_major="MN"), (dy, weight, group))
    d_weight = reference.weight_gradient(grouping.with_rows(rows), dy, weight)
    return jnp.where(valid, d_rows, zero), d_weight, np.zeros(group.shape, jax.dtypes.float0)


_bf16.defvjp(_bf16_fwd, _bf16_bwd)


def _add_bias(y: Array, bias: Array, rows: GroupedRows) -> Array:
    """Adds each row's expert's bias in f32 and rounds again; rows of no expert stay undefined."""
    labels = reference.row_labels(rows, bias.shape[0]).reshape(y.shape[:-1])
    return (y.astype(jnp.float32) + bias[jnp.maximum(labels, 0)]).astype(y.dtype)
