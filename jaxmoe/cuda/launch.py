"""A kernel launch as data. Python knows everything about a kernel; the C++ handler only launches.

A :class:`LaunchSpec` names a cubin, the launch geometry and an ordered list of kernel parameters. Buffers are the
custom call's arguments and results by position.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

TensorMapDtype = Literal["UINT8", "BFLOAT16", "FLOAT32", "TFLOAT32", "INT32", "16U4_ALIGN16B"]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """The ``index``-th argument or result of the custom call, from byte ``offset`` on."""

    kind: Literal["argument", "result"]
    index: int
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A device pointer; None is a null pointer."""

    buffer: Buffer | None


@dataclasses.dataclass(frozen=True)
class Integer:
    """An unsigned integer of ``width`` bytes."""

    value: int
    width: int = 4


@dataclasses.dataclass(frozen=True)
class Struct:
    """A small struct passed by value, as its bytes."""

    data: bytes


@dataclasses.dataclass(frozen=True)
class PeerField:
    """A value of a peer context known only at run time: ``base``, ``workspace``, ``window`` or ``rank``."""

    context: int
    field: Literal["base", "workspace", "window", "rank"]


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A 128-byte CUtensorMap over ``buffer``. Innermost dimension first.

    Attributes:
      dims: extents in elements. strides: bytes, one fewer than ``dims``. box: extents of one copy.
      swizzle: bytes: 0, 32, 64 or 128.
    Interleave is none, element strides are 1, L2 promotion 256 B, out-of-bounds elements read as 0.
    """

    buffer: Buffer
    dtype: TensorMapDtype
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


Param = Pointer | Integer | Struct | PeerField | TensorMap


@dataclasses.dataclass(frozen=True)
class LaunchSpec:
    """One kernel launch.

    Attributes:
      cubin: key of the cubin in the cache; it holds exactly one kernel.
      name: what runs, for messages and profiles.
      grid, block: launch geometry. dynamic_smem: bytes. cluster: CTAs along x.
      cooperative: cooperative launch. pdl: programmatic stream serialisation.
    """

    cubin: str
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_smem: int
    params: tuple[Param, ...]
    cluster: int = 1
    cooperative: bool = False
    pdl: bool = False
