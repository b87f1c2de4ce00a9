"""LaunchSpec of the kernel that projects hyper-connection rows and sums their squares in one pass.

d[s, m, n] = Σ_k a[m, k]·b[n, k] and sqr_sum[s, m] = Σ_k a[m, k]², with k cut into S splits; the caller sums over s.
"""

from __future__ import annotations

import dataclasses

from jaxmoe.cuda.deepgemm.gemm import SMEM_LIMIT, Arch, align, ceil_div, swizzle_of
from jaxmoe.cuda.deepgemm.template import instantiate
from jaxmoe.cuda.launch import Buffer, Integer, LaunchSpec, Pointer, TensorMap
from jaxmoe.cuda.source import KernelSource
from jaxmoe.errors import BackendUnavailable, ShapeError

_BLOCK = 64  # rows of a and columns of k in a tile
_THREADS = 128  # of each half of the block
_HEADER = "sm100_tf32_hc_prenorm_gemm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prenorm:
    """One such GEMM.

    Attributes:
      arch: ``sm_100``; other values are refused.
      m, n, k: a is bf16 [m, k], b float32 [n, k], d float32 [m, n]; n is 8, 16, 24 or 32, k a multiple of 64.
      splits: S, the parts k is cut into. Above 1, d is [S, m, n] and sqr_sum [S, m].
    """

    arch: Arch
    m: int
    n: int
    k: int
    splits: int = 1


def plan_prenorm(problem: Prenorm, *, pdl: bool = False) -> tuple[KernelSource, LaunchSpec] | None:
    """Source and launch of one prenorm GEMM; arguments a, b, results d, sqr_sum.

    Returns:
      As :func:`jaxmoe.cuda.deepgemm.specs.plan_launch`; None when m is 0.

    Raises:
      ShapeError: a negative m, more splits than tiles of k.
      BackendUnavailable: another arch, or an n or k that the kernel cannot take.
    """
    _check(problem)
    if problem.m == 0:
        return None
    m, n, k, splits = problem.m, problem.n, problem.k, problem.splits
    block_n = align(n, 16)
    swizzle_d = swizzle_of(block_n * 4)
    stages = next(s for s in range(12, 1, -1) if _smem_size(block_n, swizzle_d, s) <= SMEM_LIMIT)
    args = (n, k, _BLOCK, block_n, _BLOCK, splits, swizzle_d, stages, _THREADS, _THREADS)
    source = instantiate("sm100_tf32_hc_prenorm", problem.arch, _HEADER, tuple(map(str, args)))
    row = 4 * n
    split_dims, split_strides, split_box = ((splits,), (row * m,), (1,)) if splits > 1 else ((), (), ())
    a, b, d, sqr_sum = Buffer("argument", 0), Buffer("argument", 1), Buffer("result", 0), Buffer("result", 1)
    params = (
        Integer(m),
        TensorMap(a, "BFLOAT16", (k, m), (2 * k,), (_BLOCK, _BLOCK), 128),
        TensorMap(b, "TFLOAT32", (k, n), (4 * k,), (32, block_n), 128),
        TensorMap(d, "FLOAT32", (n, m, *split_dims), (row, *split_strides), (block_n, _BLOCK, *split_box), swizzle_d),
        Pointer(sqr_sum, 4 * splits * m),
    )
    spec = LaunchSpec(
        cubin=source.name,
        name=source.name,
        grid=(splits * ceil_div(m, _BLOCK), 1, 1),
        block=(2 * _THREADS, 1, 1),
        dynamic_smem=_smem_size(block_n, swizzle_d, stages),
        params=params,
        pdl=pdl,
    )
    return source, spec


def _smem_size(block_n: int, swizzle_d: int, stages: int) -> int:
    tiles = stages * _BLOCK * _BLOCK * 2 + stages * block_n * _BLOCK * 4 + _BLOCK * swizzle_d
    barriers = (4 * stages + 1) * 8 + 4
    return tiles + barriers


def _check(problem: Prenorm) -> None:
    if problem.arch == "sm_90":
        raise BackendUnavailable(
            "the SM90 prenorm kernel is reported to reuse registers that are still being read "
            "(deepseek-ai/DeepGEMM#449), so that its results may change from run to run; use plain JAX"
        )
    if problem.arch != "sm_100":
        raise BackendUnavailable(f"the prenorm kernel is for sm_100, not {problem.arch}; use plain JAX")
    if problem.n % 8 or not 8 <= problem.n <= 32:
        raise BackendUnavailable(f"prenorm: n is {problem.n}; the kernel has 8, 16, 24 and 32")
    if problem.k % _BLOCK or problem.k < _BLOCK:
        raise BackendUnavailable(f"prenorm: k is {problem.k}, not a multiple of {_BLOCK}; pad k with zeros")
    if not 0 <= problem.m < 2**31:
        raise ShapeError(f"prenorm: m is {problem.m}; it must be at least 0 and below 2^31")
    tiles = problem.k // _BLOCK
    if not 1 <= problem.splits <= tiles:
        raise ShapeError(f"prenorm: splits is {problem.splits}; k {problem.k} has {tiles} tiles, choose 1 to {tiles}")
