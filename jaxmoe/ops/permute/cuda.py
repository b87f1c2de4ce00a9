"""Places of choices by one CUDA launch, where sorting takes a dozen."""

from __future__ import annotations

import functools
from pathlib import Path

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

Array = jax.Array

_LAYOUTS: tuple[Layout, ...] = ("psum", "contiguous", "masked")
_MOST_ROWS = 2**30  # its sums stay in 32 bits
_MOST_EXPERTS = 8192  # 32 KB of counts, which every kernel may have


@functools.cache
def kernel_source(arch: str) -> KernelSource:
    """What to compile for ``arch``; one kernel serves all sizes and layouts."""
    code = (Path(jaxmoe.cuda.__file__).parent / "kernels" / "group_tokens.cuh").read_text(encoding="utf-8")
    return KernelSource(f"{arch.split('_')[0]}{arch[3:-1]}_group_tokens", arch, code)


def place(ids: Array, num_experts: int, *, layout: Layout, alignment: int, num_rows: int) -> tuple[Array, Array, Array]:
    """See :func:`jaxmoe.ops.permute.places.place`.

    Raises:
      BackendUnavailable: no GPU with kernels, no launcher or compiler, nothing to place, or more than 8192 experts.
    """
    arch = target.current()
    if not ids.size or num_experts > _MOST_EXPERTS or max(ids.size, num_rows) > _MOST_ROWS:
        raise BackendUnavailable(
            f"ids {list(ids.shape)} of {num_experts} experts: the kernel places 1 to {_MOST_ROWS} choices among at "
            f"most {_MOST_EXPERTS}; use backend='reference'"
        )
    try:
        ffi.library()
    except RuntimeError as reason:
        raise BackendUnavailable(f"the launcher cannot be loaded: {reason}") from reason
    return _batched(arch.name, num_experts, layout, alignment, num_rows)(ids)


@functools.cache
def _batched(arch: str, num_experts: int, layout: Layout, alignment: int, num_rows: int):
    def run(ids: Array) -> tuple[Array, ...]:
        planned = plan(arch, ids.shape, num_experts, layout=layout, alignment=alignment, num_rows=num_rows)
        group = num_rows if layout == "contiguous" else num_experts
        shapes = [(group,), ids.shape, (num_rows,)]
        return run_kernel(planned, [ids], [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes])

    return sequential_vmap(run)


def plan(
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
