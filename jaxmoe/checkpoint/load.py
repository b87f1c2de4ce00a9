"""One MoE layer of a checkpoint as parameters, kept in the checkpoint's format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxmoe.checkpoint.layer import FoundLayer
from jaxmoe.checkpoint.slots import Projections, Stack
from jaxmoe.config import Execution, MoEConfig
from jaxmoe.errors import CheckpointError, FormatError, ShapeError
from jaxmoe.layer.build import expert_weights
from jaxmoe.layer.params import MoEParams, RouterParams, SharedParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.layer.plan import Plan, plan
from jaxmoe.ops import kernel_format
from jaxmoe.quant.convert import convert
from jaxmoe.quant.formats import WeightFormat
from jaxmoe.quant.sharding import stack_experts
from jaxmoe.quant.tensors import GroupedWeight
from jaxmoe.quant.weights import from_canonical
from jaxmoe.router import Routing

Array = jax.Array
_Triple = tuple[GroupedWeight, GroupedWeight, GroupedWeight]


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedMoE:
    """A layer from a checkpoint, ready to be called.

    ``jax.jit(loaded)(x)`` works and bakes the weights into the program as constants: that suits small layers. For
    large ones, and to share one program among layers of the same config, pass the parameters in::

      run = jax.jit(jaxmoe.moe, static_argnames=("config", "execution"))
      y = run(loaded.params, x, config=loaded.config, execution=loaded.execution)

    Attributes:
      config: what ``params`` are; of a shard, its own I (and all E experts, since the router knows them all).
      params: the parameters of :func:`jaxmoe.moe`.
      execution: how a call runs.
    """

    config: MoEConfig
    params: MoEParams
    execution: Execution = dataclasses.field(default_factory=Execution)

    def __call__(
        self,
        x: Array,
        *,
        token_ids: Array | None = None,
        valid: Array | None = None,
        routing: Routing | None = None,
    ) -> Array:
        """:func:`jaxmoe.moe` of this layer: y [..., H] of x [..., H]; arguments and errors are the same.

        A layer of which only some ``experts`` were loaded refuses the call: its ids name experts elsewhere.
        """
        return moe(self.params, x, self.config, self.execution, token_ids=token_ids, valid=valid, routing=routing)

    def plan(self, tokens: int, *, device: str | None = None) -> Plan:
        """What a call with ``tokens`` tokens will do: see :func:`jaxmoe.plan`.

        x is taken to be in the dtype of the weights, bf16 for quantised ones.
        """
        values = self.params.experts.gate_up.values
        itemsize = 2 if self.config.weights.quantized else values.dtype.itemsize
        return plan(self.config, tokens, self.execution, device=device, itemsize=itemsize)


def load_config(path: str | Path, layer: int) -> MoEConfig:
    """The config that :func:`load_moe` gives without options, from config.json and the tensors' headers alone.

    Raises:
      CheckpointError: as :func:`load_moe`.
    """
    found = FoundLayer(path, layer)
    shared = found.experts.format if found.shared is None else found.shared.format
    return found.moe_config(found.experts.format, shared, found.intermediate, found.shared_width, False)


def load_moe(
    path: str | Path,
    layer: int,
    *,
    weights: WeightFormat | Literal["auto"] | None = None,
    shared_weights: WeightFormat | Literal["auto"] | None = None,
    experts: range | None = None,
    tp: tuple[int, int] | None = None,
    fuse_shared: bool = False,
    allow_lossy: bool = False,
    execution: Execution | None = None,
    progress: bool = True,
) -> LoadedMoE:
    """Loads one MoE layer. Weights stay in the checkpoint's format; only this layer's bytes are read.

    Every slot is filled by exactly one tensor and every tensor of the block is used, or nothing is loaded. All
    experts' tensors are checked, also where only some are loaded.

    Args:
      path: directory with config.json and safetensors files.
      layer: index of the decoder layer.
      weights: convert the routed experts to this format; None keeps them, ``"auto"`` takes the one that kernels on this
        device run (:func:`jaxmoe.ops.kernel_format`).
      shared_weights: likewise for separate shared experts; None is ``"auto"`` if ``weights`` is. Fused ones take the
        routed experts' format.
      experts: the experts this device holds, e.g. ``range(64, 128)``; None: all. Shared experts come whole.
      tp: (rank, ranks): this device's part of I, of the routed and of the shared experts. Outputs of all ranks are to
        be summed; the down bias is on rank 0 alone. Where a part cuts a block of scales it is stored from the block's
        start on, with zeros in place of what other ranks hold: exact, and less than two blocks wider.
      fuse_shared: shared experts become the last slots of the routed stack.
      allow_lossy: let a conversion change values; it then warns and reports them.
      execution: how calls of the layer run; None is ``Execution()``.
      progress: show a bar, in matrices.

    Raises:
      CheckpointError: a tensor is missing, unexpected, given twice, malformed, or of another shape or dtype; the
        layer is dense; config.json lacks a key or asks for something unknown.
      ShapeError: ``experts``, ``tp`` or ``fuse_shared`` do not fit the layer.
      FormatError: no conversion leads to ``weights`` or ``shared_weights``, or they are no formats.
      LossyConversionError: a conversion would change values.
    """
    found = FoundLayer(path, layer)
    rank, _ = tp = _check_tp((0, 1) if tp is None else tp)
    experts = _check_experts(experts, found.router.num_experts)
    slots = _check_fused(found, experts, shared_weights) if fuse_shared else 0
    fmt = _format("weights", weights, found.experts.format)
    grid = found.experts.gate.grid
    if slots and found.shared is not None:
        grid = max(grid, found.shared.gate.grid)
    cut = _cut("intermediate", found.intermediate, tp, grid)
    shared_fmt, shared_width, shared = fmt, slots * cut.width, None
    matrices = 3 * (len(experts) + (0 if found.shared is None else max(slots, 1)))
    with tqdm(total=matrices, desc=found.name, unit="matrix", disable=not progress) as bar:

        def read(source: Projections, ids: range, part: _Cut, target: WeightFormat) -> _Triple:
            def one(stack: Stack, n: _Cut, k: _Cut) -> GroupedWeight:
                return convert(_read(stack, n, k, ids, bar.update), target, allow_lossy=allow_lossy)

            h = _Cut(0, found.hidden, 0, found.hidden)
            return one(source.gate, part, h), one(source.up, part, h), one(source.down, h, part)

        stacks = [read(found.experts, experts, cut, fmt)]
        if found.shared is not None:
            vector = None if found.shared_gate is None else _f32(found.shared_gate)
            for slot in range(slots):
                part = _cut("intermediate", found.intermediate, tp, grid, first=slot * found.intermediate)
                if part.width != cut.width:
                    raise ShapeError(
                        f"part {part.start} to {part.stop} of the shared experts cuts blocks of {grid} elsewhere than "
                        "the routed experts' part does; set fuse_shared=False"
                    )
                stacks.append(read(found.shared, range(1), part, fmt))
            own = None
            if not slots:
                asked = weights if weights == "auto" and shared_weights is None else shared_weights
                shared_fmt = _format("shared_weights", asked, found.shared.format)
                shared_cut = _cut("shared intermediate", found.shared_width, tp, found.shared.gate.grid)
                shared_width = shared_cut.width
                own = expert_weights(*read(found.shared, range(1), shared_cut, shared_fmt))
            shared = SharedParams(own, vector)
    gate, up, down = stacks[0] if not slots else (stack_experts(parts) for parts in zip(*stacks, strict=True))
    routed = expert_weights(gate, up, down, **_biases(found, experts, cut, rank))
    params = MoEParams(_router(found), routed, shared)
    config = found.moe_config(fmt, shared_fmt, cut.width, shared_width, bool(slots))
    return LoadedMoE(config, params, Execution() if execution is None else execution)


def _format(name: str, asked: WeightFormat | str | None, stored: WeightFormat) -> WeightFormat:
    if asked is None:
        return stored
    if asked == "auto":
        return kernel_format(stored)
    if not isinstance(asked, WeightFormat):
        raise FormatError(f"{name} is {asked!r}; a format such as jaxmoe.FP8Block, None or 'auto' is needed")
    return asked


def _check_tp(tp: tuple[int, int]) -> tuple[int, int]:
    rank, ranks = tp
    if not 0 <= rank < ranks:
        raise ShapeError(f"tp is rank {rank} of {ranks}; the rank must be within 0..{ranks - 1}")
    return tp


def _check_experts(experts: range | None, count: int) -> range:
    if experts is None:
        return range(count)
    if experts.step != 1 or not 0 <= experts.start < experts.stop <= count:
        raise ShapeError(f"experts {experts} are no contiguous part of the layer's {count}; use e.g. range(0, {count})")
    return experts


def _check_fused(found: FoundLayer, experts: range, shared_weights: WeightFormat | str | None) -> int:
    """The number of slots that fused shared experts take."""
    reason = None
    if found.shared is None:
        reason = "this layer has none"
    elif len(experts) != found.router.num_experts:
        reason = f"only {experts} of {found.router.num_experts} are loaded"
    elif found.shared_width % found.intermediate:
        reason = f"their width {found.shared_width} is no multiple of {found.intermediate}"
    elif shared_weights is not None:
        reason = f"they take those experts' format, while shared_weights is {shared_weights!r}"
    if reason is not None:
        raise ShapeError(f"fuse_shared puts shared experts behind all routed ones, but {reason}; set fuse_shared=False")
    return found.shared_width // found.intermediate


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A rank's part [start, stop) of a width, stored from ``low`` on in ``width`` places; the rest is zeros.

    ``low`` is on the grid of the format's blocks, so that scales cover what they covered before the cut.
    """

    start: int
    stop: int
    low: int
    width: int

    @property
    def inside(self) -> slice:
        return slice(self.start - self.low, self.stop - self.low)


def _cut(what: str, size: int, tp: tuple[int, int], grid: int, first: int = 0) -> _Cut:
    """The part of [first, first + size) that a rank holds; all ranks' parts are stored equally wide."""
    rank, ranks = tp
    if size % ranks:
        raise ShapeError(
            f"{what} {size} does not divide by tp {ranks}, so that ranks would not hold matching slices of gate and "
            f"up; choose a tp that divides {size}"
        )
    part = size // ranks
    starts = [first + r * part for r in range(ranks)]
    lows = [start // grid * grid for start in starts]
    width = part
    if lows != starts:
        width = max(-(-(start + part) // grid) * grid - low for start, low in zip(starts, lows, strict=True))
    return _Cut(starts[rank], starts[rank] + part, lows[rank], width)


def _read(source: Stack, n: _Cut, k: _Cut, experts: range, done: Callable[[int], object]) -> GroupedWeight:
    """Reads rows ``n`` and columns ``k`` of some experts' matrices."""
    fmt = source.format
    per_byte = 2 if fmt.bits == 4 else 1
    if k.start % per_byte or k.width % per_byte:
        raise ShapeError(f"columns {k.start} to {k.stop} cut a byte of {fmt.name}, which holds two; use a smaller tp")
    part = slice(n.start, n.stop), slice(k.start, k.stop)
    into = n.inside, slice(k.inside.start // per_byte, -(-k.inside.stop // per_byte))
    blocks = slice(n.low, n.stop), slice(k.low, k.stop)
    dtype = source.values(experts.start, *part).dtype
    # float16 is no storage format here, and bfloat16 would round it
    values = np.zeros((len(experts), n.width, k.width // per_byte), np.float32 if dtype == np.float16 else dtype)
    scales = None
    if fmt.quantized:
        shape = len(experts), -(-n.width // fmt.block_n), -(-k.width // fmt.block_k)
        scales = np.ones(shape, source.scale(experts.start, *blocks).dtype)
    for slot, expert in enumerate(experts):
        values[slot][into] = source.values(expert, *part)
        if scales is not None:
            scale = source.scale(expert, *blocks)
            scales[slot, : scale.shape[0], : scale.shape[1]] = scale
        done(1)
    try:
        return from_canonical(values, scales, fmt)
    except FormatError as e:
        names = source.scales if source.stacked else source.scales[experts.start : experts.stop]
        raise CheckpointError(f"{names[0]}{' and on' if len(names) > 1 else ''}: {e}") from e


def _f32(a: np.ndarray) -> Array:
    return jnp.asarray(a.astype(np.float32).reshape(-1))


def _router(found: FoundLayer) -> RouterParams:
    def optional(a: np.ndarray | None) -> Array | None:
        return None if a is None else _f32(a)

    table, count = found.tid2eid, found.router.num_experts
    if table is not None and (table.min() < 0 or table.max() >= count):
        raise CheckpointError(
            f"{found.name}: tid2eid holds expert ids {table.min()} to {table.max()}; they must be in 0..{count - 1}"
        )
    return RouterParams(
        kernel=jnp.asarray(np.ascontiguousarray(found.kernel.astype(np.float32).T)),
        logit_bias=optional(found.logit_bias),
        correction_bias=optional(found.correction_bias),
        tid2eid=None if table is None else jnp.asarray(table.astype(np.int32)),
    )


def _biases(found: FoundLayer, experts: range, cut: _Cut, rank: int) -> dict[str, Array]:
    if found.gate_up_bias is None or found.down_bias is None:
        return {}

    def part(bias: np.ndarray) -> Array:
        out = np.zeros((len(experts), cut.width), np.float32)
        out[:, cut.inside] = bias[:, cut.start : cut.stop]
        return jnp.asarray(out)

    mine, down = slice(experts.start, experts.stop), found.down_bias.astype(np.float32)
    gate_up = found.gate_up_bias[mine].astype(np.float32)
    half = found.intermediate
    gate, up = (
        (gate_up[:, 0::2], gate_up[:, 1::2]) if found.family.interleaved else (gate_up[:, :half], gate_up[:, half:])
    )
    # Partial outputs are summed over ranks, so that one rank alone may add the bias.
    return {
        "gate_bias": part(gate),
        "up_bias": part(up),
        "down_bias": jnp.asarray(down[mine] if rank == 0 else np.zeros_like(down[mine])),
    }
