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

from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows

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
        up = lax.div(group + (rows.alignment - 1), rows.alignment) * rows.alignment
        lo = jnp.concatenate([jnp.zeros(1, jnp.int32), up[:-1]])
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

    return _over_experts(seg, expert, jnp.zeros((seg.labels.shape[0], width), out_dtype))[:num_rows]


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """f32 product of two matrices over axes ``contract``: exact products, f32 sums."""
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _plain(x: Array, w: Array, bias: Array | None, seg: _Segments, out_like: Array) -> Array:
    """Unquantised rows [M, K] with unquantised matrices [E, N, K]."""

    def product(tile: tuple[Array, ...], expert: tuple[Array, Array | None]) -> Array:
        y = _dot(tile[0], expert[0], (1, 1))
        return y if expert[1] is None else y + expert[1]

    return _multiply(seg, (x,), lambda e: (w[e], None if bias is None else bias[e]), product, w.shape[1], out_like.dtype)


def _plain_fwd(x: Array, w: Array, bias: Array | None, seg: _Segments, out_like: Array) -> tuple[Array, Any]:
    return _plain(x, w, bias, seg, out_like), (x, w, bias, seg)


def _plain_bwd(saved: Any, dy: Array) -> tuple[Any, ...]:
    x, w, bias, seg = saved
    dx = _multiply(seg, (dy,), lambda e: w[e], lambda tile, we: _dot(tile[0], we, (1, 0)), x.shape[1], x.dtype)
    dw, dbias = _weight_gradient(seg, x, dy, w, bias)
    return dx, dw, dbias, None, None


def _weight_gradient(seg: _Segments, x: Array, dy: Array, w: Array, bias: Array | None) -> tuple[Array, Array | None]:
    """dL/dw [E, N, K] and dL/dbias [E, N]: f32 sums over each expert's rows, written once; 0 for an empty expert."""
    n, k = w.shape[1:]
    seg = dataclasses.replace(seg, labels=_at_least_a_block(seg.labels, -1))
    x, dy = _at_least_a_block(x), _at_least_a_block(dy)

    def expert(e: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        def block(start: Array, mask: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            dyb, xb = _rows_at(dy, start, mask), _rows_at(x, start, mask)
            return sums[0] + _dot(dyb, xb, (0, 0)), sums[1] + jnp.sum(dyb, 0, dtype=jnp.float32)

        zero = jnp.zeros((n, k), jnp.float32), jnp.zeros(n, jnp.float32)
        dwe, dbe = _over_rows(seg, e, block, zero)
        return grads[0].at[e].set(dwe.astype(w.dtype)), grads[1].at[e].set(dbe)

    dw, db = _over_experts(seg, expert, (jnp.zeros(w.shape, w.dtype), jnp.zeros((w.shape[0], n), jnp.float32)))
    return dw, None if bias is None else db.astype(bias.dtype)


_plain.defvjp(_plain_fwd, _plain_bwd)


def grouped_gemm(rows: GroupedRows, weight: GroupedWeight, *, bias: Array | None, out_dtype: Any) -> Array:
    """See :func:`jaxmoe.ops.grouped_gemm.grouped_gemm`. Rows of no expert come out as 0."""
    shape = (*rows.values.shape[:-1], weight.n)
    if not rows.values.size:
        return jnp.zeros(shape, out_dtype)
    seg = _segments(rows, weight.num_experts)
    if isinstance(rows.rows, QuantizedRows):
        raise NotImplementedError("the reference grouped GEMM has no quantised rows yet")
    if weight.format.quantized:
        raise NotImplementedError("the reference grouped GEMM has no quantised weights yet")
    x = rows.rows.reshape(-1, rows.rows.shape[-1])
    return _plain(x, weight.values, bias, seg, jnp.zeros((), out_dtype)).reshape(shape)
