"""A kernel launch as data. Python knows everything about a kernel; the C++ handler only launches.

A :class:`LaunchSpec` names a cubin, the launch geometry and an ordered list of kernel parameters. Buffers are the
custom call's arguments and results by position. :func:`encode` turns specs into the bytes that ``ffi/spec.cc`` reads.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Sequence
from typing import Literal, get_args

from jaxmoe.errors import ShapeError

TensorMapDtype = Literal["UINT8", "BFLOAT16", "FLOAT32", "TFLOAT32", "INT32", "16U4_ALIGN16B"]
TENSOR_MAP_DTYPES: tuple[str, ...] = get_args(TensorMapDtype)
"""The position of a type here is its code in the encoding."""

_PEER_FIELDS = ("base", "workspace", "window", "rank")
_SMEM_BYTES = {"UINT8": 1, "BFLOAT16": 2, "FLOAT32": 4, "TFLOAT32": 4, "INT32": 4, "16U4_ALIGN16B": 1}
_SWIZZLES = (0, 32, 64, 128)
_MAX_BUFFERS = 64
_MAX_PARAMS = 64
_MAX_TENSOR_MAPS = 16
_MAX_STRUCT_BYTES = 1024
_MAX_DYNAMIC_SMEM = 227 * 1024
_NAME = re.compile(r"[ -~]{1,256}")
_CUBIN_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,255}")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """The ``index``-th argument or result of the custom call, from byte ``offset`` on."""

    kind: Literal["argument", "result"]
    index: int
    offset: int = 0

    def __post_init__(self):
        _check(self.kind in ("argument", "result"), f"Buffer.kind is {self.kind!r}; 'argument' or 'result' is needed")
        _check_range("Buffer.index", self.index, 0, _MAX_BUFFERS - 1)
        _check_range("Buffer.offset", self.offset, 0, 2**62)


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A device pointer; None is a null pointer.

    Attributes:
      nbytes: bytes that the kernel may touch from the pointer on. The handler refuses a buffer that ends earlier; 0
        checks only that the offset lies inside.
    """

    buffer: Buffer | None
    nbytes: int = 0

    def __post_init__(self):
        _check_range("Pointer.nbytes", self.nbytes, 0, 2**62 if self.buffer is not None else 0)


@dataclasses.dataclass(frozen=True)
class Integer:
    """An unsigned integer of ``width`` bytes."""

    value: int
    width: int = 4

    def __post_init__(self):
        _check(self.width in (1, 2, 4, 8), f"Integer.width is {self.width}; 1, 2, 4 or 8 bytes are possible")
        _check_range(f"Integer of {self.width} bytes", self.value, 0, 256**self.width - 1)


@dataclasses.dataclass(frozen=True)
class PeerField:
    """A value of a peer context known only at run time: ``base``, ``workspace``, ``window`` or ``rank``.

    A rank is an int32, the others are device addresses.
    """

    context: int
    field: Literal["base", "workspace", "window", "rank"]

    def __post_init__(self):
        _check_range("PeerField.context", self.context, 0, 2**32 - 1)
        _check(self.field in _PEER_FIELDS, f"PeerField.field is {self.field!r}; one of {_PEER_FIELDS} is needed")

    @property
    def nbytes(self) -> int:
        """Bytes of the value as a kernel parameter."""
        return 4 if self.field == "rank" else 8


@dataclasses.dataclass(frozen=True)
class Struct:
    """A small struct passed by value, as its bytes.

    Attributes:
      peers: (byte offset, peer field) pairs; the field's value overwrites the bytes from the offset on at each launch.
    """

    data: bytes
    peers: tuple[tuple[int, PeerField], ...] = ()

    def __post_init__(self):
        _check_range("bytes of a Struct", len(self.data), 1, _MAX_STRUCT_BYTES)
        _check_range("peer fields of a Struct", len(self.peers), 0, 255)
        for offset, peer in self.peers:
            _check_range(f"offset of the peer field {peer.field!r}", offset, 0, len(self.data) - peer.nbytes)


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

    def __post_init__(self):
        _check(self.dtype in TENSOR_MAP_DTYPES, f"TensorMap.dtype is {self.dtype!r}; one of {TENSOR_MAP_DTYPES}")
        rank = len(self.dims)
        _check_range("rank of a TensorMap", rank, 1, 5)
        _check(
            len(self.strides) == rank - 1, f"TensorMap has {rank} dims and {len(self.strides)} strides, not one fewer"
        )
        _check(len(self.box) == rank, f"TensorMap has {rank} dims and a box of {len(self.box)}")
        _check(self.swizzle in _SWIZZLES, f"TensorMap.swizzle is {self.swizzle} bytes; one of {_SWIZZLES} is needed")
        four_bits = self.dtype == "16U4_ALIGN16B"
        granule = 32 if four_bits else 16
        for extent in self.dims:
            _check_range("TensorMap.dims (launch nothing for an empty buffer)", extent, 1, 2**32)
        for stride in self.strides:
            _check_range("TensorMap.strides", stride, 0, 2**40 - 1)
            _check(stride % granule == 0, f"TensorMap stride {stride} is not a multiple of {granule} bytes")
        for extent in self.box:
            _check_range("TensorMap.box", extent, 1, 256)
        inner = self.box[0] * _SMEM_BYTES[self.dtype]
        _check(inner % 16 == 0, f"the inner box row of a TensorMap has {inner} bytes, not a multiple of 16")
        if self.swizzle:
            _check_range(f"bytes of an inner box row under a {self.swizzle}-byte swizzle", inner, 16, self.swizzle)
        if four_bits:
            _check(self.dims[0] % 128 == 0, f"{self.dtype} needs dims[0] in multiples of 128, got {self.dims[0]}")
            _check(self.box[0] == 128, f"{self.dtype} needs box[0] of 128, got {self.box[0]}")


Param = Pointer | Integer | Struct | PeerField | TensorMap


@dataclasses.dataclass(frozen=True)
class LaunchSpec:
    """One kernel launch.

    Attributes:
      cubin: key of the cubin in the cache, where it is the file ``<key>.cubin``; it holds exactly one kernel.
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

    def __post_init__(self):
        _check(
            bool(_CUBIN_KEY.fullmatch(self.cubin)),
            f"cubin key {self.cubin!r} is not a file name of letters, digits and _ . - (at most 256)",
        )
        _check(
            bool(_NAME.fullmatch(self.name)), f"kernel name {self.name!r} is not 1 to 256 printable ASCII characters"
        )
        _check(len(self.grid) == 3 and len(self.block) == 3, f"grid {self.grid} and block {self.block} need 3 extents")
        for extent, limit in zip(self.grid, (2**31 - 1, 65535, 65535), strict=True):
            _check_range(f"extent of grid {self.grid}", extent, 1, limit)
        for extent, limit in zip(self.block, (1024, 1024, 64), strict=True):
            _check_range(f"extent of block {self.block}", extent, 1, limit)
        threads = self.block[0] * self.block[1] * self.block[2]
        _check_range(f"threads of block {self.block}", threads, 1, 1024)
        _check_range("dynamic_smem", self.dynamic_smem, 0, _MAX_DYNAMIC_SMEM)
        _check_range("cluster", self.cluster, 1, 8)
        _check(self.grid[0] % self.cluster == 0, f"grid {self.grid} is not a multiple of the cluster {self.cluster}")
        _check_range("number of parameters", len(self.params), 0, _MAX_PARAMS)
        maps = sum(isinstance(p, TensorMap) for p in self.params)
        _check_range("number of tensor maps", maps, 0, _MAX_TENSOR_MAPS)
        structs = sum(-(-len(p.data) // 16) * 16 for p in self.params if isinstance(p, Struct))
        _check_range("bytes of all structs, each rounded up to 16", structs, 0, _MAX_STRUCT_BYTES)


def encode(specs: Sequence[LaunchSpec], target: str) -> bytes:
    """The bytes that the handler decodes: launches in order, for messages under the name ``target``.

    Raises:
      ShapeError: ``target`` is not 1 to 256 printable ASCII characters, or there are more than 65535 launches.
    """
    _check(bool(_NAME.fullmatch(target)), f"target name {target!r} is not 1 to 256 printable ASCII characters")
    _check_range("number of launches", len(specs), 0, 65535)
    head = b"JXML" + struct.pack("<H", 1) + _text(target) + struct.pack("<H", len(specs))
    return head + b"".join(map(_launch, specs))


def _launch(spec: LaunchSpec) -> bytes:
    geometry = (*spec.grid, *spec.block, spec.dynamic_smem, spec.cluster, spec.cooperative, spec.pdl, len(spec.params))
    return _text(spec.cubin) + _text(spec.name) + struct.pack("<8I2BH", *geometry) + b"".join(map(_param, spec.params))


def _param(param: Param) -> bytes:
    match param:
        case Pointer(None):
            return b"\0"
        case Pointer(Buffer() as buffer, nbytes):
            return b"\1" + _buffer(buffer) + struct.pack("<Q", nbytes)
        case Integer(value, width):
            return struct.pack("<BBQ", 2, width, value)
        case Struct(data, peers):
            patches = b"".join(struct.pack("<H", offset) + _peer(peer) for offset, peer in peers)
            return struct.pack("<BH", 3, len(data)) + data + bytes([len(peers)]) + patches
        case PeerField():
            return b"\4" + _peer(param)
        case TensorMap(buffer, dtype, dims, strides, box, swizzle):
            codes = (TENSOR_MAP_DTYPES.index(dtype), _SWIZZLES.index(swizzle), len(dims))
            extents = struct.pack(f"<{2 * len(dims) - 1}Q{len(box)}I", *dims, *strides, *box)
            return b"\5" + _buffer(buffer) + bytes(codes) + extents
    raise TypeError(f"{param!r} is not a kernel parameter")


def _buffer(buffer: Buffer) -> bytes:
    return struct.pack("<BIQ", buffer.kind == "result", buffer.index, buffer.offset)


def _peer(peer: PeerField) -> bytes:
    return struct.pack("<IB", peer.context, _PEER_FIELDS.index(peer.field))


def _text(text: str) -> bytes:
    return struct.pack("<H", len(text)) + text.encode("ascii")


def _check(good: bool, message: str) -> None:
    if not good:
        raise ShapeError(message)


def _check_range(what: str, value: int, low: int, high: int) -> None:
    _check(low <= value <= high, f"{what} is {value}; {low} to {high} is possible")
