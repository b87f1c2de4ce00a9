"""The grouped GEMM every expert projection goes through: checks, then the backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmoe.config import Layout
from jaxmoe.cuda import target
from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.ops.backend import run_or_reference
from jaxmoe.ops.debug import check_scales, debugging, guarded
from jaxmoe.ops.grouped_gemm import reference
from jaxmoe.ops.manual_axes import vary_together
from jaxmoe.ops.permute import group_tokens, permute, unpermute
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.formats import BF16
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows

Array = jax.Array


def _deepgemm(*args: Any, **options: Any) -> Array:
    """The kernel backend, imported at its first use."""
    from jaxmoe.ops.grouped_gemm import deepgemm

    return deepgemm.grouped_gemm(*args, **options)


BACKENDS: dict[str, Callable[..., Array]] = {"deepgemm": _deepgemm, "reference": reference.grouped_gemm}
"""Implementations by name: ``f(rows, weight, *, bias, out_dtype, **hints) -> Array``; ``auto`` tries them in order."""


def grouped_gemm(
    rows: GroupedRows,
    weight: GroupedWeight,
    *,
    bias: Array | None = None,
    out_dtype: Any = None,
    expected_m: int | None = None,
    num_sms: int | None = None,
    pdl: bool = False,
    backend: str | tuple[str, ...] = "auto",
) -> Array:
    """Multiplies each row by its expert's matrix: ``y[m, n] = Σ_k row[m, k] · weight[e(m), n, k] (+ bias[e(m), n])``.

    Quantised rows meet the weight codes as a kernel does: one f32 partial sum per scale group, times both scales,
    added up in f32 in order of k. Unquantised rows with a quantised weight use the dequantised weight (the exact
    oracle). Everything is summed in f32, the bias included, and rounded once (a kernel also rounds before the bias).

    Gradients flow to unquantised rows, to unquantised weights and to the bias: an expert without rows gets exactly 0,
    and rows of no expert contribute nothing, whatever they hold. Quantised rows and weights are not differentiable.

    Args:
      rows: [M, K] or [E, C, K], bf16 or f32, K the weight's ``k`` or ``k_padded``; or quantised, K = ``k_padded``.
        In the contiguous layout a tile takes the expert of its first row; when traced, that no tile mixes experts
        is the caller's promise, which :func:`jaxmoe.ops.debug.debug` checks.
      weight: E matrices [N, K].
      bias: f32 [E, N].
      out_dtype: default the rows' dtype, bf16 for quantised rows.
      expected_m: real rows per expert that a kernel's tiles are chosen for (psum, masked); None: as many as fit.
      num_sms: even number of SMs that a kernel uses at most, None for all.
      pdl: launch kernels with programmatic stream serialisation. These three are hints and change no result.
      backend: see :func:`jaxmoe.ops.backend.run`. On a GPU ``auto`` warns before it falls back to ``reference``.

    Returns:
      [M, N] or [E, C, N]. Rows of no expert are undefined (0 from ``reference``).

    Raises:
      ShapeError, FormatError: sizes, dtypes or (when concrete) the grouping do not fit.
      NotImplementedError: the named backend cannot do this case.
    """
    _check(rows, weight, bias)
    if out_dtype is None:
        out_dtype = jnp.bfloat16 if isinstance(rows.rows, QuantizedRows) else rows.rows.dtype
    if debugging():
        rows = _checked(rows, weight)
    rows, weight, bias = vary_together(rows, weight, bias)
    hints = {"expected_m": expected_m, "num_sms": num_sms, "pdl": pdl}
    options = {"bias": bias, "out_dtype": jnp.dtype(out_dtype), **hints}
    return run_or_reference("grouped_gemm", BACKENDS, backend, rows, weight, **options)


def _check(rows: GroupedRows, weight: GroupedWeight, bias: Array | None) -> None:
    shape, group, step = rows.values.shape, rows.group, rows.alignment
    e, masked = weight.num_experts, rows.layout == "masked"
    if len(shape) != (3 if masked else 2):
        raise ShapeError(f"{rows.layout} rows have shape {shape}; they must be {'[E, C, K]' if masked else '[M, K]'}")
    if masked and shape[0] != e:
        raise ShapeError(f"masked rows {shape} are for {shape[0]} experts, the weight has {e}")
    if shape[-2] % step:
        raise ShapeError(
            f"{shape[-2]} rows are not a multiple of the alignment {step}; pad them to {-(-shape[-2] // step) * step}"
        )
    expected = (shape[0],) if rows.layout == "contiguous" else (e,)
    if group.shape != expected or group.dtype != jnp.int32:
        raise ShapeError(
            f"the group of {rows.layout} rows is {group.dtype}{list(group.shape)}; it must be int32{list(expected)}"
        )
    if isinstance(rows.rows, QuantizedRows):
        if rows.rows.quant != weight.format.activation:
            raise FormatError(
                f"rows quantised as {rows.rows.quant} do not go with {weight.format.name} weights; quantise them as "
                f"{weight.format.activation}"
            )
        widths = {weight.k_padded}
    else:
        if rows.rows.dtype not in (jnp.bfloat16, jnp.float32):
            raise FormatError(f"unquantised rows are {rows.rows.dtype}; they must be bfloat16 or float32")
        widths = {weight.k, weight.k_padded}
    if shape[-1] not in widths:
        raise ShapeError(f"rows are {shape[-1]} wide, the weight takes K = {' or '.join(map(str, sorted(widths)))}")
    if bias is not None and (bias.shape != (e, weight.n) or bias.dtype != jnp.float32):
        raise ShapeError(f"bias is {bias.dtype}{list(bias.shape)}; it must be float32[{e}, {weight.n}]")
    if not isinstance(group, Tracer):
        _check_group(np.asarray(group), rows.layout, shape, step, e)


def _checked(rows: GroupedRows, weight: GroupedWeight) -> GroupedRows:
    """``rows``, for which the program waits until grouping and scales are found right on the device."""
    layout, shape, step, e = rows.layout, rows.values.shape, rows.alignment, weight.num_experts
    group = guarded(rows.group, lambda group: _check_group(group, layout, shape, step, e), rows.group)
    if isinstance(rows.rows, QuantizedRows):
        real = (reference.row_labels(rows, e) >= 0).reshape(shape[:-1])
        group = check_scales(check_scales(group, rows.rows, real), weight)
    return dataclasses.replace(rows, group=group)


def _check_group(group: np.ndarray, layout: Layout, shape: tuple[int, ...], step: int, e: int) -> None:
    if layout == "masked":
        if np.any((group < 0) | (group > shape[1])):
            raise ShapeError(f"masked counts {group.tolist()} do not lie in 0..C = {shape[1]}; raise the capacity")
    elif layout == "psum":
        starts = np.concatenate([[0], -(-group[:-1] // step) * step])
        if np.any(group < 0) or np.any(np.diff(group) < 0) or np.any(group > shape[0]):
            raise ShapeError(
                f"psum ends {group.tolist()} must not fall and must lie in 0..M = {shape[0]} (starts {starts.tolist()})"
            )
    else:
        tiles = group.reshape(-1, step)
        if np.any((group < -1) | (group >= e)):
            raise ShapeError(f"row labels must lie in -1..{e - 1}, got {group.min()}..{group.max()}")
        mixed = np.any((tiles != tiles[:, :1]) & (tiles != -1), axis=1)
        if mixed.any():
            t = int(mixed.argmax())
            raise ShapeError(
                f"rows {t * step}..{(t + 1) * step - 1} are one tile but have labels {np.unique(tiles[t]).tolist()}; a "
                f"tile has one expert: start every expert at a multiple of {step}, or use ragged_gemm"
            )


def row_alignment(backend: str | tuple[str, ...] = "auto") -> int:
    """Rows that experts must start at a multiple of for ``backend``: 8 where only the reference can run, else 128."""
    if backend == "auto":
        try:
            target.current()
        except NotImplementedError:
            return 8
    return 8 if backend == "reference" else 128


def ragged_gemm(
    lhs: Array,
    rhs: GroupedWeight | Array,
    group_sizes: Array,
    *,
    out_dtype: Any = None,
    backend: str | tuple[str, ...] = "auto",
    alignment: int | None = None,
) -> Array:
    """Grouped GEMM over rows that lie sorted by expert without any alignment; differentiable like :func:`grouped_gemm`.

    Args:
      lhs: [M, K], bf16 or f32; the first ``group_sizes[0]`` rows are expert 0's, and so on.
      rhs: E matrices [N, K], as :class:`GroupedWeight` or plain [E, N, K].
      group_sizes: int32 [E], any counts, 0 included, with a sum of at most M.
      out_dtype, backend: as for :func:`grouped_gemm`.
      alignment: rows that experts are padded to inside; None takes what the backend needs.

    Returns:
      [M, N]; rows past the sum of ``group_sizes`` are 0 and are never read.
    """
    weight = rhs if isinstance(rhs, GroupedWeight) else GroupedWeight(rhs, None, BF16, rhs.shape[-1])
    e = weight.num_experts
    if lhs.ndim != 2 or group_sizes.shape != (e,) or group_sizes.dtype != jnp.int32:
        raise ShapeError(
            f"lhs {list(lhs.shape)} and group_sizes {group_sizes.dtype}{list(group_sizes.shape)} must be [M, K] and "
            f"int32[{e}]"
        )
    m = lhs.shape[0]
    if not isinstance(group_sizes, Tracer):
        sizes = np.asarray(group_sizes)
        if np.any(sizes < 0) or sizes.sum() > m:
            raise ShapeError(f"group_sizes {sizes.tolist()} must be at least 0 and add up to at most M = {m}")
    step = alignment or row_alignment(backend)
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    index = jnp.arange(m, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, index, side="right", method="sort").astype(jnp.int32)
    grouping = group_tokens(owner[:, None], e, alignment=step)
    y = grouped_gemm(permute(lhs, grouping), weight, out_dtype=out_dtype, backend=backend)
    return unpermute(y, grouping.slots, jnp.ones((m, 1), jnp.float32))
