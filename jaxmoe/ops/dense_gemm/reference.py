"""Dense GEMMs in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.ops.grouped_gemm import reference as grouped
from jaxmoe.ops.manual_axes import vary_together
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows

Array = jax.Array


def dense_gemm(x: Array | QuantizedRows, weight: GroupedWeight, *, out_dtype: Any, **kernel_options: Any) -> Array:
    """See :func:`jaxmoe.ops.dense_gemm.dense_gemm`: a grouped GEMM with one group."""
    del kernel_options
    rows = x.values.shape[0] if isinstance(x, QuantizedRows) else x.shape[0]
    grouped_rows, weight = vary_together(GroupedRows(x, jnp.full(1, rows, jnp.int32), "psum", 1), weight)
    return grouped.grouped_gemm(grouped_rows, weight, bias=None, out_dtype=out_dtype)


def prenorm_gemm(x: Array, weight: Array) -> tuple[Array, Array]:
    """See :func:`jaxmoe.ops.dense_gemm.prenorm_gemm`."""
    x = x.astype(jnp.float32)
    product = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return product, jnp.sum(x * x, axis=1)
