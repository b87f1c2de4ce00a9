"""One GEMM of DeepGEMM as data, and the only place where dtypes, majors and layouts get their C++ and driver names.

D[m, n] = Σ_k A[m, k]·B[n, k]. Everything here is about the wheel sgl-deep-gemm 0.1.4.post1.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxmoe.cuda.launch import TensorMapDtype

Arch = Literal["sm_90", "sm_100"]
Layout = Literal["dense", "contiguous", "psum", "masked", "k_grouped"]
Major = Literal["K", "MN"]
Dtype = Literal["bf16", "e4m3", "e2m1", "f32"]
Kind = Literal["1d2d", "1d1d", "bf16"]

SMEM_LIMIT = 232448  # 227 KiB, what one block may have on SM90 and SM100


@dataclasses.dataclass(frozen=True)
class DtypeFacts:
    """What a dtype is to the compiler, to the tensor-map encoder and to shared memory.

    Attributes:
      cpp: C++ type. tensor_map: element type of a map over it.
      bits: storage bits per element. smem_bytes: bytes per element in shared memory, where FP4 is unpacked.
    """

    cpp: str
    tensor_map: TensorMapDtype
    bits: int
    smem_bytes: int


DTYPES: dict[Dtype, DtypeFacts] = {
    "bf16": DtypeFacts("cutlass::bfloat16_t", "BFLOAT16", 16, 2),
    "e4m3": DtypeFacts("cutlass::float_e4m3_t", "UINT8", 8, 1),
    "e2m1": DtypeFacts("cutlass::detail::float_e2m1_unpacksmem_t", "16U4_ALIGN16B", 4, 1),
    "f32": DtypeFacts("float", "FLOAT32", 32, 4),
}
MAJORS: dict[Major, str] = {"K": "cute::UMMA::Major::K", "MN": "cute::UMMA::Major::MN"}
GEMM_TYPES: dict[Layout, str] = {
    "dense": "GemmType::Normal",
    "contiguous": "GemmType::MGroupedContiguous",
    "psum": "GemmType::MGroupedContiguousWithPsumLayout",
    "masked": "GemmType::MGroupedMasked",
    "k_grouped": "GemmType::KGroupedContiguous",
}


def ceil_div(a: int, b: int) -> int:
    """⌈a/b⌉."""
    return -(-a // b)


def align(a: int, b: int) -> int:
    """``a`` rounded up to a multiple of ``b``."""
    return ceil_div(a, b) * b


def swizzle_of(row_bytes: int) -> int:
    """The widest swizzle, 128, 64, 32 or 16 bytes, that divides a row of ``row_bytes`` bytes."""
    return next(width for width in (128, 64, 32, 16) if row_bytes % width == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
    """One GEMM with static shapes. Rows of A and D are grouped by expert as ``layout`` says, B is [G, n, k].

    ``k_grouped`` is the weight gradient: D[g, m, n] = Σ_k A[k, m]·B[k, n] over the rows k of group g, which lie one
    group behind the other. The kernel leaves the result of a group without rows as it was;
    :mod:`jaxmoe.cuda.deepgemm.zero` follows it.

    ============ ============ ============ ====================================================================
    layout       A and D rows ``m``        ``grouped_layout``, int32
    ============ ============ ============ ====================================================================
    dense        [m]          rows         none; ``groups`` is 1
    contiguous   [m]          all rows     [m] expert of each row, -1 = padding; experts start at multiples of BLOCK_M
    psum         [m]          all rows     [G] end row of each expert, who starts at the previous end rounded up
                                           to BLOCK_M
    masked       [G, m]       of an expert [G] real rows of each expert
    k_grouped    [k, m], [m]  of a group   [G] rows k of each group, multiples of the alignment; ``k`` is all rows
    ============ ============ ============ ====================================================================

    Attributes:
      arch: ``sm_90`` (H100, H200) or ``sm_100`` (B200, B300).
      m, n, k, groups: as above; m or n may be 0.
      a, b: ``bf16`` both, or ``e4m3``/``e2m1``; ``e2m1`` is two values a byte along k, even k in the low nibble.
      d: ``bf16`` or ``f32``.
      b_major: ``"MN"`` when B lies in memory as [G, k, n] (the input gradient) or [k, n] (``k_grouped``); bf16 only.
      gran_a, gran_b: columns of k that one scale of A and of B covers; without meaning for bf16. SM90 takes
        (1, 128) × (128, 128) blocks of float32, SM100 rows of packed UE8M0, (1, 128) or (1, 32) each.
      expected_m: real rows per expert that the configuration is chosen for (psum and masked); 0 = as many as there
        can be.
      zero_padding: psum on SM100: store all BLOCK_M rows of a tile; else only up to the real rows rounded up to 16.
    """

    arch: Arch
    layout: Layout
    m: int
    n: int
    k: int
    groups: int = 1
    a: Dtype = "bf16"
    b: Dtype = "bf16"
    d: Dtype = "bf16"
    b_major: Major = "K"
    gran_a: int = 128
    gran_b: int = 128
    expected_m: int = 0
    zero_padding: bool = True

    @property
    def kind(self) -> Kind:
        """Which kernel family: scales ``1d2d`` (SM90), ``1d1d`` (SM100), or none, ``bf16``."""
        return "bf16" if self.a == "bf16" else "1d2d" if self.arch == "sm_90" else "1d1d"

    @property
    def scaled(self) -> bool:
        """Whether A and B come with scales."""
        return self.kind != "bf16"

    @property
    def grouped(self) -> bool:
        """Whether there is a ``grouped_layout``."""
        return self.layout != "dense"

    @property
    def m_grouped(self) -> bool:
        """Whether the groups are of rows of D."""
        return self.grouped and not self.k_grouped

    @property
    def k_grouped(self) -> bool:
        """Whether the groups are of what is summed over; A then lies as [k, m]."""
        return self.layout == "k_grouped"

    @property
    def rows(self) -> int:
        """All rows of D."""
        return self.m * self.groups if self.layout in ("masked", "k_grouped") else self.m

    @property
    def depth(self) -> int:
        """Products in one sum that the heuristics reckon with."""
        return ceil_div(self.k, self.groups) if self.k_grouped else self.k

    @property
    def balanced(self) -> tuple[int, int]:
        """Rows per group and number of groups that the heuristics reckon with."""
        if self.layout in ("masked", "k_grouped") or (self.layout == "psum" and self.expected_m):
            return self.expected_m or self.m, self.groups
        return self.m, 1

    @property
    def name(self) -> str:
        """What runs, e.g. ``sm90_fp8_1d2d_m_grouped_psum``."""
        values = "bf16" if not self.scaled else "fp8" if self.b == "e4m3" else "fp8_fp4" if self.a == "e4m3" else "fp4"
        family = values if self.kind == "bf16" else f"{values}_{self.kind}"
        return f"{self.arch.replace('_', '')}_{family}_{'m_grouped_' if self.m_grouped else ''}{self.layout}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a GEMM is cut into tiles.

    Attributes:
      swap_ab: D is computed transposed (SM100).
      block_m, block_n, block_k: the tile. cluster_m, cluster_n: CTAs along m and n that share loads.
      load_m, load_n: rows of A and of B that one CTA loads. store_m: rows of D that one copy stores.
      swizzle_a, swizzle_b, swizzle_d: bytes; ``swizzle_d`` 0 stores the whole width at once.
      stages: depth of the load pipeline. smem_size: bytes of dynamic shared memory.
      num_sms: CTAs, which is the grid. producer_threads, math_threads: halves of the block.
    """

    swap_ab: bool = False
    block_m: int
    block_n: int
    block_k: int
    cluster_m: int
    cluster_n: int
    load_m: int
    load_n: int
    store_m: int
    swizzle_a: int
    swizzle_b: int
    swizzle_d: int
    stages: int
    smem_size: int
    num_sms: int
    producer_threads: int
    math_threads: int

    @property
    def cluster(self) -> int:
        """CTAs of a cluster, 1 or 2."""
        return self.cluster_m * self.cluster_n

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.producer_threads + self.math_threads
