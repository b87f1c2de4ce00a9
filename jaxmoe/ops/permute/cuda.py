"""One CUDA launch each: the places of choices, where sorting takes a dozen, and quantised rows with their scales."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from jaxmoe.config import Layout
from jaxmoe.cuda import ffi, target
from jaxmoe.cuda.kernel import run_kernel
from jaxmoe.cuda.launch import Buffer, Integer, LaunchSpec, Pointer
from jaxmoe.cuda.source import KernelSource, own_kernel
from jaxmoe.errors import BackendUnavailable
from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.scale_layout import NEUTRAL_WORD
from jaxmoe.quant.tensors import QuantizedRows
from jaxmoe.sizes import round_up

Array = jax.Array
Name = Literal["group_tokens", "permute_rows"]

_LAYOUTS: tuple[Layout, ...] = ("psum", "contiguous", "masked")
_FILES = {"group_tokens": ("group_tokens",), "permute_rows": ("copy_engine", "permute_rows")}
_THREADS = 256  # of a block that copies rows; its code has the number too
_PULLING = 384  # blocks that move scales, about three for each SM
_STAGE = 100 * 1024  # two blocks on an SM
_LEAST_STAGE = 45 * 1024  # no more than four: with six, 4096 tokens of 7168 take 78.9 µs, with four 74.6
_L2 = 48 * 2**20  # what may stay in the L2 cache until the GEMM reads it
_MOST_ROWS = 2**30  # its sums stay in 32 bits
_MOST_EXPERTS = 8192  # 32 KB of counts, which every kernel may have


def kernel_source(arch: str, name: Name = "group_tokens") -> KernelSource:
    """What to compile for ``arch``; one kernel serves all sizes and layouts."""
    return own_kernel(f"sm{arch[3:-1]}_{name}", arch, *_FILES[name])


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


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What the blocks of the kernel that copies quantised rows work on.

    Attributes:
      staged: tokens that a block moves the values of, at most 8, one a warp.
      words: of the scales of a row that a block moves.
      quads: how many times four rows a block moves the scales of.
      shared: whether it reads scales from shared memory, where it puts its words of all tokens first.
      through: whether what is written is to leave the L2 cache first.
    """

    staged: int
    words: int
    quads: int
    shared: bool
    through: bool


def choose_tiles(values: tuple[int, ...], scales: tuple[int, ...], choices: int, row_shape: tuple[int, ...]) -> Tiles:
    """Tiles that keep all SMs busy; a block reads no more scales than it writes.

    Args:
      values, scales: shapes of what is moved. choices: of a token. row_shape: leading shape of the buffer.
    """
    (tokens, width), (total, stride), (*lead, rows) = values, scales, row_shape
    staged = min(1 if tokens < 1024 else 2 if tokens < 2048 else 4, max(65536 // width, 1))
    words = min(max(8192 // stride, 1), 4)
    shared = stride % 4 == 0 and 4 * stride * words <= _STAGE
    quads = -(-math.prod(lead) * round_up(rows, 4) * -(-total // words) // (4 * _PULLING))
    quads = round_up(max(quads, stride // 4 if shared else 1), _THREADS)
    return Tiles(staged, words, quads, shared, through=tokens * choices * width > _L2)


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
    tiles = choose_tiles(x.values.shape, x.scales.shape, slots.shape[1], row_shape)
    values, scales = copy_quantized_kernel(arch, row_shape, x.quant, tiles)(x.values, x.scales, slots, source)
    return QuantizedRows(values.reshape(*row_shape, width), scales, x.quant)


@functools.cache
def copy_quantized_kernel(
    arch: str, row_shape: tuple[int, ...], quant: ActivationQuant, tiles: Tiles
) -> Callable[..., tuple[Array, Array]]:
    """The kernel with tiles of one's choice: ``f(values, scales, slots, source)`` is values [M, Kp] and scales."""

    def run(values: Array, scales: Array, slots: Array, source: Array) -> tuple[Array, ...]:
        planned = plan_copies(arch, slots.shape, values.shape[1], scales.shape, row_shape, quant, tiles)
        results = [jax.ShapeDtypeStruct((source.shape[0], values.shape[1]), values.dtype), _scales(scales, row_shape)]
        return run_kernel(planned, [values, scales, slots, source], results)

    return sequential_vmap(run)


@functools.cache
def copy_scales_kernel(
    arch: str, row_shape: tuple[int, ...], quant: ActivationQuant, tiles: Tiles
) -> Callable[..., Array]:
    """The kernel's blocks that move scales, alone: ``f(scales, source)``, as ``reference.take_scales``."""

    def run(scales: Array, source: Array) -> Array:
        planned = plan_copies(arch, (0, 0), 0, scales.shape, row_shape, quant, tiles)
        return run_kernel(planned, [scales, source], [_scales(scales, row_shape)])[0]

    return sequential_vmap(run)


def _scales(like: Array, row_shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*row_shape[:-1], like.shape[0], round_up(row_shape[-1], 4)), like.dtype)


def plan_copies(
    arch: str,
    shape: tuple[int, ...],
    width: int,
    scales: tuple[int, ...],
    row_shape: tuple[int, ...],
    quant: ActivationQuant,
    tiles: Tiles,
) -> tuple[KernelSource, LaunchSpec]:
    """Source and launch; arguments values, scales, slots, source, results values, scales.

    Args:
      arch: what to compile for.
      shape: of the slots.
      width: of the values. 0 for the scales alone: arguments scales, source, result scales.
      scales: shape of the scales of what is moved.
      row_shape: leading shape of the buffer.
      quant: kind of scales.
      tiles: see :func:`choose_tiles`.
    """
    source, (n, k), (words, stride) = kernel_source(arch, "permute_rows"), shape, scales
    *lead, rows = row_shape
    leads, out_stride = math.prod(lead), round_up(rows, 4)
    pulling = -(-words // tiles.words) * -(-leads * out_stride // (4 * tiles.quads))
    arguments = _pointers("argument", n * width, 4 * words * stride, 4 * n * k, 4 * leads * rows)
    results = _pointers("result", leads * rows * width, 4 * leads * words * out_stride)
    neutral = 0x3F800000 if quant.scale == "float32" else NEUTRAL_WORD
    integers = (n, k, width, words, stride, leads, rows, out_stride)
    integers += (tiles.staged, pulling, tiles.words, tiles.quads, int(tiles.shared), int(tiles.through), neutral)
    spec = LaunchSpec(
        cubin=source.name,
        name=source.name,
        grid=(pulling + -(-n // tiles.staged), 1, 1),
        block=(_THREADS, 1, 1),
        dynamic_smem=max(tiles.staged * width, 4 * tiles.words * stride if tiles.shared else 0, _LEAST_STAGE),
        params=(*arguments, *results, *map(Integer, integers)),
    )
    return source, spec


def _pointers(kind: Literal["argument", "result"], *sizes: int) -> list[Pointer]:
    """Pointers to buffers in order, null for those of no bytes, which are not there."""
    index = itertools.count()
    return [Pointer(Buffer(kind, next(index)), size) if size else Pointer(None) for size in sizes]
