"""Lazy, memory-mapped reading of safetensors directories; knows nothing of MoE layers and never executes anything.

A safetensors file is: u64 little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}``, then
the bytes. NumPy does not know bfloat16 or the 8-bit floats, so that the headers are read here and the bytes are viewed
with ml_dtypes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxmoe.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""What safetensors calls a dtype."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor: its safetensors dtype name (``BF16``, ``F8_E4M3`` …) and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; a missing or malformed file, or a key given twice, is a CheckpointError."""
    try:
        return _json_object(path.read_bytes(), path)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from e


def _json_object(data: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            twice = next(k for i, (k, _) in enumerate(pairs) if k in dict(pairs[:i]))
            raise CheckpointError(f"{path}: {twice!r} is given twice")
        return result

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise CheckpointError(f"{path}: is not valid JSON ({e})") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


class _File:
    """One safetensors file: its checked header and a read-only view of its bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            if size < 8:
                raise CheckpointError(f"{path}: has {size} bytes, too few for a safetensors file; download it again")
            with path.open("rb") as f:
                self._bytes = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as e:
            raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from e
        (length,) = struct.unpack("<Q", self._bytes[:8])
        if length > min(_MAX_HEADER, size - 8):
            raise CheckpointError(
                f"{path}: the header says {length} bytes but the file has {size - 8} after its first 8 "
                f"(limit {_MAX_HEADER}); it is truncated or not a safetensors file"
            )
        header = _json_object(self._bytes[8 : 8 + length], path)
        header.pop("__metadata__", None)
        self._start = 8 + length
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        for name, entry in header.items():
            self._check_entry(name, entry)
        self._check_coverage(header, size - self._start)

    def _check_entry(self, name: str, entry: Any) -> None:
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
                raise ValueError
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"{self.path}: malformed header entry for {name!r}: {entry!r}") from e
        if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise CheckpointError(
                f"{self.path}: {name!r} is {dtype} {shape}, which takes {math.prod(shape) * DTYPES[dtype].itemsize} "
                f"bytes, but its offsets [{begin}, {end}] span {end - begin}"
            )
        self.tensors[name] = TensorInfo(dtype, tuple(shape))
        self._offsets[name] = begin

    def _check_coverage(self, header: dict[str, Any], available: int) -> None:
        """The tensors must lie end to end: no overlap, no hole, nothing past the end of the file."""
        position = 0
        for begin, end, name in sorted((*entry["data_offsets"], name) for name, entry in header.items()):
            if begin != position or end < begin:
                what = "overlaps the tensor before it" if begin < position else "does not follow the tensor before it"
                raise CheckpointError(
                    f"{self.path}: {name!r} at bytes [{begin}, {end}] {what}, which ends at {position}"
                )
            position = end
        if position != available:
            raise CheckpointError(
                f"{self.path}: the header describes {position} bytes of tensors but the file holds {available}; "
                "it is truncated or damaged, download it again"
            )

    def get(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        if info.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: {name!r} has the dtype {info.dtype}, which is not one of {', '.join(DTYPES)}"
            )
        flat = np.frombuffer(
            self._bytes, DTYPES[info.dtype], count=math.prod(info.shape), offset=self._start + self._offsets[name]
        )
        return flat.reshape(info.shape)


class CheckpointReader:
    """The tensors of a Hugging Face style directory, by name.

    Nothing but the index is read before a tensor is asked for; values are views of memory-mapped files.

    Args:
      path: directory with ``model.safetensors``, or ``model.safetensors.index.json`` and its shards.

    Raises:
      CheckpointError: no such files, both of them, pickled weights only, or a malformed index.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, _File] = {}
        single, index = self.path / SINGLE, self.path / INDEX
        if single.exists() and index.exists():
            raise CheckpointError(f"{self.path}: holds both {SINGLE} and {INDEX}; remove the one that is out of date")
        if index.exists():
            self._location = self._read_index(index)
        elif single.exists():
            self._location = dict.fromkeys(self._open(SINGLE).tensors, SINGLE)
        else:
            pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in self.path.glob(pattern))
            raise CheckpointError(
                f"{self.path}: holds neither {SINGLE} nor {INDEX}"
                + (f"; {pickled[0]} is a pickle, which is never loaded: convert it to safetensors" if pickled else "")
            )

    def _read_index(self, index: Path) -> dict[str, str]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{index}: needs a 'weight_map' from tensor names to file names")
        for name, file in weight_map.items():
            if file != Path(file).name or "\\" in file or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index}: {name!r} is said to be in {file!r}; only .safetensors files of the same directory are "
                    "read"
                )
        return weight_map

    def _open(self, file: str) -> _File:
        if file not in self._files:
            self._files[file] = _File(self.path / file)
        return self._files[file]

    def _file_of(self, name: str) -> _File:
        if name not in self._location:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        file = self._location[name]
        if file not in self._files:
            for found in self._open(file).tensors:
                if self._location.get(found) != file:
                    where = f"says it is in {self._location[found]}" if found in self._location else "does not list it"
                    raise CheckpointError(f"{self.path / file}: holds {found!r}, but {INDEX} {where}")
        opened = self._files[file]
        if name not in opened.tensors:
            raise CheckpointError(f"{opened.path}: lacks {name!r}, which {INDEX} says is there")
        return opened

    @property
    def names(self) -> frozenset[str]:
        """All tensor names."""
        return frozenset(self._location)

    def under(self, prefix: str) -> Iterator[str]:
        """The names that start with ``prefix``."""
        return (name for name in self._location if name.startswith(prefix))

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of a tensor, from its file's header.

        Raises:
          CheckpointError: no such tensor, or its file is missing, truncated or malformed; names both.
        """
        return self._file_of(name).tensors[name]

    def get(self, name: str) -> np.ndarray:
        """A read-only view of a tensor's bytes with its NumPy or ml_dtypes dtype.

        Raises:
          CheckpointError: as :meth:`info`, or a dtype that is not known here.
        """
        return self._file_of(name).get(name)
