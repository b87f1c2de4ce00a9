"""The weight formats: what a value is, what a scale covers, and how far results may be off.

A format says everything the rest of the package asks about it; nothing else switches on a format's name.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

ScaleKind = Literal["float32", "ue8m0"]


@dataclasses.dataclass(frozen=True)
class ActivationQuant:
    """How the rows that meet a quantised weight are quantised: e4m3 values, one scale per row and ``block`` columns.

    Attributes:
      block: columns per scale, 128 or 32.
      scale: ``float32``: amax/448; ``ue8m0``: that, rounded up to a power of two and kept as an exponent byte.
    """

    block: int
    scale: ScaleKind


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """A format of expert weights [E, N, K] (N outputs, K inputs, "NT").

    Attributes:
      name: as users write it.
      bits: storage bits per value, scales not counted.
      block_n, block_k: rows and columns that one scale covers; 1 × 1 without scales.
      scale: kind of scale, None without.
      activation: how rows are quantised before they meet these weights, None for bf16 rows.
      max_diff: bound on ``calc_diff`` (1 - cosine-like similarity) of a GEMM against its float64 formula.
    """

    name: str
    bits: int
    block_n: int
    block_k: int
    scale: ScaleKind | None
    activation: ActivationQuant | None
    max_diff: float

    @property
    def quantized(self) -> bool:
        """Whether values need scales."""
        return self.scale is not None

    @property
    def block(self) -> int:
        """What H and I must be multiples of unless partial blocks are allowed."""
        return max(self.block_n, self.block_k)

    @property
    def k_multiple(self) -> int:
        """What the stored K is padded to, with zeros: what every kernel for the format can eat."""
        return 128 if self.quantized else 1

    def __repr__(self) -> str:
        return f"jaxmoe.{self.name}"


BF16 = WeightFormat("BF16", 16, 1, 1, None, None, 1e-5)
FP8Block = WeightFormat("FP8Block", 8, 128, 128, "float32", ActivationQuant(128, "float32"), 1e-3)
FP8BlockUE8M0 = WeightFormat("FP8BlockUE8M0", 8, 128, 128, "ue8m0", ActivationQuant(128, "ue8m0"), 1e-3)
MXFP8 = WeightFormat("MXFP8", 8, 1, 32, "ue8m0", ActivationQuant(32, "ue8m0"), 1e-3)
MXFP4 = WeightFormat("MXFP4", 4, 1, 32, "ue8m0", ActivationQuant(128, "ue8m0"), 1e-2)
FORMATS = {f.name: f for f in (BF16, FP8Block, FP8BlockUE8M0, MXFP8, MXFP4)}
