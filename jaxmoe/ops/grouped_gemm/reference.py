"""The grouped GEMM in plain JAX: the oracle for every kernel, and what runs where there is none.

One loop over the experts that have rows, inside it one over blocks of that expert's rows. Both trip counts are
known on the device only, so time follows the routed rows and temporary memory holds one expert at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.ops.grouped_gemm.constants import undifferentiable
from jaxmoe.ops.manual_axes import vary_together
from jaxmoe.ops.quantize import row_scales
from jaxmoe.ops.rows import GroupedRows, psum_starts
from jaxmoe.quant.codecs import e8m0_to_float
from jaxmoe.quant.scale_layout import unpack_ue8m0
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows
from jaxmoe.quant.weights import decode_values, dequantize_expert

Array = jax.Array

# Rows of one inner product. Always the same, so that the bits of a row do not depend on how many rows there are.
_BLOCK = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Segments:
    """Where each expert's rows are: row m belongs to ``labels[m]`` (-1: none) and lies in ``lo[e]:hi[e]``."""

    labels: Array
    lo: Array
    hi: Array


def row_labels(rows: GroupedRows, num_experts: int) -> Array:
    """Expert of each row of the flattened buffer, int32 [M], -1 for rows that belong to none."""
    return _segments(rows, num_experts).labels


def _segments(rows: GroupedRows, num_experts: int) -> _Segments:
    group, shape = rows.group, rows.values.shape
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    if rows.layout == "masked":
        capacity = shape[1]
        lo = experts * capacity
        counts = jnp.clip(group, 0, capacity)
        labels = jnp.where(jnp.arange(capacity) < counts[:, None], experts[:, None], -1).reshape(-1)
        return _Segments(labels, lo, lo + counts)
    num_rows = shape[0]
    index = jnp.arange(num_rows, dtype=jnp.int32)
    if rows.layout == "psum":
        lo = psum_starts(group, rows.alignment)
        owner = jnp.searchsorted(group, index, side="right", method="sort").astype(jnp.int32)
        inside = (owner < num_experts) & (index >= lo[jnp.minimum(owner, num_experts - 1)])
        return _Segments(jnp.where(inside, owner, -1), lo, jnp.minimum(group, num_rows))
    first = jnp.repeat(group[:: rows.alignment], rows.alignment, total_repeat_length=num_rows)
    labels = jnp.where((group >= 0) & (first < num_experts), first, -1)
    slot = jnp.where(labels >= 0, labels, num_experts)
    lo = jnp.full(num_experts, num_rows, jnp.int32).at[slot].min(index, mode="drop")
    hi = jnp.zeros(num_experts, jnp.int32).at[slot].max(index + 1, mode="drop")
    return _Segments(labels, lo, hi)


def _over_experts(seg: _Segments, body: Callable[[Array, Any], Any], carry: Any) -> Any:
    """``carry = body(e, carry)`` for every expert that has rows, in order of expert."""
    order = jnp.argsort(seg.hi <= seg.lo, stable=True)
    used = jnp.sum(seg.hi > seg.lo, dtype=jnp.int32)
    return lax.fori_loop(0, used, lambda i, c: body(order[i], c), carry)


def _over_rows(seg: _Segments, e: Array, body: Callable[[Array, Array, Any], Any], carry: Any) -> Any:
    """``carry = body(start, mask, carry)`` for blocks of ``_BLOCK`` rows that hold every row of expert e once."""
    last = seg.labels.shape[0] - _BLOCK
    lo, hi = seg.lo[e], seg.hi[e]

    def block(j: Array, carry: Any) -> Any:
        wanted = lo + j * _BLOCK
        start = jnp.minimum(wanted, last)
        mine = _rows_at(seg.labels, start) == e
        return body(start, mine & (start + jnp.arange(_BLOCK, dtype=jnp.int32) >= wanted), carry)

    return lax.fori_loop(0, lax.div(hi - lo + (_BLOCK - 1), _BLOCK), block, carry)


def _rows_at(a: Array, start: Array, mask: Array | None = None) -> Array:
    tile = lax.dynamic_slice_in_dim(a, start, _BLOCK)
    return tile if mask is None else jnp.where(mask[:, None], tile, jnp.zeros((), a.dtype))


def _at_least_a_block(a: Array, fill: int = 0) -> Array:
    missing = max(_BLOCK - a.shape[0], 0)
    return jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1), constant_values=fill) if missing else a


def _multiply(
    seg: _Segments,
    operands: tuple[Array, ...],
    prepare: Callable[[Array], Any],
    product: Callable[[tuple[Array, ...], Any], Array],
    width: int,
    out_dtype: Any,
) -> Array:
    """[M, width]: ``product(rows, prepare(e))`` in f32, rounded once, for the rows of each expert; 0 elsewhere."""
    num_rows = seg.labels.shape[0]
    seg = dataclasses.replace(seg, labels=_at_least_a_block(seg.labels, -1))
    operands = tuple(_at_least_a_block(a) for a in operands)

    def expert(e: Array, out: Array) -> Array:
        prepared = prepare(e)

        def block(start: Array, mask: Array, out: Array) -> Array:
            y = product(tuple(_rows_at(a, start, mask) for a in operands), prepared).astype(out_dtype)
            return lax.dynamic_update_slice_in_dim(out, jnp.where(mask[:, None], y, _rows_at(out, start)), start, 0)

        return _over_rows(seg, e, block, out)

    out, _ = vary_together(jnp.zeros((seg.labels.shape[0], width), out_dtype), seg)
    return _over_experts(seg, expert, out)[:num_rows]


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """f32 product of two matrices over axes ``contract``: exact products, f32 sums."""
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _expert_matrix(w: GroupedWeight, e: Array, dtype: Any) -> Array:
    """One expert's [N, K], dequantised to ``dtype`` where it is quantised."""
    return dequantize_expert(w, e)[:, : w.k].astype(dtype) if w.format.quantized else w.values[e]


def _expert_codes(w: GroupedWeight, e: Array) -> tuple[Array, Array]:
    """One expert's codes [N, Kp] and scales [N, Kp/block], f32."""
    fmt, values = w.format, w.values[e]
    assert w.scales is not None
    if fmt.scale == "float32":
        scales = jnp.repeat(w.scales[e], fmt.block_n, axis=0)[: w.n]
    else:
        scales = e8m0_to_float(unpack_ue8m0(w.scales[e], w.n, w.k_padded // fmt.block_k))
    return decode_values(values, fmt), scales


@jax.custom_vjp
def _float_rows(x: Array, w: GroupedWeight, bias: Array | None, seg: _Segments, like: Array) -> Array:
    """Unquantised rows [M, K], result in the dtype of ``like``."""

    def prepare(e: Array) -> tuple[Array, Array | None]:
        return _expert_matrix(w, e, x.dtype), None if bias is None else bias[e]

    def product(tile: tuple[Array, ...], expert: tuple[Array, Array | None]) -> Array:
        return _biased(_dot(tile[0], expert[0], (1, 1)), expert[1])

    return _multiply(seg, (x,), prepare, product, w.n, like.dtype)


def _biased(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + bias


def _float_rows_fwd(
    x: Array, w: GroupedWeight, bias: Array | None, seg: _Segments, like: Array
) -> tuple[Array, tuple[Any, ...]]:
    return _float_rows(x, w, bias, seg, like), (x, w, bias, seg)


def _float_rows_bwd(saved: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    x, w, bias, seg = saved
    dx = _multiply(
        seg, (dy,), lambda e: _expert_matrix(w, e, dy.dtype), lambda g, we: _dot(g[0], we, (1, 0)), w.k, x.dtype
    )
    dw, db = _weight_gradient(seg, None if w.format.quantized else x, dy, w.num_experts, w.values.dtype)
    d_weight = None if dw is None else dataclasses.replace(w, values=dw)
    return dx, d_weight, None if bias is None else db, None, None


_float_rows.defvjp(_float_rows_fwd, _float_rows_bwd)


def weight_gradient(rows: GroupedRows, dy: Array, weight: Array) -> Array:
    """dL/dweight [E, N, K] of unquantised rows: f32 sums over each expert's rows, rounded once; 0 for no rows.

    Args:
      rows: what was multiplied; rows of no expert may hold anything.
      dy: dL/dy, [M, N] or [E, C, N].
      weight: [E, N, K], for its shape and dtype.
    """
    if not rows.values.size:
        return jnp.zeros_like(weight)
    x, dy = (a.reshape(-1, a.shape[-1]) for a in (rows.values, dy))
    dw, _ = _weight_gradient(_segments(rows, weight.shape[0]), x, dy, weight.shape[0], weight.dtype)
    assert dw is not None
    return dw


def _weight_gradient(
    seg: _Segments, x: Array | None, dy: Array, num_experts: int, dtype: Any
) -> tuple[Array | None, Array]:
    """dL/dweight [E, N, K] (None without x) and dL/dbias [E, N]."""
    seg = dataclasses.replace(seg, labels=_at_least_a_block(seg.labels, -1))
    dy = _at_least_a_block(dy)
    x = None if x is None else _at_least_a_block(x)
    n = dy.shape[1]
    bias = jnp.zeros(n, jnp.float32)
    weight = None if x is None else jnp.zeros((n, x.shape[1]), jnp.float32)
    dw = None if x is None else jnp.zeros((num_experts, n, x.shape[1]), dtype)
    weight, bias, dw, db, _ = vary_together(weight, bias, dw, jnp.zeros((num_experts, n), jnp.float32), seg)

    def expert(e: Array, grads: Any) -> Any:
        def block(start: Array, mask: Array, sums: Any) -> Any:
            tile = _rows_at(dy, start, mask)
            dw = None if x is None else sums[0] + _dot(tile, _rows_at(x, start, mask), (0, 0))
            return dw, sums[1] + jnp.sum(tile, 0, dtype=jnp.float32)

        sums = _over_rows(seg, e, block, (weight, bias))
        return jax.tree.map(lambda grad, total: grad.at[e].set(total.astype(grad.dtype)), grads, sums)

    return _over_experts(seg, expert, (dw, db))


def _quantized_rows(rows: QuantizedRows, w: GroupedWeight, bias: Array | None, seg: _Segments, out_dtype: Any) -> Array:
    """Codes meet codes: an f32 partial sum per scale group, times both scales, added in order of k."""
    kp, block_k = w.k_padded, w.format.block_k
    size = min(block_k, rows.quant.block)
    groups = kp // size

    def by_group(codes: Array, scales: Array) -> tuple[Array, Array]:
        """[G, rows, size] codes and [G, rows] scales."""
        scales = jnp.repeat(scales, groups // scales.shape[1], axis=1)
        return codes.astype(jnp.float32).reshape(-1, groups, size).swapaxes(0, 1), scales.T

    def prepare(e: Array) -> tuple[tuple[Array, Array], Array | None]:
        codes, scales = _expert_codes(w, e)
        return by_group(codes, scales), None if bias is None else bias[e]

    def product(tile: tuple[Array, ...], expert: tuple[tuple[Array, Array], Array | None]) -> Array:
        def add(total: Array, group: tuple[tuple[Array, Array], tuple[Array, Array]]) -> tuple[Array, None]:
            (a, scale_a), (b, scale_b) = group
            return total + _dot(a, b, (1, 1)) * (scale_a[:, None] * scale_b[None, :]), None

        total, _ = vary_together(jnp.zeros((_BLOCK, w.n), jnp.float32), seg)
        total, _ = lax.scan(add, total, (by_group(*tile), expert[0]))
        return _biased(total, expert[1])

    codes = rows.values.reshape(-1, kp)
    scales = row_scales(rows).reshape(codes.shape[0], -1)
    return _multiply(seg, (codes, scales), prepare, product, w.n, out_dtype)


def grouped_gemm(
    rows: GroupedRows, weight: GroupedWeight, *, bias: Array | None, out_dtype: Any, **hints: Any
) -> Array:
    """See :func:`jaxmoe.ops.grouped_gemm.grouped_gemm`. Rows of no expert come out as 0; hints mean nothing here."""
    del hints
    shape = (*rows.values.shape[:-1], weight.n)
    if not rows.values.size:
        return jnp.zeros(shape, out_dtype)
    seg = _segments(rows, weight.num_experts)
    if weight.format.quantized:
        weight = undifferentiable(weight)
    if isinstance(rows.rows, QuantizedRows):
        return _quantized_rows(undifferentiable(rows.rows), weight, bias, seg, out_dtype).reshape(shape)
    x = rows.rows.reshape(-1, rows.rows.shape[-1])[:, : weight.k]
    return _float_rows(x, weight, bias, seg, jnp.zeros((), out_dtype)).reshape(shape)
