"""One CUDA launch each: the places of choices, where sorting takes a dozen, and quantised rows with their scales."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

import jaxmoe.cuda
from jaxmoe.config import Layout
from jaxmoe.cuda import ffi, target
from jaxmoe.cuda.kernel import run_kernel
from jaxmoe.cuda.launch import Buffer, Integer, LaunchSpec, Pointer
from jaxmoe.cuda.source import KernelSource
from jaxmoe.errors import BackendUnavailable
from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.scale_layout import NEUTRAL_WORD
from jaxmoe.quant.tensors import QuantizedRows
from jaxmoe.sizes import round_up

Array = jax.Array
Name = Literal["group_tokens", "permute_rows"]

_LAYOUTS: tuple[Layout, ...] = ("psum", "contiguous", "masked")
STAGED = 2
"""Tokens of a block of the copying kernel, where there are enough for all SMs."""

_THREADS = 128
_MOST_ROWS = 2**30  # its sums stay in 32 bits
_MOST_EXPERTS = 8192  # 32 KB of counts, which every kernel may have


@functools.cache
def kernel_source(arch: str, name: Name = "group_tokens") -> KernelSource:
    """What to compile for ``arch``; one kernel serves all sizes and layouts."""
    code = (Path(jaxmoe.cuda.__file__).parent / "kernels" / f"{name}.cuh").read_text(encoding="utf-8")
    return KernelSource(f"sm{arch[3:-1]}_{name}", arch, code)


def _require_launcher() -> str:
    """The architecture to compile for, where there is a GPU and the launcher."""
    arch = target.current().name
    try:
        ffi.library()
    except RuntimeError as reason:
        raise BackendUnavailable(f"the launcher cannot be loaded: {reason}") from reason
    return arch


def place(ids: Array, num_experts: int, *, layout: Layout, alignment: int, num_rows: int) -> tuple[Array, Array, Array]:
    """See :func:`jaxmoe.ops.permute.places.place`.

    Raises:
      BackendUnavailable: no GPU with kernels, no launcher or compiler, nothing to place, or more than 8192 experts.
    """
    arch = _require_launcher()
    if not ids.size or num_experts > _MOST_EXPERTS or max(ids.size, num_rows) > _MOST_ROWS:
        raise BackendUnavailable(
            f"ids {list(ids.shape)} of {num_experts} experts: the kernel places 1 to {_MOST_ROWS} choices among at "
            f"most {_MOST_EXPERTS}; use backend='reference'"
        )
    return _places(arch, num_experts, layout, alignment, num_rows)(ids)


@functools.cache
def _places(arch: str, num_experts: int, layout: Layout, alignment: int, num_rows: int):
    def run(ids: Array) -> tuple[Array, ...]:
        planned = plan_places(arch, ids.shape, num_experts, layout=layout, alignment=alignment, num_rows=num_rows)
        group = num_rows if layout == "contiguous" else num_experts
        shapes = [(group,), ids.shape, (num_rows,)]
        return run_kernel(planned, [ids], [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes])

    return sequential_vmap(run)


def plan_places(
    arch: str, shape: tuple[int, ...], num_experts: int, *, layout: Layout, alignment: int, num_rows: int
) -> tuple[KernelSource, LaunchSpec]:
    """Source and launch; argument ids, results group, slots, source.

    Args:
      arch: what to compile for.
      shape: of the ids.
      num_experts, layout, alignment, num_rows: as of :func:`place`.
    """
    source, (n, k) = kernel_source(arch), shape
    group = num_rows if layout == "contiguous" else num_experts
    capacity = num_rows // num_experts if layout == "masked" else 0
    outputs = [Pointer(Buffer("result", i), 4 * size) for i, size in enumerate((group, n * k, num_rows))]
    integers = (n, k, num_experts, _LAYOUTS.index(layout), alignment, capacity, num_rows)
    spec = LaunchSpec(
        cubin=source.name,
        name=source.name,
        grid=(num_experts, 1, 1),
        block=(256 if n * k <= 4096 else 1024, 1, 1),
        dynamic_smem=4 * num_experts,
        params=(Pointer(Buffer("argument", 0), 4 * n * k), *outputs, *map(Integer, integers)),
    )
    return source, spec


def copy_quantized(x: QuantizedRows, slots: Array, source: Array, row_shape: tuple[int, ...]) -> QuantizedRows:
    """See :func:`jaxmoe.ops.permute.reference.copy_quantized`.

    Raises:
      BackendUnavailable: no GPU with kernels, no launcher or compiler, nothing to move, or very long rows.
    """
    arch = _require_launcher()
    width = x.values.shape[1]
    if not slots.size or not source.size or width > 65536 or max(slots.size, source.size) > _MOST_ROWS:
        raise BackendUnavailable(
            f"rows {list(x.values.shape)} and places {list(slots.shape)} of {source.size}: the kernel moves 1 to "
            f"{_MOST_ROWS} rows of at most 65536 columns; use backend='reference'"
        )
    staged = STAGED if x.values.shape[0] >= 1024 and width <= 32768 else 1
    values, scales = copy_quantized_kernel(arch, row_shape, x.quant, staged)(x.values, x.scales, slots, source)
    return QuantizedRows(values.reshape(*row_shape, width), scales, x.quant)


@functools.cache
def copy_quantized_kernel(
    arch: str, row_shape: tuple[int, ...], quant: ActivationQuant, staged: int
) -> Callable[..., tuple[Array, Array]]:
    """The kernel with ``staged`` tokens a block: ``f(values, scales, slots, source)`` is values [M, Kp] and scales."""

    def run(values: Array, scales: Array, slots: Array, source: Array) -> tuple[Array, ...]:
        planned = plan_copies(arch, slots.shape, values.shape[1], scales.shape, row_shape, quant, staged)
        lead, rows = row_shape[:-1], row_shape[-1]
        results = [
            jax.ShapeDtypeStruct((source.shape[0], values.shape[1]), values.dtype),
            jax.ShapeDtypeStruct((*lead, scales.shape[0], round_up(rows, 4)), scales.dtype),
        ]
        return run_kernel(planned, [values, scales, slots, source], results)

    return sequential_vmap(run)


def plan_copies(
    arch: str,
    shape: tuple[int, ...],
    width: int,
    scales: tuple[int, ...],
    row_shape: tuple[int, ...],
    quant: ActivationQuant,
    staged: int,
) -> tuple[KernelSource, LaunchSpec]:
    """Source and launch; arguments values, scales, slots, source, results values, scales.

    Args:
      arch: what to compile for.
      shape: of the slots.
      width: of the values.
      scales: shape of the scales of what is moved.
      row_shape: leading shape of the buffer.
      quant: kind of scales.
      staged: tokens of a block, at most 4.
    """
    source, (n, k), (words, stride) = kernel_source(arch, "permute_rows"), shape, scales
    *lead, rows = row_shape
    leads, out_stride = math.prod(lead), round_up(rows, 4)
    fill = -(-leads * out_stride // _THREADS)
    sizes = (n * width, 4 * words * stride, 4 * n * k, 4 * leads * rows)
    arguments = [Pointer(Buffer("argument", i), size) for i, size in enumerate(sizes)]
    sizes = (leads * rows * width, 4 * leads * words * out_stride)
    outputs = [Pointer(Buffer("result", i), size) for i, size in enumerate(sizes)]
    neutral = 0x3F800000 if quant.scale == "float32" else NEUTRAL_WORD
    integers = (n, k, width, words, stride, leads, rows, out_stride, staged, fill, neutral)
    spec = LaunchSpec(
        cubin=source.name,
        name=source.name,
        grid=(fill + -(-n // staged), 1, 1),
        block=(_THREADS, 1, 1),
        dynamic_smem=staged * width,
        params=(*arguments, *outputs, *map(Integer, integers)),
    )
    return source, spec
