"""The grouped GEMM on DeepGEMM's kernels: Hopper and data-centre Blackwell.

bf16 is differentiable: the input gradient is the same kernel over the same weights, read as [G, k, n]; the weight
gradient is DeepGEMM's k-grouped kernel over psum rows, XLA's batched product over masked rows, and the plain JAX loop
over experts for contiguous rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.config import Layout
from jaxmoe.cuda import target
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.deepgemm import theoretical_mk_alignment
from jaxmoe.cuda.deepgemm.call import GEMM_ARCH, GemmCall, call_kernel
from jaxmoe.cuda.deepgemm.gemm import Dtype
from jaxmoe.cuda.deepgemm.gemm import Layout as GemmLayout
from jaxmoe.cuda.deepgemm.zero import zero_between
from jaxmoe.errors import BackendUnavailable
from jaxmoe.ops.grouped_gemm import reference
from jaxmoe.ops.grouped_gemm.constants import undifferentiable
from jaxmoe.ops.rows import GroupedRows, psum_experts, psum_starts
from jaxmoe.quant.formats import FORMATS, WeightFormat
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows

Array = jax.Array

ALIGNMENT = 128
"""BLOCK_M of the psum and contiguous kernels, and a multiple of the others'."""

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
    """See :func:`jaxmoe.ops.grouped_gemm.grouped_gemm`. Rows of no expert come out undefined.

    The bias is added to the rounded product and rounded again.
    """
    arch = target.current()
    if out_dtype != jnp.bfloat16:
        raise BackendUnavailable(
            f"grouped DeepGEMM kernels give bfloat16, not {out_dtype}; use bf16 rows or backend='reference'"
        )
    call = gemm_call(
        weight.format, rows.layout, arch, alignment=rows.alignment, expected_m=expected_m, num_sms=num_sms, pdl=pdl
    )
    check_operands(rows.rows, weight)
    if isinstance(rows.rows, QuantizedRows):
        quantized, weight = undifferentiable(rows.rows), undifferentiable(weight)
        assert weight.scales is not None
        operands = (quantized.values, quantized.scales, weight.values, weight.scales, rows.group)
        (y,) = call_kernel(call, operands)
    else:
        y = _bf16(call, rows.rows, weight.values, rows.group)
    return y if bias is None else _biased((rows.layout, rows.alignment), y, bias, rows.group)


def gemm_call(
    fmt: WeightFormat,
    layout: GemmLayout,
    arch: Arch,
    *,
    alignment: int = ALIGNMENT,
    expected_m: int | None = None,
    num_sms: int | None = None,
    pdl: bool = False,
    d: Dtype = "bf16",
) -> GemmCall:
    """The static part of a GEMM with weights of format ``fmt``; ``expected_m`` counts for psum and masked only.

    Raises:
      BackendUnavailable: ``arch`` has no kernel for the format.
    """
    kept, quant = kernel_format(fmt, arch), fmt.activation
    if kept != fmt:
        raise BackendUnavailable(
            f"{arch.name} has no DeepGEMM kernel for {fmt.name} weights, only for {', '.join(_FORMATS[arch.family])}; "
            f"convert them when they are loaded: load_moe(..., weights={kept!r})"
        )
    common = {"arch": arch, "layout": layout, "d": d, "alignment": alignment, "num_sms": num_sms, "pdl": pdl}
    if expected_m is not None and layout in ("psum", "masked"):
        common["expected_m"] = expected_m
    if quant is None:
        return GemmCall(a="bf16", b="bf16", **common)
    return GemmCall(a="e4m3", b="e2m1" if fmt.bits == 4 else "e4m3", gran_a=quant.block, gran_b=fmt.block_k, **common)


def kernel_format(fmt: WeightFormat, arch: Arch | None = None) -> WeightFormat:
    """The format that weights of format ``fmt`` are to be loaded in for kernels to run them: itself wherever it can be.

    Args:
      fmt: what the weights are in.
      arch: None takes the device's, or the named target's. A device without kernels takes every format as it is.
    """
    try:
        arch = target.current() if arch is None else arch
    except BackendUnavailable:
        return fmt
    formats = _FORMATS[arch.family]
    return fmt if fmt.name in formats else FORMATS[formats[1]]


def check_operands(rows: Array | QuantizedRows, weight: GroupedWeight) -> None:
    """Refuses operands that agree with each other but that no kernel takes.

    Raises:
      BackendUnavailable: unquantised rows that are not bf16 × bf16.
    """
    if isinstance(rows, QuantizedRows):
        return
    if weight.format.quantized:
        raise BackendUnavailable(
            f"unquantised rows with {weight.format.name} weights have no kernel; quantise the rows, or use "
            "backend='reference'"
        )
    for what, array in (("rows", rows), ("weights", weight.values)):
        if array.dtype != jnp.bfloat16:
            raise BackendUnavailable(
                f"DeepGEMM takes bfloat16 {what}, not {array.dtype}; cast them, or use backend='reference'"
            )


def mk_alignment(arch: Arch | None = None, expected_m: int = 0, theoretical: bool = False) -> int:
    """Rows that experts start at multiples of (psum, contiguous), and that a masked capacity is a multiple of.

    Args:
      arch: None takes the device's, or the named target's (:func:`jaxmoe.cuda.target.target`).
      expected_m: real rows per expert, 0 if unknown; for ``theoretical``.
      theoretical: the alignment that should waste the fewest rows, which nothing applies by itself: pass it as
        ``alignment`` to ``group_tokens``, or as ``Execution.row_alignment``. Above 128 it is for psum and contiguous.

    Returns:
      128; or the theoretical one: 128 on Hopper, 32 to 224 on Blackwell.

    Raises:
      BackendUnavailable: ``arch`` is None and there is no GPU with kernels.
    """
    arch = target.current() if arch is None else arch
    return theoretical_mk_alignment(GEMM_ARCH[arch.family], expected_m) if theoretical else ALIGNMENT


def _product(call: GemmCall, rows: Array, weight: Array, group: Array) -> Array:
    (y,) = call_kernel(call, (rows, weight, group))
    return y


_bf16 = jax.custom_vjp(_product, nondiff_argnums=(0,))


def _bf16_fwd(call: GemmCall, rows: Array, weight: Array, group: Array) -> tuple[Array, Any]:
    y = _bf16(call, rows, weight, group)
    for gradient, operands in gradient_gemms(call, rows, weight, y):
        gradient.plan(operands)  # refuses here, where another backend can still take the case
    return y, (rows, weight, group)


def _bf16_bwd(call: GemmCall, saved: Any, dy: Array) -> tuple[Array, Array, None]:
    rows, weight, group = saved
    assert call.layout != "dense" and call.layout != "k_grouped"
    grouping, e = GroupedRows(dy, group, call.layout, call.alignment), weight.shape[0]
    # Rows of no expert hold anything, in dy as well: they are gone before a sum or a tile can see them.
    dy = _without_padding(grouping, e)
    (d_rows,) = call_kernel(input_gradient(call), (dy, weight, group))
    # The forward pass, which read the rows, lies behind dy: what is done to them now can be done in place.
    rows, _ = lax.optimization_barrier((rows, dy))
    rows = grouping.with_rows(_without_padding(grouping.with_rows(rows), e))
    return _without_padding(grouping.with_rows(d_rows), e), _weight_gradient(call, rows, dy, weight), None


_bf16.defvjp(_bf16_fwd, _bf16_bwd)


def _without_padding(rows: GroupedRows, num_experts: int) -> Array:
    """The rows, 0 where no expert has one."""
    a = rows.values
    if rows.layout == "psum" and a.size:
        return zero_between(target.current().name, rows.alignment)(a, rows.group)
    valid = (_labels(rows, num_experts) >= 0).reshape(*a.shape[:-1], 1)
    return jnp.where(valid, a, jnp.zeros((), a.dtype))


def _weight_gradient(call: GemmCall, rows: GroupedRows, dy: Array, weight: Array) -> Array:
    """dL/dweight; rows and dy hold 0 wherever no expert has a row."""
    x = rows.values
    if call.layout == "masked":
        by_expert = (((1,), (1,)), ((0,), (0,)))
        return lax.dot_general(dy, x, by_expert, preferred_element_type=jnp.float32).astype(weight.dtype)
    if call.layout == "contiguous" or not x.size:
        return reference.weight_gradient(rows, dy, weight)
    step = rows.alignment
    extents = lax.div(rows.group + (step - 1), step) * step - psum_starts(rows.group, step)
    (d_weight,) = call_kernel(weight_gradient(call), (dy, x, extents))
    return d_weight


def gradient_gemms(call: GemmCall, rows: Any, weight: Any, y: Any) -> list[tuple[GemmCall, tuple[Any, ...]]]:
    """Kernels of the way back and the shapes that they take: dL/drows, and dL/dweight of psum rows.

    XLA multiplies masked rows, which are a batch. Contiguous rows may hold experts in any order, which no kernel takes.
    """
    found: list[tuple[GemmCall, tuple[Any, ...]]] = [(input_gradient(call), (y, weight))]
    if call.layout == "psum" and rows.size:
        found.append((weight_gradient(call), (y, rows, jax.ShapeDtypeStruct(weight.shape[:1], jnp.int32))))
    return found


def input_gradient(call: GemmCall) -> GemmCall:
    """The GEMM dL/dy × weight, which reads the same weights the other way."""
    return dataclasses.replace(call, d="bf16", b_major="MN")


def weight_gradient(call: GemmCall) -> GemmCall:
    """The GEMM dL/dyᵀ × rows of each expert."""
    return dataclasses.replace(call, layout="k_grouped", d="bf16", b_major="MN", expected_m=0)


def _labels(rows: GroupedRows, num_experts: int) -> Array:
    """Expert of each row of the flattened buffer, int32 [M], -1 for none."""
    if rows.layout == "psum":
        return psum_experts(rows.group, rows.alignment, rows.values.shape[0])
    return reference.row_labels(rows, num_experts)


def _add_bias(grouping: tuple[Layout, int], y: Array, bias: Array, group: Array) -> Array:
    labels = _labels(GroupedRows(y, group, *grouping), bias.shape[0]).reshape(y.shape[:-1])
    return (y.astype(jnp.float32) + bias[jnp.maximum(labels, 0)]).astype(y.dtype)


_biased = jax.custom_vjp(_add_bias, nondiff_argnums=(0,))


def _biased_fwd(grouping: tuple[Layout, int], y: Array, bias: Array, group: Array) -> tuple[Array, Any]:
    return _biased(grouping, y, bias, group), (bias, group)


def _biased_bwd(grouping: tuple[Layout, int], saved: Any, dy: Array) -> tuple[Array, Array, None]:
    bias, group = saved
    labels = _labels(GroupedRows(dy, group, *grouping), bias.shape[0])
    flat = jnp.where(labels[:, None] >= 0, dy.reshape(-1, dy.shape[-1]), jnp.zeros((), dy.dtype))
    owns = jnp.arange(bias.shape[0])[:, None] == labels
    return dy, jnp.matmul(owns.astype(dy.dtype), flat, preferred_element_type=jnp.float32), None


_biased.defvjp(_biased_fwd, _biased_bwd)
