"""Zeroes between the rows of experts: what a grouped GEMM leaves as it was, and what its gradients may not see."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.custom_batching import sequential_vmap

from jaxmoe.cuda.deepgemm.gemm import DTYPES, Gemm
from jaxmoe.cuda.kernel import run_kernels
from jaxmoe.cuda.launch import Buffer, Integer, LaunchSpec, Pointer
from jaxmoe.cuda.source import KernelSource, own_kernel

_BLOCKS = 64  # per group, each of 256 threads


def kernel_source(arch: str) -> KernelSource:
    """What to compile for ``arch``, ``sm_90a`` or ``sm_100f``; one kernel serves all sizes."""
    return own_kernel(f"sm{arch[3:-1]}_zero_rows", arch, "zero_rows")


def plan_empty(arch: str, gemm: Gemm) -> tuple[KernelSource, LaunchSpec]:
    """Source and launch that zero the groups without rows in the result of a k-grouped ``gemm``, to follow its own."""
    return _plan(arch, Buffer("argument", 2), gemm.groups, 0, gemm.m, gemm.n * DTYPES[gemm.d].bits // 8)


def plan_between(
    arch: str, shape: tuple[int, ...], itemsize: int, groups: int, alignment: int
) -> tuple[KernelSource, LaunchSpec]:
    """Source and launch that zero every row of no expert of psum rows [M, W], result 0; their ends are argument 1."""
    rows, width = shape
    return _plan(arch, Buffer("argument", 1), groups, alignment, rows, width * itemsize)


@functools.cache
def zero_between(arch: str, alignment: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """``f(rows, ends)``: psum rows [M, W] with 0 in every row of no expert; in place, unless ``rows`` is used later."""

    def run(rows: jax.Array, ends: jax.Array) -> jax.Array:
        like = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        planned = plan_between(arch, rows.shape, rows.dtype.itemsize, ends.shape[0], alignment)
        name = f"jaxmoe_{planned[1].name}"
        return run_kernels([planned], [rows, ends], [like], name=name, input_output_aliases={0: 0})[0]

    return sequential_vmap(run)


def _plan(
    arch: str, group: Buffer, groups: int, alignment: int, rows: int, row_bytes: int
) -> tuple[KernelSource, LaunchSpec]:
    """``rows`` of a group where ``alignment`` is 0, else of all."""
    source = kernel_source(arch)
    nbytes = rows * row_bytes * (1 if alignment else groups)
    spec = LaunchSpec(
        cubin=source.name,
        name=source.name,
        grid=(groups, _BLOCKS, 1),
        block=(256, 1, 1),
        dynamic_smem=0,
        params=(
            Pointer(group, 4 * groups),
            Pointer(Buffer("result", 0), nbytes),
            *map(Integer, (groups, alignment, rows, row_bytes // 16)),
        ),
    )
    return source, spec
