"""Dense GEMMs on DeepGEMM's kernels."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.cuda import target
from jaxmoe.cuda.deepgemm import Prenorm, plan_prenorm
from jaxmoe.cuda.deepgemm.call import GEMM_ARCH, GemmCall, call_gemm
from jaxmoe.cuda.kernel import run_kernel
from jaxmoe.errors import BackendUnavailable
from jaxmoe.ops.grouped_gemm.deepgemm import gemm_call
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows

Array = jax.Array


def dense_gemm(
    x: Array | QuantizedRows, weight: GroupedWeight, *, out_dtype: Any, num_sms: int | None, pdl: bool
) -> Array:
    """See :func:`jaxmoe.ops.dense_gemm.dense_gemm`."""
    arch = target.current()
    dtypes = {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float32): "f32"}
    if out_dtype not in dtypes:
        raise BackendUnavailable(f"DeepGEMM gives bfloat16 or float32, not {out_dtype}")
    call = gemm_call(weight.format, "dense", arch, num_sms=num_sms, pdl=pdl, d=dtypes[out_dtype])
    if isinstance(x, QuantizedRows):
        if call.d == "f32" and arch.family == "sm90":
            raise BackendUnavailable(f"{arch.name}: dense fp8 kernels give bfloat16 only; ask for bfloat16")
        assert weight.scales is not None
        return call_gemm(call, (x.values, x.scales, weight.values[0], weight.scales[0]))
    if weight.format.quantized:
        raise BackendUnavailable(f"unquantised rows with {weight.format.name} weights have no kernel; quantise the rows")
    if x.dtype != jnp.bfloat16 or weight.values.dtype != jnp.bfloat16:
        raise BackendUnavailable(f"DeepGEMM takes bfloat16 operands, got {x.dtype} and {weight.values.dtype}; cast them")
    return _bf16(call, x, weight.values[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bf16(call: GemmCall, x: Array, weight: Array) -> Array:
    return call_gemm(call, (x, weight))


def _bf16_fwd(call: GemmCall, x: Array, weight: Array) -> tuple[Array, Any]:
    return _bf16(call, x, weight), (x, weight)


def _bf16_bwd(call: GemmCall, saved: Any, dy: Array) -> tuple[Array, Array]:
    x, weight = saved
    dy = dy.astype(jnp.bfloat16)
    dx = call_gemm(dataclasses.replace(call, d="bf16", b_major="MN"), (dy, weight))
    dw = lax.dot_general(dy, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return dx, dw.astype(weight.dtype)


_bf16.defvjp(_bf16_fwd, _bf16_bwd)


def prenorm_gemm(x: Array, weight: Array) -> tuple[Array, Array]:
    """See :func:`jaxmoe.ops.dense_gemm.prenorm_gemm`; the reported race of the SM90 kernel keeps it off Hopper."""
    arch = target.current()
    (m, k), n = x.shape, weight.shape[0]
    planned = plan_prenorm(Prenorm(arch=GEMM_ARCH[arch.family], m=m, n=n, k=k))
    if planned is None:
        return jnp.zeros((0, n), jnp.float32), jnp.zeros(0, jnp.float32)
    results = [jax.ShapeDtypeStruct((m, n), jnp.float32), jax.ShapeDtypeStruct((m,), jnp.float32)]
    product, squares = run_kernel(planned, (x, weight), results)
    return product, squares
