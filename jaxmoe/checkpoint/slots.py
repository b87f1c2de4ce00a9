"""From names to slots: which tensor fills which expert's place, checked before a byte of it is read.

Every tensor under a MoE block is claimed exactly once; one that is missing, left over, given twice, or of another
dtype or shape than its slot is an error that names it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from jaxmoe.checkpoint.families import PREFIXES, Family, Names
from jaxmoe.checkpoint.reader import CheckpointReader, TensorInfo
from jaxmoe.errors import CheckpointError
from jaxmoe.quant.formats import BF16, MXFP4, MXFP8, FP8Block, FP8BlockUE8M0, WeightFormat

FLOATS = ("BF16", "F32", "F16")
_FP8, _FP4, _E8M0 = ("F8_E4M3",), ("I8", "U8"), ("F8_E8M0", "U8")
# One meaning, three spellings: all of them multiply the codes.
_SCALES = ("weight_scale_inv", "weight_scale", "scale")
_STACKED_SCALES = ("scale_inv", "scale", "scales")
_FP8_FORMATS = {
    ((128, 128), "F32"): FP8Block,
    ((128, 128), "BF16"): FP8Block,
    ((128, 128), "F8_E8M0"): FP8BlockUE8M0,
    ((128, 128), "U8"): FP8BlockUE8M0,
    ((1, 32), "F8_E8M0"): MXFP8,
    ((1, 32), "U8"): MXFP8,
}


class Block:
    """The tensors of one layer's MoE block, and which of them are still unclaimed."""

    def __init__(self, reader: CheckpointReader, family: Family, layer: int) -> None:
        places = [(p.format(layer) + names.block + ".", names) for p in PREFIXES for names in family.names]
        found = [(prefix, names) for prefix, names in places if any(reader.under(prefix))]
        if not found:
            tried = ", ".join(prefix for prefix, _ in places)
            raise CheckpointError(f"{reader.path}: layer {layer} has no tensors under any of {tried}")
        if len(found) > 1:
            raise CheckpointError(
                f"{reader.path}: layer {layer} is there twice, under {found[0][0]} and under {found[1][0]}"
            )
        self.reader = reader
        self.prefix, self.names = found[0]
        self._all = {name.removeprefix(self.prefix) for name in reader.under(self.prefix)}
        self._unclaimed = set(self._all)

    def find(self, pattern: str) -> str | None:
        """The full name of some tensor whose name within the block starts with the pattern, or None."""
        match = min((name for name in self._all if re.match(pattern, name)), default=None)
        return None if match is None else self.prefix + match

    def claim(self, *suffixes: str, what: str) -> str:
        """The full name of whichever of ``suffixes`` is there; none or several is an error."""
        found = [s for s in suffixes if s in self._all]
        if not found:
            names = " or ".join(self.prefix + s for s in suffixes)
            raise CheckpointError(f"{self.reader.path}: {what} is missing: no tensor {names}")
        if len(found) > 1:
            names = " and ".join(self.prefix + s for s in found)
            raise CheckpointError(f"{self.reader.path}: {what} is given twice, by {names}")
        self._unclaimed.discard(found[0])
        return self.prefix + found[0]

    def check(self, name: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> TensorInfo:
        """The tensor's info, after comparing it with the dtypes and shapes its slot takes."""
        info = self.reader.info(name)
        if info.dtype not in dtypes or (shapes and info.shape not in shapes):
            expected = " or ".join(str(list(s)) for s in shapes)
            raise CheckpointError(
                f"{self.reader.path}: {name} is {info}, expected {' or '.join(dtypes)} {expected}".rstrip()
            )
        return info

    def array(self, suffixes: Sequence[str], what: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> np.ndarray:
        """Claims, checks and reads one small tensor."""
        name = self.claim(*suffixes, what=what)
        self.check(name, dtypes, *shapes)
        return self.reader.get(name)

    def finish(self) -> None:
        """Raises for tensors that nothing claimed."""
        if self._unclaimed:
            names = sorted(self.prefix + name for name in self._unclaimed)
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise CheckpointError(
                f"{self.reader.path}: unexpected tensors {', '.join(names[:4])}{more}; loading without them would "
                "compute something else than the checkpoint means"
            )


@dataclasses.dataclass(frozen=True)
class Stack:
    """One projection [N, K] of all experts, where it lies in the files.

    Attributes:
      weights, scales: a name per expert, or the one name of a stack; ``scales`` is empty without.
      stacked: which of the two.
      n, k: logical outputs and inputs.
      first, step: row r of the projection is row ``first + step * r`` of the stored matrix.
      rows: rows of the stored matrix.
      transposed: the matrix is stored [K, N].
      per_tensor: one scale covers a whole matrix.
    """

    reader: CheckpointReader
    weights: tuple[str, ...]
    scales: tuple[str, ...]
    stacked: bool
    format: WeightFormat
    n: int
    k: int
    rows: int
    first: int = 0
    step: int = 1
    transposed: bool = False
    per_tensor: bool = False

    @property
    def grid(self) -> int:
        """A part of I that starts at a multiple of this keeps its scales as they are."""
        return 1 if self.per_tensor else self.format.block

    def values(self, expert: int, n: slice, k: slice) -> np.ndarray:
        """A view of an expert's stored values: rows ``n``, columns ``k`` (logical; 4-bit codes stay two a byte)."""
        matrix = self._one(self.weights, expert)
        matrix = matrix.T if self.transposed else matrix.reshape(self.rows, -1)
        per_byte = 2 if self.format.bits == 4 else 1
        return matrix[self._stored_rows(n), k.start // per_byte : -(-k.stop // per_byte)]

    def scale(self, expert: int, n: slice, k: slice) -> np.ndarray:
        """The scales of rows ``n`` and columns ``k``, which start at whole blocks: [blocks, blocks] f32 or e8m0."""
        bn, bk = self.format.block_n, self.format.block_k
        if self.per_tensor:
            whole = self.reader.get(self.scales[0 if self.stacked else expert]).reshape(-1)
            one = whole[expert if self.stacked and len(whole) > 1 else 0]
            return np.full((-(-(n.stop - n.start) // bn), -(-(k.stop - k.start) // bk)), one, np.float32)
        first = self.first // bn
        rows = self._stored_rows(n) if bn == 1 else slice(first + n.start // bn, first + -(-n.stop // bn))
        scale = self._one(self.scales, expert)[rows, k.start // bk : -(-k.stop // bk)]
        return scale.view(ml_dtypes.float8_e8m0fnu) if self.format.scale == "ue8m0" else scale.astype(np.float32)

    def _one(self, names: tuple[str, ...], expert: int) -> np.ndarray:
        return self.reader.get(names[0])[expert] if self.stacked else self.reader.get(names[expert])

    def _stored_rows(self, n: slice) -> slice:
        return slice(self.first + self.step * n.start, self.first + self.step * n.stop, self.step)


@dataclasses.dataclass(frozen=True)
class Projections:
    """Gate, up and down of the routed experts, or of a shared one (a stack of one)."""

    gate: Stack
    up: Stack
    down: Stack

    @property
    def format(self) -> WeightFormat:
        """What the checkpoint keeps these weights in."""
        return self.gate.format


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where one tensor may be: what it is, and the names that it and its scale may have."""

    what: str
    weights: Sequence[str]
    scales: Sequence[str]


class _Finder:
    """Claims the tensors of projections; the first one's format is then expected of all others."""

    def __init__(self, block: Block, fp8_block: tuple[int, int] | None) -> None:
        self._block, self._fp8_block = block, fp8_block
        self._kind: tuple[WeightFormat, bool, str] | None = None

    def stack(
        self, places: Sequence[_Place], n: int, k: int, *, experts: int | None = None, transposed: bool = False
    ) -> Stack:
        """Claims and checks a matrix [n, k] per place; with ``experts``, one stack of that many."""
        weights = tuple(self._block.claim(*place.weights, what=f"{place.what} weight") for place in places)
        quantized = self._block.reader.info(weights[0]).dtype in (*_FP8, *_FP4)
        scales: tuple[str, ...] = ()
        if quantized:
            scales = tuple(
                self._block.claim(*place.scales, what=f"the scale of {place.what} weight {name}")
                for place, name in zip(places, weights, strict=True)
            )
        lead = () if experts is None else (experts,)
        if self._kind is None:
            self._kind = self._detect(weights[0], scales[0] if scales else None, lead)
        fmt, per_tensor, dtype = self._kind
        for name in weights:
            self._block.check(name, (dtype,), *self._shapes(fmt, lead, n, k, transposed and not quantized))
        for name in scales:
            self._check_scale(name, fmt, per_tensor, lead, n, k)
        return Stack(
            reader=self._block.reader,
            weights=weights,
            scales=scales,
            stacked=experts is not None,
            format=fmt,
            n=n,
            k=k,
            rows=n,
            transposed=transposed and not quantized,
            per_tensor=per_tensor,
        )

    @staticmethod
    def _shapes(fmt: WeightFormat, lead: tuple[int, ...], n: int, k: int, transposed: bool) -> list[tuple[int, ...]]:
        if fmt.bits == 4:
            flat = (*lead, n, math.ceil(k / 2))
            return [flat, (*lead, n, k // 32, 16)] if k % 32 == 0 else [flat]
        return [(*lead, k, n) if transposed else (*lead, n, k)]

    @staticmethod
    def _per_tensor_shapes(lead: tuple[int, ...]) -> list[tuple[int, ...]]:
        return list(dict.fromkeys([lead, (*lead, 1), (*lead, 1, 1), (), (1,)]))

    def _detect(self, weight: str, scale: str | None, lead: tuple[int, ...]) -> tuple[WeightFormat, bool, str]:
        """Format, whether scales are per tensor, and the dtype of the values."""
        dtype = self._block.check(weight, (*FLOATS, *_FP8, *_FP4)).dtype
        if scale is None:
            return BF16, False, dtype
        if dtype in _FP4:
            return MXFP4, False, dtype
        info, block = self._block.reader.info(scale), self._fp8_block
        if block is None:
            if info.shape not in self._per_tensor_shapes(lead):
                raise CheckpointError(
                    f"{self._block.reader.path}: {scale} is {info}, but config.json has no weight_block_size to say "
                    "what one scale covers (it is never guessed from shapes)"
                )
            return FP8Block, True, dtype
        if (block, info.dtype) not in _FP8_FORMATS:
            known = ", ".join(f"{list(b)} {d}" for b, d in _FP8_FORMATS)
            raise CheckpointError(
                f"{self._block.reader.path}: {scale} is {info.dtype} for weight_block_size {list(block)}; "
                f"supported: {known}"
            )
        return _FP8_FORMATS[block, info.dtype], False, dtype

    def _check_scale(
        self, name: str, fmt: WeightFormat, per_tensor: bool, lead: tuple[int, ...], n: int, k: int
    ) -> None:
        shapes = [(*lead, math.ceil(n / fmt.block_n), math.ceil(k / fmt.block_k))]
        if per_tensor:
            shapes = self._per_tensor_shapes(lead)
        self._block.check(name, _E8M0 if fmt.scale == "ue8m0" else ("F32", "BF16"), *shapes)


def find_experts(
    block: Block, family: Family, experts: int, hidden: int, intermediate: int, fp8_block: tuple[int, int] | None
) -> Projections:
    """The routed experts' projections, from per-expert names or from stacks.

    Raises:
      CheckpointError: a slot without a tensor, with two, or with one of another dtype or shape.
    """
    single, stacked = block.find(r"experts\.\d+\."), block.find(r"experts\.(gate_up|down)_proj")
    if single and stacked:
        raise CheckpointError(
            f"{block.reader.path}: experts are there twice, one by one ({single}) and stacked ({stacked})"
        )
    finder = _Finder(block, fp8_block)
    if stacked is None:
        owners = {f"experts.{e}": f"expert {e}" for e in range(experts)}
        return _separate(finder, block.names, owners, hidden, intermediate)

    def fused(part: str, n: int, k: int) -> Stack:
        name = f"experts.{part}"
        place = _Place(f"the {name}", [name, f"{name}_blocks"], [f"{name}_{s}" for s in _STACKED_SCALES])
        return finder.stack([place], n, k, experts=experts, transposed=family.interleaved)

    gate_up, down = fused("gate_up_proj", 2 * intermediate, hidden), fused("down_proj", hidden, intermediate)
    first, step = (1, 2) if family.interleaved else (intermediate, 1)
    block_n = 1 if gate_up.per_tensor else gate_up.format.block_n
    if block_n > 1 and (step > 1 or intermediate % block_n):
        why = "their rows alternate" if step > 1 else f"they meet at row {intermediate}"
        raise CheckpointError(
            f"{block.reader.path}: {gate_up.weights[0]} has one scale for {block_n} rows, but gate and up share some "
            f"of these blocks, since {why}; store gate and up separately"
        )
    gate = dataclasses.replace(gate_up, n=intermediate, step=step)
    return Projections(gate, dataclasses.replace(gate, first=first), down)


def _separate(finder: _Finder, names: Names, owners: Mapping[str, str], hidden: int, intermediate: int) -> Projections:
    """Projections whose experts are tensors of their own; ``owners`` says what is under which name."""

    def stack(part: str, n: int, k: int) -> Stack:
        places = [
            _Place(f"{what}'s {part}", [f"{path}.{part}.weight"], [f"{path}.{part}.{s}" for s in _SCALES])
            for path, what in owners.items()
        ]
        return finder.stack(places, n, k)

    gate, up = (stack(part, intermediate, hidden) for part in (names.gate, names.up))
    return Projections(gate, up, stack(names.down, hidden, intermediate))


def find_shared(block: Block, hidden: int, intermediate: int, fp8_block: tuple[int, int] | None) -> Projections:
    """The shared experts' projections: one MLP of their total width."""
    owners = {block.names.shared: "the shared expert"}
    return _separate(_Finder(block, fp8_block), block.names, owners, hidden, intermediate)
