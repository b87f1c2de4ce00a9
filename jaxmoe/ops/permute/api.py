"""Moving rows into expert order and back: checks, the backend, and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.errors import ShapeError
from jaxmoe.ops import backend as _backend
from jaxmoe.ops.backend import Backend
from jaxmoe.ops.manual_axes import vary_together
from jaxmoe.ops.permute import cuda, pallas, reference
from jaxmoe.ops.permute.grouping import Grouping, inverse_slots
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.tensors import QuantizedRows

Array = jax.Array

COPY: dict[str, Callable[..., Array]] = {"pallas": pallas.copy_rows, "reference": reference.copy_rows}
"""Implementations by name: ``f(x, slots, source)``."""

COPY_QUANTIZED: dict[str, Callable[..., QuantizedRows]] = {
    "cuda": cuda.copy_quantized,
    "pallas": pallas.copy_quantized,
    "reference": reference.copy_quantized,
}
"""Implementations by name: ``f(x, slots, source, row_shape)``. ``cuda``, one launch, is faster than ``pallas`` with
scales by XLA: 145 µs for 8192 tokens of 8 choices, where ``pallas`` takes 139 for the values alone."""

SUM: dict[str, Callable[..., Array]] = {"pallas": pallas.sum_rows, "reference": reference.sum_rows}
"""Implementations by name: ``f(rows, slots, weights, add, *, scale, out_dtype)``."""


def permute(x: Array | QuantizedRows, grouping: Grouping, *, backend: Backend = "auto") -> GroupedRows:
    """Copies token rows into the grouped buffer.

    A row is quantised by itself, so ``permute(quantize(x))`` has the bits of ``quantize(permute(x))`` and quantises
    N rows instead of N·K. With :func:`group_tokens` this is what other systems call ``ep_scatter`` (row labels:
    contiguous), ``ep_scatter_from_psum`` (psum), masked preprocess (masked), and ``moe_permute``.

    Args:
      x: [N, W], any dtype, or quantised rows with their scales in either layout. Tokens without a choice are not read.
      grouping: from :func:`group_tokens`.
      backend: see design: ``"auto"``, a name, or names in order.

    Returns:
      Rows [M, W] or [E, C, W]. Padding rows of floats hold anything (0 from the reference) and have scales 1; those
      of integers are 0. The gradient of a token sums over its rows in f32, in order of k; there is none through
      quantised rows.

    Raises:
      ShapeError: x does not hold the tokens that were grouped.
      NotImplementedError: the named backend cannot do this case.
    """
    values = x.values if isinstance(x, QuantizedRows) else x
    if values.ndim != 2 or values.shape[0] != grouping.slots.shape[0]:
        raise ShapeError(f"x {list(values.shape)} does not hold the {grouping.slots.shape[0]} tokens that were grouped")
    x, slots, source = vary_together(x, grouping.slots, grouping.source)
    if isinstance(x, QuantizedRows):
        rows = _backend.run("permute", COPY_QUANTIZED, backend, x, slots, source, grouping.row_shape)
    else:
        rows = jnp.reshape(_permute(x, slots, source, backend), (*grouping.row_shape, values.shape[1]))
    return GroupedRows(rows, grouping.group, grouping.layout, grouping.alignment)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _permute(x: Array, slots: Array, source: Array, backend: Backend) -> Array:
    return _backend.run("permute", COPY, backend, x, slots, source)


def _permute_fwd(x: Array, slots: Array, source: Array, backend: Backend) -> tuple[Array, Array]:
    return _permute(x, slots, source, backend), slots


def _permute_bwd(backend: Backend, slots: Array, d_rows: Array) -> tuple[Any, ...]:
    return _sum(backend, d_rows, _once(slots), None, None, out_dtype=d_rows.dtype), None, None


def _once(slots: Array) -> Array:
    """Slots with each row named once: a later choice that shares a row becomes -1."""
    first = jnp.argmax(slots[:, :, None] == slots[:, None, :], axis=-1)
    return jnp.where(first < jnp.arange(slots.shape[1]), -1, slots)


_permute.defvjp(_permute_fwd, _permute_bwd)


def unpermute(
    rows: Array,
    slots: Array,
    weights: Array,
    *,
    scale: float = 1.0,
    add: Array | None = None,
    out_dtype: Any = None,
    backend: Backend = "auto",
) -> Array:
    """Brings rows back: ``y[t] = scale · Σ_k weights[t, k] · rows[slots[t, k]] + add[t]`` over slots that are not -1.

    Other systems call it ``ep_gather``, ``post_reorder`` (``scale`` is their ``routed_scaling_factor``) and
    ``moe_unpermute``.

    Args:
      rows: [M, W] or [E, C, W], any float dtype. Rows no slot names are never read.
      slots: int32 [N, K].
      weights: f32 [N, K]; entries at -1 are not read and get gradient 0.
      scale: factor of the whole sum.
      add: [N, W], any float dtype, what a shared expert made of the tokens.
      out_dtype: default the rows' dtype.
      backend: see design: ``"auto"``, a name, or names in order.

    Returns:
      [N, W]: computed in f32, summed in order of k, rounded once. ``auto`` takes one backend for every N, so that a
      token's bits do not depend on how many there are.

    Raises:
      ShapeError: shapes do not fit.
      NotImplementedError: the named backend cannot do this case.
    """
    if slots.shape != weights.shape or slots.ndim != 2:
        raise ShapeError(f"slots {list(slots.shape)} and weights {list(weights.shape)} must both be [N, K]")
    if add is not None and add.shape != (slots.shape[0], rows.shape[-1]):
        raise ShapeError(f"add {list(add.shape)} must be [{slots.shape[0]}, {rows.shape[-1]}], as what is returned")
    flat = rows.reshape(-1, rows.shape[-1]) if rows.size else jnp.zeros((0, rows.shape[-1]), rows.dtype)
    like = jnp.zeros((), rows.dtype if out_dtype is None else out_dtype)
    flat, slots, weights, add = vary_together(flat, slots, weights.astype(jnp.float32), add)
    return _unpermute(flat, slots, weights, add, like, float(scale), backend)


def _sum(backend: Backend, *args: Array | None, scale: float = 1.0, out_dtype: Any) -> Array:
    return _backend.run("unpermute", SUM, backend, *args, scale=scale, out_dtype=out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _unpermute(
    rows: Array, slots: Array, weights: Array, add: Array | None, like: Array, scale: float, backend: Backend
) -> Array:
    return _sum(backend, rows, slots, weights, add, scale=scale, out_dtype=like.dtype)


def _unpermute_fwd(
    rows: Array, slots: Array, weights: Array, add: Array | None, like: Array, scale: float, backend: Backend
) -> tuple[Array, Any]:
    none = None if add is None else jnp.zeros((), add.dtype)
    return _unpermute(rows, slots, weights, add, like, scale, backend), (rows, slots, weights, none)


def _unpermute_bwd(scale: float, backend: Backend, saved: Any, dy: Array) -> tuple[Any, ...]:
    rows, slots, weights, add = saved
    source = inverse_slots(slots, rows.shape[0])
    mine = reference.take(slots, source) == jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    weight = jnp.sum(jnp.where(mine, reference.take(weights, source), 0), axis=1)
    d_rows = _sum(backend, dy, source[:, None], weight[:, None], None, scale=scale, out_dtype=rows.dtype)
    wide = dy.astype(jnp.float32) * jnp.float32(scale)
    dots = [jnp.sum(reference.take(rows, s).astype(jnp.float32) * wide, axis=-1) for s in slots.T]
    d_weights = jnp.where(slots >= 0, jnp.stack(dots, 1), 0)
    return d_rows, None, d_weights, None if add is None else dy.astype(add.dtype), None


_unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)
