"""Dense GEMMs on DeepGEMM's kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.cuda import target
from jaxmoe.cuda.deepgemm.call import GemmCall, PrenormCall, call_kernel
from jaxmoe.cuda.deepgemm.gemm import Dtype
from jaxmoe.ops.dense_gemm import reference
from jaxmoe.ops.grouped_gemm.constants import undifferentiable
from jaxmoe.ops.grouped_gemm.deepgemm import check_operands, gemm_call, input_gradient
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows

Array = jax.Array


def dense_gemm(
    x: Array | QuantizedRows, weight: GroupedWeight, *, out_dtype: Any, num_sms: int | None, pdl: bool
) -> Array:
    """See :func:`jaxmoe.ops.dense_gemm.dense_gemm`.

    bf16 is differentiable. The gradient of float32 output is rounded to bf16 for the gradient of x.
    """
    arch = target.current()
    d: Dtype = "f32" if out_dtype == jnp.float32 else "bf16"
    call = gemm_call(weight.format, "dense", arch, num_sms=num_sms, pdl=pdl, d=d)
    check_operands(x, weight)
    if not isinstance(x, QuantizedRows):
        return _bf16(call, x, weight.values[0])
    x, weight = undifferentiable(x), undifferentiable(weight)
    assert weight.scales is not None
    (y,) = call_kernel(call, (x.values, x.scales, weight.values[0], weight.scales[0]))
    return y


def _product(call: GemmCall, x: Array, weight: Array) -> Array:
    (y,) = call_kernel(call, (x, weight))
    return y


_bf16 = jax.custom_vjp(_product, nondiff_argnums=(0,))


def _bf16_fwd(call: GemmCall, x: Array, weight: Array) -> tuple[Array, Any]:
    y = _bf16(call, x, weight)
    input_gradient(call).plan((y, weight))  # refuses here, where another backend can still take the case
    return y, (x, weight)


def _bf16_bwd(call: GemmCall, saved: Any, dy: Array) -> tuple[Array, Array]:
    x, weight = saved
    (dx,) = call_kernel(input_gradient(call), (dy.astype(jnp.bfloat16), weight))
    contract_rows = (((0,), (0,)), ((), ()))
    dw = lax.dot_general(dy, x.astype(dy.dtype), contract_rows, lax.Precision.HIGHEST, jnp.float32)
    return dx, dw.astype(weight.dtype)


_bf16.defvjp(_bf16_fwd, _bf16_bwd)


def prenorm_gemm(x: Array, weight: Array) -> tuple[Array, Array]:
    """See :func:`jaxmoe.ops.dense_gemm.prenorm_gemm`; the reported race of the SM90 kernel keeps it off Hopper."""
    return _prenorm(PrenormCall(arch=target.current()), x, weight)


def _product_and_squares(call: PrenormCall, x: Array, weight: Array) -> tuple[Array, Array]:
    product, squares = call_kernel(call, (x, weight))
    return product, squares


_prenorm = jax.custom_vjp(_product_and_squares, nondiff_argnums=(0,))


def _prenorm_fwd(call: PrenormCall, x: Array, weight: Array) -> tuple[tuple[Array, Array], Any]:
    return _prenorm(call, x, weight), (x, weight)


def _prenorm_bwd(call: PrenormCall, saved: Any, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
    return jax.vjp(reference.prenorm_gemm, *saved)[1](gradients)


_prenorm.defvjp(_prenorm_fwd, _prenorm_bwd)
