"""How large things are: token records, buffers, workspace, received rows, and how many warps fit on an SM.

The records and the workspace are laid out by the kernels (DeepEP 2.1, ``common/layout.cuh``); what is computed here
must be what they compute.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.errors import ShapeError
from jaxmoe.sizes import round_up

SMEM = 227 * 1024
"""Dynamic shared memory that each of the kernels takes, all that a block may have."""
MAX_TOP_K = 32
MAX_LOCAL_EXPERTS = 256
NOTIFY_WARPS = 4
"""Warps of the dispatch kernel that count instead of sending."""
WORKSPACE_BYTES = 77_840
TABLE_OFFSET = 1 << 20
"""Where the table of peer addresses lies, from the start of the allocation."""
DATA_OFFSET = 2 << 20
"""Where records lie, from the start of the allocation; the workspace lies at its start."""

_RECORD_ALIGNMENT = 32
_MBARRIER_BYTES = 32
_MAX_WARPS = 32
_COMBINE_MULTIPLE = 256


@dataclasses.dataclass(frozen=True)
class Wire:
    """What a token is made of while it travels to its experts.

    Attributes:
      dtype: of the values. width: values of a row.
      scale_dtype: of the scales, 4 bytes each, None without. scales: scales of a row.
    """

    dtype: Any
    width: int
    scale_dtype: Any = None
    scales: int = 0

    def __post_init__(self) -> None:
        if self.row_bytes % _RECORD_ALIGNMENT:
            raise ShapeError(
                f"rows of {self.width} {self.dtype} have {self.row_bytes} bytes; the kernels move multiples of "
                f"{_RECORD_ALIGNMENT}"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of the values."""
        return self.width * jnp.dtype(self.dtype).itemsize


def combine_width(hidden: int) -> int:
    """H as the combine kernels take it: a multiple of 256."""
    return round_up(hidden, _COMBINE_MULTIPLE)


def combine_wire(hidden: int) -> Wire:
    """A row of bf16 as wide as what comes back; what gradients travel in."""
    return Wire(jnp.bfloat16, combine_width(hidden))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Everything the kernels are compiled for but what a token is made of.

    Attributes:
      ranks: R. tokens: M, the most tokens that a rank sends; equal on all ranks.
      hidden: H, of what comes back. experts: E, divisible by R; ids are 0..E-1, rank r holds E/R from r·E/R on.
      top_k: K. alignment: A, rows that experts start at multiples of where rows come sorted by expert.
      num_sms: SMs that send. epilogue_sms: SMs that copy and add up on the device itself.
      timeout_cycles: of the SM clock, after which a kernel that waits for another rank gives up.
    """

    ranks: int
    tokens: int
    hidden: int
    experts: int
    top_k: int
    alignment: int = 128
    num_sms: int = 64
    epilogue_sms: int = 132
    timeout_cycles: int = 200_000_000_000

    def __post_init__(self) -> None:
        low = {"ranks": 1, "tokens": 1, "hidden": 1, "experts": 1, "top_k": 1, "alignment": 1}
        low |= {"num_sms": 1, "epilogue_sms": 1, "timeout_cycles": 1}
        for name, least in low.items():
            if getattr(self, name) < least:
                raise ShapeError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.experts % self.ranks:
            raise ShapeError(
                f"{self.experts} experts do not divide over {self.ranks} ranks; use a number of ranks that divides "
                f"{self.experts}"
            )
        if self.top_k > MAX_TOP_K:
            raise ShapeError(f"top_k is {self.top_k}; the kernels take at most {MAX_TOP_K} experts per token")
        if self.local_experts > MAX_LOCAL_EXPERTS:
            raise ShapeError(
                f"{self.local_experts} experts per rank are more than the kernels' {MAX_LOCAL_EXPERTS}; use at least "
                f"{-(-self.experts // MAX_LOCAL_EXPERTS)} ranks"
            )

    @property
    def local_experts(self) -> int:
        """El."""
        return self.experts // self.ranks

    @property
    def received(self) -> int:
        """Rows that may arrive, a token once per rank: R·M."""
        return self.ranks * self.tokens

    @property
    def expanded(self) -> int:
        """Rows that may arrive, a token once per expert, each expert's padded to A."""
        rows = self.received * min(self.top_k, self.local_experts)
        return round_up(rows + (self.alignment - 1) * self.local_experts, self.alignment)

    @property
    def slots(self) -> int:
        """Places per token where parts of its result arrive."""
        return min(self.ranks, self.top_k)

    def dispatch_record(self, wire: Wire) -> int:
        """Bytes of a token on its way to experts: values, scales, ids, weights, where it is from."""
        ids = 4 * (2 * self.top_k + 1 + self.top_k)
        parts = (wire.row_bytes, 4 * wire.scales, ids)
        return sum(round_up(part, _RECORD_ALIGNMENT) for part in parts)

    @property
    def combine_record(self) -> int:
        """Bytes of a result on its way back: bf16 values and weights."""
        values, weights = 2 * combine_width(self.hidden), 8 * self.top_k
        return round_up(values, _RECORD_ALIGNMENT) + round_up(weights, _RECORD_ALIGNMENT)

    def data_bytes(self, wire: Wire) -> int:
        """Bytes of the records; those of dispatch and of combine share the space."""
        there = self.received * max(self.dispatch_record(w) for w in (wire, combine_wire(self.hidden)))
        return round_up(max(there, self.slots * self.tokens * self.combine_record), 2 << 20)

    def buffer_bytes(self, wire: Wire) -> int:
        """Bytes of one device's allocation: workspace, table of peers, records."""
        return DATA_OFFSET + self.data_bytes(wire)

    def dispatch_warps(self, wire: Wire, *, notify: bool) -> int:
        """Warps that send, beside those that count."""
        counts = 4 * round_up(self.ranks + self.experts, 32 * NOTIFY_WARPS) if notify else 0
        spare = _MAX_WARPS - (NOTIFY_WARPS if notify else 0)
        return self._warps(SMEM - counts, self.dispatch_record(wire) + _MBARRIER_BYTES, spare)

    def copy_warps(self, wire: Wire) -> int:
        """Warps of the dispatch epilogue."""
        return self._warps(SMEM, self.dispatch_record(wire) + _MBARRIER_BYTES, _MAX_WARPS)

    @property
    def combine_warps(self) -> int:
        """Warps of the combine kernel."""
        return self._warps(SMEM, self.combine_record + _MBARRIER_BYTES, _MAX_WARPS)

    @property
    def reduce_warps(self) -> int:
        """Warps of the combine epilogue."""
        return self._warps(SMEM, 2 * combine_width(self.hidden), _MAX_WARPS)

    def _warps(self, smem: int, each: int, limit: int) -> int:
        warps = min(smem // each, limit)
        if not warps:
            raise ShapeError(f"a token of {each} bytes does not fit the {smem} bytes of shared memory; use a smaller H")
        return warps


def result_shapes(sizes: Sizes, wire: Wire, *, expand: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of what a dispatch may give, by name; see :func:`jaxmoe.cuda.deepep.specs.dispatch`."""
    rows = sizes.expanded if expand else sizes.received
    k, i32, f32 = sizes.top_k, jnp.int32, jnp.float32
    shapes = {
        "rows": ((rows, wire.width), wire.dtype),
        "row_scales": ((wire.scales, round_up(rows, 4)), wire.scale_dtype),
        "row_ids": ((rows, k), i32),
        "row_weights": ((rows,) if expand else (rows, k), f32),
        "metadata": ((sizes.received, 2 + k), i32),
        "ranks": ((sizes.ranks,), i32),
        "ends": ((sizes.local_experts + 1,), i32),
        "counts": ((sizes.local_experts,), i32),
    }
    return {n: jax.ShapeDtypeStruct(shape, dtype) for n, (shape, dtype) in shapes.items() if dtype is not None}


def suggested_sms(sizes: Sizes, *, link: float = 450e9, available: int = 132) -> int:
    """SMs that keep a link busy under even routing, by DeepEP's own rule, but at least 64 where there are as many.

    A rule of thumb: an SM reads about 200 GB/s and writes 50 GB/s; rows that arrive are read once per rank.
    """
    e, k, local = sizes.experts, min(sizes.top_k, sizes.experts), sizes.local_experts
    missed = math.comb(e - local, k) / math.comb(e, k) if e - local >= k else 0.0
    wanted = sizes.ranks * (1 - missed)
    across = 1 - 1 / sizes.ranks
    busy = max(link / across / wanted / 200e9, link / across / 50e9) if across else 0.0
    return min(max(round_up(math.ceil(1.25 * busy), 2), 64), available - available % 2)
