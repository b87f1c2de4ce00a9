"""LaunchSpecs of DeepEP's custom calls. One call is one exchange: two kernels that must not be taken apart.

``dispatch`` sends tokens and copies what arrived out of the shared buffer, ``combine`` sends results back and adds them
up. Between two calls nothing of value is in the buffer, so that only their order on all ranks matters.

=========== ================================================================================================
argument    of ``dispatch``
=========== ================================================================================================
x           [T, width]
scales      [scales, align(T, 4)], column t of token t
ids         int32 [T, K], -1 for none; a token names an expert once
weights     f32 [T, K]
slots       int32 [T, K]: rank·M + place among its sender's rows, at one choice per receiving rank; else -1
ranks       int32 [R], inclusive prefix sum of rows received from each rank
metadata    int32 [R·M, 2+K]
=========== ================================================================================================

=========== ================================================================================================
result      of ``dispatch``; rows that nothing arrived in hold what was in memory before
=========== ================================================================================================
rows        [R·M, width], by sender, then place; expanded: sorted by expert, each starting at a multiple of A
row_scales  [scales, align(rows, 4)]
row_ids     int32 [R·M, K], local ids, -1 for experts elsewhere; not expanded only
row_weights f32 [R·M, K], also those of experts elsewhere; expanded: [rows]
metadata    int32 [R·M, 2+K]: sender·M + its token, sender·K + the highest local choice, expanded: row of each choice
ranks       as above
ends        int32 [El+1]: exclusive prefix sum of aligned counts; expanded: each expert's end of real rows instead
counts      int32 [El], real rows per expert
slots       as above, chosen by the kernel in no particular order
=========== ================================================================================================

``gather`` gives every rank all ranks' ids. ``combine`` takes rows [R·M or expanded, H] bf16, weights or None, metadata,
ranks and ids, and gives y [T, H] bf16, and weights f32 [T, K] if it was given any: what each rank had for its experts.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Literal

import jax
import jax.numpy as jnp

from jaxmoe.cuda.deepep.sizes import NOTIFY_WARPS, SMEM, Sizes, Wire, combine_width, result_shapes
from jaxmoe.cuda.deepep.template import combine_source, copy_source, dispatch_source, gather_source, reduce_source
from jaxmoe.cuda.launch import Buffer, Integer, LaunchSpec, Param, PeerField, Pointer, Struct
from jaxmoe.cuda.source import KernelSource
from jaxmoe.errors import ShapeError
from jaxmoe.sizes import round_up

Mode = Literal["plain", "given", "again"]
"""Who chooses places: the kernel; the caller (then ``slots`` is an argument); or the caller who also knows ``ranks``
(and ``metadata`` if expanded) from a dispatch before, and wants rows only."""

_NULL = Pointer(None)


@dataclasses.dataclass(frozen=True)
class Call:
    """One custom call.

    Attributes:
      name: what runs.
      arguments: names, in order. results: shapes by name, in order.
      launches: (source, spec) in order; a spec's cubin is the source's name until it is replaced by a key.
    """

    name: str
    arguments: tuple[str, ...]
    results: dict[str, jax.ShapeDtypeStruct]
    launches: tuple[tuple[KernelSource, LaunchSpec], ...]


def dispatch(
    arch: str, s: Sizes, wire: Wire, context: int, tokens: int, *, mode: Mode, expand: bool, weights: bool = True
) -> Call:
    """Sends ``tokens`` tokens to the ranks of their experts; see the tables above.

    Args:
      arch: ``sm_90a`` or ``sm_100f``.
      context: id of the peer context whose buffer is used.
      weights: whether weights travel.

    Raises:
      ShapeError: more tokens than the buffer holds.
    """
    _check_tokens(s, tokens)
    again = mode == "again"
    wanted = {"x": True, "scales": wire.scales, "ids": True, "weights": weights, "slots": mode != "plain"}
    wanted |= {"ranks": again, "metadata": again and expand}
    arguments = tuple(name for name, there in wanted.items() if there)
    given = {"row_ids": not expand, "row_weights": weights}
    given |= dict.fromkeys(("metadata", "ranks", "ends", "counts"), not again)
    results = {n: a for n, a in result_shapes(s, wire, expand=expand).items() if given.get(n, True)}
    if mode == "plain":
        results["slots"] = jax.ShapeDtypeStruct((tokens, s.top_k), jnp.int32)
    at = _Places(arguments, tuple(results))

    choices, words = 4 * tokens * s.top_k, 4 * s.local_experts
    send = (
        at("x", tokens * wire.row_bytes),
        at("scales", 4 * wire.scales * round_up(tokens, 4)),
        at("ids", choices),
        at("weights", choices),
        _NULL,
        _NULL,
        at("ranks", 4 * s.ranks),
        at("ends", words + 4),
        at("counts", words),
        at("slots", choices),
        Integer(tokens),
        Integer(1),
        Integer(round_up(tokens, 4)),
        _comm(s, context),
        PeerField(context, "window"),
        PeerField(context, "base"),
        PeerField(context, "workspace"),
        _NULL,
        PeerField(context, "rank"),
    )
    rows = s.expanded if expand else s.received
    copy = (
        PeerField(context, "base"),
        PeerField(context, "workspace"),
        at("ranks", 4 * s.ranks),
        at("ends", words + 4) if expand else _NULL,
        at("rows", rows * wire.row_bytes),
        at("row_scales", 4 * wire.scales * round_up(rows, 4)),
        at("row_ids", 4 * rows * s.top_k),
        at("row_weights", 4 * rows * (1 if expand else s.top_k)),
        at("metadata", 4 * s.received * (2 + s.top_k)),
        _NULL,
        _NULL,
        Integer(s.received),
        Integer(1),
        Integer(round_up(rows, 4)),
        Integer(0),
        PeerField(context, "rank"),
    )
    notify = not again
    source = dispatch_source(arch, s, wire, given_slots=mode != "plain", notify=notify)
    warps = s.dispatch_warps(wire, notify=notify) + (NOTIFY_WARPS if notify else 0)
    epilogue = copy_source(arch, s, wire, expand=expand, given_rows=again)
    launches = (_exchange(source, s, warps, send), _epilogue(epilogue, s, s.copy_warps(wire), copy))
    return Call("jaxmoe_deepep_dispatch", arguments, results, launches)


def combine(arch: str, s: Sizes, context: int, tokens: int, *, expand: bool, weights: bool = False) -> Call:
    """Brings results of ``tokens`` tokens back; see the end of the table above.

    Raises:
      ShapeError: more tokens than the buffer holds.
    """
    _check_tokens(s, tokens)
    width, rows = combine_width(s.hidden), s.expanded if expand else s.received
    arguments = tuple(n for n in ("rows", "weights", "metadata", "ranks", "ids") if weights or n != "weights")
    results = {"y": jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)}
    if weights:
        results["token_weights"] = jax.ShapeDtypeStruct((tokens, s.top_k), jnp.float32)
    at = _Places(arguments, tuple(results))
    choices = 4 * tokens * s.top_k
    send = (
        at("rows", 2 * rows * width),
        at("weights", 4 * rows * (1 if expand else s.top_k)),
        at("metadata", 4 * s.received * (2 + s.top_k)),
        at("ranks", 4 * s.ranks),
        _comm(s, context),
        PeerField(context, "window"),
        PeerField(context, "base"),
        PeerField(context, "workspace"),
        PeerField(context, "rank"),
        Integer(s.received),
    )
    add_up = (
        at("y", 2 * tokens * width),
        at("token_weights", choices),
        at("ids", choices),
        PeerField(context, "base"),
        _NULL,
        _NULL,
        Integer(tokens),
        Integer(0),
        PeerField(context, "rank"),
    )
    launches = (
        _exchange(combine_source(arch, s, expand=expand), s, s.combine_warps, send),
        _epilogue(reduce_source(arch, s, expand=expand), s, s.reduce_warps, add_up),
    )
    return Call("jaxmoe_deepep_combine", arguments, results, launches)


def gather(arch: str, s: Sizes, context: int, tokens: int) -> Call:
    """All ranks' ids, int32 [R, T, K], from this rank's, [T, K].

    Raises:
      ShapeError: more tokens than the buffer holds.
    """
    _check_tokens(s, tokens)
    count = tokens * s.top_k
    results = {"all_ids": jax.ShapeDtypeStruct((s.ranks, tokens, s.top_k), jnp.int32)}
    at = _Places(("ids",), tuple(results))
    params = (
        at("ids", 4 * count),
        at("all_ids", 4 * s.ranks * count),
        Integer(count),
        _comm(s, context),
        PeerField(context, "window"),
        PeerField(context, "base"),
        PeerField(context, "workspace"),
        PeerField(context, "rank"),
    )
    source = gather_source(arch, s)
    spec = LaunchSpec(source.name, source.name, (1, 1, 1), (1024, 1, 1), 0, params)
    return Call("jaxmoe_deepep_gather", ("ids",), results, ((source, spec),))


class _Places:
    """Where a named array of a call is; a null pointer for one it does not have."""

    def __init__(self, arguments: tuple[str, ...], results: tuple[str, ...]):
        self._buffers = {name: Buffer("argument", i) for i, name in enumerate(arguments)}
        self._buffers |= {name: Buffer("result", i) for i, name in enumerate(results)}

    def __call__(self, name: str, nbytes: int) -> Pointer:
        buffer = self._buffers.get(name)
        return _NULL if buffer is None else Pointer(buffer, nbytes)


def _comm(s: Sizes, context: int) -> Struct:
    """``ncclDevComm`` of shims/deep_ep/nccl_device.h: rank, ranks, rank, ranks, 0."""
    rank = PeerField(context, "rank")
    return Struct(struct.pack("<5i", 0, s.ranks, 0, s.ranks, 0), ((0, rank), (8, rank)))


def _exchange(source: KernelSource, s: Sizes, warps: int, params: tuple[Param, ...]) -> tuple[KernelSource, LaunchSpec]:
    """A kernel that meets its peers: all its blocks must run at the same time."""
    cluster = 1 if s.num_sms % 2 else 2
    grid, block = (s.num_sms, 1, 1), (32 * warps, 1, 1)
    return source, LaunchSpec(source.name, source.name, grid, block, SMEM, params, cluster=cluster, cooperative=True)


def _epilogue(source: KernelSource, s: Sizes, warps: int, params: tuple[Param, ...]) -> tuple[KernelSource, LaunchSpec]:
    """A kernel on the device's own memory, which may be set up while the one before it ends."""
    grid, block = (s.epilogue_sms, 1, 1), (32 * warps, 1, 1)
    return source, LaunchSpec(source.name, source.name, grid, block, SMEM, params, pdl=True)


def _check_tokens(s: Sizes, tokens: int) -> None:
    if not 1 <= tokens <= s.tokens:
        raise ShapeError(
            f"{tokens} tokens per rank; the buffer is for 1 to {s.tokens}: make the EpContext with tokens={tokens}, or "
            "cut the batch"
        )
