"""Cutting and joining stacks of expert matrices, always exactly: no value changes, every scale keeps its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.quant.scale_layout import NEUTRAL_BYTE, pack_ue8m0, unpack_ue8m0
from jaxmoe.quant.tensors import GroupedWeight
from jaxmoe.quant.weights import assemble, canonical_scales

Array = jax.Array


def _check_range(what: str, start: int, stop: int, size: int) -> None:
    if not 0 <= start < stop <= size:
        raise ShapeError(f"{what} {start}:{stop} are not within 0:{size}")


def slice_experts(w: GroupedWeight, start: int, stop: int) -> GroupedWeight:
    """Experts ``start`` to ``stop`` (exclusive)."""
    _check_range("experts", start, stop, w.num_experts)
    scales = None if w.scales is None else w.scales[start:stop]
    return dataclasses.replace(w, values=w.values[start:stop], scales=scales)


def slice_n(w: GroupedWeight, ranges: Sequence[tuple[int, int]], *, grid: int = 1) -> GroupedWeight:
    """Rows (outputs) of several ranges, one after the other; e.g. a rank's part of gate and of up.

    A scale of FP8Block covers 128 rows counted from row 0, so its ranges must start at multiples of 128 and all but
    the last end at one. The other formats scale each row and can be cut anywhere.

    Args:
      w: the stack.
      ranges: (start, stop) rows.
      grid: 1 cuts exactly there. With a multiple of the block, each range is widened to multiples of ``grid``, and the
        rows it was widened by are 0, also past N. This is exact where a plain cut is refused; cut the other projection
        with :func:`slice_k` and the same ``grid``.

    Raises:
      ShapeError: a range is outside of N, or cuts a block of FP8Block.
    """
    block = w.format.block_n if w.format.scale == "float32" else 1
    parts = []
    for i, (start, stop) in enumerate(ranges):
        _check_range("rows", start, stop, w.n)
        low, high = start // grid * grid, -(-stop // grid) * grid
        if low % block or (high % block and i + 1 < len(ranges)):
            raise ShapeError(
                f"rows {start}:{stop} cut a block of {w.format.name}, whose scales cover {block} rows from row 0 "
                f"of {w.n}; cut at multiples of {block}, or pass grid={block} to widen the cut with zero rows"
            )
        part = pad_n(w, max(w.n, high))
        row = jnp.arange(low, high)
        keep = ((row >= start) & (row < stop))[:, None]
        values = jnp.where(keep, part.values[:, low:high], jnp.zeros((), dtype=w.values.dtype))
        parts.append(dataclasses.replace(w, values=values, scales=_scale_rows(part, low, high)))
    return concat_n(parts)


def _scale_rows(w: GroupedWeight, start: int, stop: int) -> Array | None:
    """Stored scales of rows start to stop, which fall on blocks."""
    if w.scales is None:
        return None
    if w.format.scale == "float32":
        return w.scales[:, start // w.format.block_n : -(-stop // w.format.block_n)]
    return pack_ue8m0(_bytes(w)[:, start:stop])


def _bytes(w: GroupedWeight) -> Array:
    assert w.scales is not None
    return unpack_ue8m0(w.scales, w.n, w.k_padded // w.format.block_k)


def slice_k(w: GroupedWeight, start: int, stop: int, *, grid: int = 1) -> GroupedWeight:
    """Columns (inputs) ``start`` to ``stop`` (exclusive).

    Args:
      w: the stack.
      start, stop: columns; ``start`` must be a multiple of the format's ``block_k``, ``stop`` may be anywhere.
      grid: as in :func:`slice_n`; widened columns are 0 and count in the result's ``k``.

    Raises:
      ShapeError: outside of K, or ``start`` is inside a block.
    """
    _check_range("columns", start, stop, w.k)
    block, per = w.format.block_k, 2 if w.format.bits == 4 else 1
    low, high = start // grid * grid, -(-stop // grid) * grid
    if low % block:
        raise ShapeError(
            f"columns {start}:{stop} cut a block of {w.format.name}, whose scales cover {block} columns from "
            f"column 0 of {w.k}; start at a multiple of {block}, or pass grid={block} to widen with zero columns"
        )
    values, scales = w.values[:, :, low // per : -(-stop // per)], canonical_scales(w)
    if start > low or stop % per:
        column = jnp.arange(low, low + values.shape[2] * per)
        keep = (column >= start) & (column < stop)
        values = _blank(values, keep, per)
    values = jnp.pad(values, ((0, 0), (0, 0), (0, -(-high // per) - low // per - values.shape[2])))
    if scales is not None:
        scales = scales[:, :, low // block : -(-stop // block)]
        one = jnp.asarray(NEUTRAL_BYTE if w.format.scale == "ue8m0" else 1, dtype=scales.dtype)
        spare = -(-high // block) - low // block - scales.shape[2]
        scales = jnp.pad(scales, ((0, 0), (0, 0), (0, spare)), constant_values=one)
    return assemble(values, scales, w.format, high - low)


def _blank(values: Array, keep: Array, per: int) -> Array:
    if per == 1:
        return jnp.where(keep, values, jnp.zeros((), dtype=values.dtype))
    nibbles = keep.reshape(-1, 2)
    mask = jnp.where(nibbles[:, 0], jnp.uint8(0x0F), jnp.uint8(0)) | jnp.where(
        nibbles[:, 1], jnp.uint8(0xF0), jnp.uint8(0)
    )
    return values & mask


def pad_n(w: GroupedWeight, n: int) -> GroupedWeight:
    """Appends zero rows (scales 1) up to ``n`` rows.

    Raises:
      ShapeError: ``n`` is below N.
    """
    if n < w.n:
        raise ShapeError(f"cannot pad {w.n} rows to {n}; use slice_n to cut")
    if n == w.n:
        return w
    spare = ((0, 0), (0, n - w.n), (0, 0))
    values = jnp.pad(w.values, spare)
    if w.scales is None:
        return dataclasses.replace(w, values=values)
    if w.format.scale == "float32":
        rows = -(-n // w.format.block_n) - w.scales.shape[1]
        scales = jnp.pad(w.scales, ((0, 0), (0, rows), (0, 0)), constant_values=jnp.float32(1))
    else:
        scales = pack_ue8m0(jnp.pad(_bytes(w), spare, constant_values=jnp.uint8(NEUTRAL_BYTE)))
    return dataclasses.replace(w, values=values, scales=scales)


def pad_k(w: GroupedWeight, k: int) -> GroupedWeight:
    """Appends zero columns (scales 1) up to ``k`` columns.

    Raises:
      ShapeError: ``k`` is below K.
    """
    if k < w.k:
        raise ShapeError(f"cannot pad {w.k} columns to {k}; use slice_k to cut")
    return w if k == w.k else assemble(w.values, canonical_scales(w), w.format, k)


def _check_alike(parts: Sequence[GroupedWeight], *names: str) -> None:
    if not parts:
        raise ShapeError("no weights to join")
    for name in names:
        found = [getattr(p, name) for p in parts]
        if any(f != found[0] for f in found):
            error = FormatError if name == "format" else ShapeError
            raise error(f"cannot join weights of different {name}: {', '.join(map(repr, found))}")


def concat_n(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """Joins along N, e.g. gate and up.

    Raises:
      FormatError: formats differ. ShapeError: E or K differ, or a part of FP8Block other than the last ends inside a
        block of 128 rows (pad it with :func:`pad_n`).
    """
    _check_alike(parts, "format", "num_experts", "k")
    first = parts[0]
    if len(parts) == 1:
        return first
    values = jnp.concatenate([p.values for p in parts], axis=1)
    if first.scales is None:
        return dataclasses.replace(first, values=values)
    if first.format.scale == "ue8m0":
        return dataclasses.replace(
            first, values=values, scales=pack_ue8m0(jnp.concatenate([_bytes(p) for p in parts], 1))
        )
    for p in parts[:-1]:
        if p.n % p.format.block_n:
            raise ShapeError(
                f"cannot append rows after {p.n} rows of {p.format.name}: {p.n} is no multiple of the block "
                f"{p.format.block_n}; pad with pad_n to {-(-p.n // p.format.block_n) * p.format.block_n} first"
            )
    scales = jnp.concatenate([p.scales for p in parts if p.scales is not None], axis=1)
    return dataclasses.replace(first, values=values, scales=scales)


def stack_experts(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """Joins along E, e.g. experts read one at a time.

    Raises:
      FormatError: formats differ. ShapeError: N or K differ.
    """
    _check_alike(parts, "format", "n", "k")
    values = jnp.concatenate([p.values for p in parts])
    scales = None if parts[0].scales is None else jnp.concatenate([p.scales for p in parts if p.scales is not None])
    return dataclasses.replace(parts[0], values=values, scales=scales)
