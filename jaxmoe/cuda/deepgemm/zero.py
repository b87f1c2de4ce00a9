"""The launch that zeroes what a grouped GEMM leaves as it was."""

from __future__ import annotations

from jaxmoe.cuda.deepgemm.gemm import DTYPES, Gemm
from jaxmoe.cuda.deepgemm.template import TARGETS
from jaxmoe.cuda.launch import Buffer, Integer, LaunchSpec, Pointer
from jaxmoe.cuda.source import KernelSource, own_kernel

_BLOCKS = 64  # per group, each of 256 threads


def plan_zero_rows(gemm: Gemm, *, alignment: int) -> tuple[KernelSource, LaunchSpec]:
    """Source and launch over the operands and the result of ``gemm``, to follow its own.

    ``k_grouped``: every group of the result that has no rows k. ``psum``: every row of no expert.
    """
    source = own_kernel(f"{gemm.arch.replace('_', '')}_zero_rows", TARGETS[gemm.arch], "zero_rows")
    row = gemm.n * DTYPES[gemm.d].bits // 8
    integers = (gemm.groups, 0 if gemm.k_grouped else alignment, gemm.m, row // 16)
    spec = LaunchSpec(
        cubin=source.name,
        name=source.name,
        grid=(gemm.groups, _BLOCKS, 1),
        block=(256, 1, 1),
        dynamic_smem=0,
        params=(
            Pointer(Buffer("argument", 2), 4 * gemm.groups),
            Pointer(Buffer("result", 0), gemm.rows * row),
            *map(Integer, integers),
        ),
    )
    return source, spec
