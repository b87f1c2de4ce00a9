"""Dense GEMMs: checks, then the backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.ops.backend import run_or_reference
from jaxmoe.ops.debug import check_scales, debugging
from jaxmoe.ops.dense_gemm import reference
from jaxmoe.ops.manual_axes import vary_together
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows

Array = jax.Array


def _deepgemm(name: str) -> Callable[..., Any]:
    """The kernel backend's function, imported at its first use."""

    def run(*args: Any, **options: Any) -> Any:
        from jaxmoe.ops.dense_gemm import deepgemm

        return getattr(deepgemm, name)(*args, **options)

    return run


BACKENDS: dict[str, Callable[..., Array]] = {
    "deepgemm": _deepgemm("dense_gemm"),
    "reference": reference.dense_gemm,
}
PRENORM_BACKENDS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "deepgemm": _deepgemm("prenorm_gemm"),
    "reference": reference.prenorm_gemm,
}


def dense_gemm(
    x: Array | QuantizedRows,
    weight: GroupedWeight,
    *,
    out_dtype: Any = None,
    num_sms: int | None = None,
    pdl: bool = False,
    backend: str | tuple[str, ...] = "auto",
) -> Array:
    """``y[m, n] = Σ_k x[m, k] · weight[0, n, k]``, summed in f32 and rounded once.

    Args:
      x: [M, K], bf16 or f32; or quantised as ``weight.format.activation`` says.
      weight: one matrix, as a stack of one.
      out_dtype: bfloat16 or float32; default the rows' dtype, bfloat16 for quantised rows.
      num_sms: even number of SMs that a kernel uses at most, None for all; a hint that never changes a result.
      pdl: launch kernels with programmatic stream serialisation; a hint as well.
      backend: see :func:`jaxmoe.ops.backend.run`. On a GPU ``auto`` warns before it falls back to ``reference``.

    Returns:
      [M, N].

    Raises:
      ShapeError, FormatError: sizes or dtypes do not fit.
      NotImplementedError: the named backend cannot do this case.
    """
    quantized = isinstance(x, QuantizedRows)
    values = x.values if quantized else x
    if weight.num_experts != 1:
        raise ShapeError(f"dense_gemm takes one matrix, got a stack of {weight.num_experts}; use grouped_gemm")
    widths = sorted({weight.k_padded} if quantized else {weight.k, weight.k_padded})
    if values.ndim != 2 or values.shape[1] not in widths:
        raise ShapeError(f"x is {list(values.shape)}; it must be [M, K] with K = {' or '.join(map(str, widths))}")
    if quantized and x.quant != weight.format.activation:
        raise FormatError(
            f"rows quantised as {x.quant} do not go with {weight.format.name} weights; quantise them as "
            f"{weight.format.activation}"
        )
    if not quantized and x.dtype not in (jnp.bfloat16, jnp.float32):
        raise FormatError(f"unquantised rows are {x.dtype}; they must be bfloat16 or float32")
    if out_dtype is None:
        out_dtype = jnp.bfloat16 if quantized else values.dtype
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        raise FormatError(f"out_dtype is {jnp.dtype(out_dtype)}; it must be bfloat16 or float32")
    if quantized and x.quant.scale == "ue8m0" and debugging():
        x = dataclasses.replace(x, scales=check_scales(check_scales(x.scales, x), weight))
    x, weight = vary_together(x, weight)
    options = {"out_dtype": jnp.dtype(out_dtype), "num_sms": num_sms, "pdl": pdl}
    return run_or_reference("dense_gemm", BACKENDS, backend, x, weight, **options)


def prenorm_gemm(x: Array, weight: Array, *, backend: str | tuple[str, ...] = "auto") -> tuple[Array, Array]:
    """The product that a hyper-connection's pre-norm needs, with the squared norms of the rows from the same pass.

    Args:
      x: bf16 [M, K]. weight: f32 [N, K].
      backend: see :func:`jaxmoe.ops.backend.run`.

    Returns:
      ``x · weightᵀ``, f32 [M, N], and ``Σ_k x²``, f32 [M]. Kernels multiply in tf32.

    Raises:
      ShapeError, FormatError: sizes or dtypes do not fit.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(f"x {list(x.shape)} and weight {list(weight.shape)} must be [M, K] and [N, K]")
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.float32:
        raise FormatError(f"x is {x.dtype} and weight {weight.dtype}; they must be bfloat16 and float32")
    x, weight = vary_together(x, weight)
    return run_or_reference("prenorm_gemm", PRENORM_BACKENDS, backend, x, weight)
