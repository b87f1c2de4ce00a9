"""What DeepEP's kernels give, in plain JAX inside shard_map: the reference of the kernels and of all that uses them.

Rows that the kernels leave alone hold poison. Where the kernels choose places themselves, this model takes an order
that nothing else takes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.cuda.deepep.sizes import Sizes, Wire, combine_width, result_shapes
from jaxmoe.dispatch.deepep.context import choose_wire
from jaxmoe.errors import ShapeError
from jaxmoe.quant.formats import BF16, ActivationQuant, WeightFormat

Array = jax.Array
POISON_INT = -(2**30)


def poison(like: jax.ShapeDtypeStruct) -> Array:
    floats = jnp.issubdtype(like.dtype, jnp.floating)
    return jnp.full(like.shape, jnp.nan if floats else POISON_INT, like.dtype)


def reduced(parts: Array, there: Array) -> Array:
    """The kernels' sum of bf16 ``parts`` [..., N, H] where ``there`` [..., N]: one bf16 add for up to two parts, else
    f32 in order and one rounding."""
    total = jnp.zeros((*parts.shape[:-2], parts.shape[-1]), jnp.float32)
    for i in range(parts.shape[-2]):
        part = jnp.where(there[..., i, None], parts[..., i, :], jnp.zeros((), parts.dtype)).astype(jnp.float32)
        total = total + part
    return total.astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class ModelCalls:
    """Stands for :class:`jaxmoe.dispatch.deepep.calls.Calls`."""

    sizes: Sizes
    axis: Any

    def dispatch(self, wire: Wire, arrays: dict[str, Array], *, mode: str, expand: bool) -> dict[str, Array]:
        s, x = self.sizes, arrays["x"]
        assert x.shape[1] == wire.width and x.dtype == wire.dtype, (x, wire)
        if not 1 <= x.shape[0] <= s.tokens:
            raise ShapeError("tokens")
        me = lax.axis_index(self.axis)
        every = {n: lax.all_gather(a, self.axis) for n, a in arrays.items() if n not in ("ranks", "metadata")}
        out, slots = receive(s, wire, every, me, mode=mode, expand=expand, given=arrays)
        if mode == "plain":
            out["slots"] = slots[me]
        return out

    def gather(self, ids: Array) -> Array:
        return lax.all_gather(ids, self.axis)

    def combine(self, arrays: dict[str, Array], *, expand: bool) -> dict[str, Array]:
        s, me = self.sizes, lax.axis_index(self.axis)
        assert arrays["rows"].shape == ((s.expanded if expand else s.received), combine_width(s.hidden))
        every = {n: lax.all_gather(a, self.axis) for n, a in arrays.items()}
        return bring_back(s, every, me, expand=expand)


def receive(
    s: Sizes, wire: Wire, every: dict[str, Array], me: Array, *, mode: str, expand: bool, given: dict[str, Array]
) -> tuple[dict[str, Array], Array]:
    """What rank ``me`` gets, from arrays of all ranks [R, T, ...]; and all ranks' slots."""
    ids = every["ids"]
    tokens, k, el = ids.shape[1], s.top_k, s.local_experts
    rank = jnp.arange(s.ranks, dtype=jnp.int32)
    goes = (jnp.where(ids >= 0, ids // el, -1)[..., None] == rank).any(2)  # [R, T, R]
    slots = every.get("slots")
    if slots is None:  # the last token first
        place = jnp.flip(jnp.cumsum(jnp.flip(goes, 1), 1, dtype=jnp.int32), 1) - 1
        owner = jnp.where(ids >= 0, ids // el, -1)
        later = jnp.arange(k)[:, None] < jnp.arange(k)
        last = ~((owner[..., :, None] == owner[..., None, :]) & later).any(-1)
        at = jnp.take_along_axis(place, jnp.maximum(owner, 0), 2)
        slots = jnp.where(last & (owner >= 0), rank[:, None, None] * s.tokens + at, -1)
    # each (sender, token) that comes here: its row
    owner = jnp.where(ids >= 0, ids // el, -1)
    place = jnp.max(jnp.where((slots >= 0) & (owner == me), slots - rank[:, None, None] * s.tokens, -1), axis=2)
    came = place >= 0
    ranks = jnp.cumsum(came.sum(1, dtype=jnp.int32), dtype=jnp.int32)
    row = jnp.where(came, place + (ranks - came.sum(1, dtype=jnp.int32))[:, None], s.received)

    def arrive(values: Array, into: Array) -> Array:
        flat = values.reshape(-1, *values.shape[2:]).astype(into.dtype)
        return into.at[row.reshape(-1)].set(flat, mode="drop")

    shapes = result_shapes(s, wire, expand=expand)
    local = ids - me * el
    local = jnp.where((local >= 0) & (local < el), local, -1)
    choice = jnp.arange(k, dtype=jnp.int32)
    source = rank[:, None] * s.tokens + jnp.arange(tokens, dtype=jnp.int32)
    highest = rank[:, None] * k + jnp.max(jnp.where(local >= 0, choice, -1), -1)
    counts = (local[..., None] == jnp.arange(el)).sum((0, 1, 2), dtype=jnp.int32)
    padded = (counts + s.alignment - 1) // s.alignment * s.alignment
    ends = jnp.pad(jnp.cumsum(padded, dtype=jnp.int32), (1, 0))
    scales = jnp.swapaxes(every["scales"], 1, 2)[:, :tokens] if "scales" in every else None
    metadata = poison(shapes["metadata"])
    metadata = metadata.at[:, 0].set(arrive(source, metadata[:, 0])).at[:, 1].set(arrive(highest, metadata[:, 1]))

    if not expand:
        out = {"rows": arrive(every["x"], poison(shapes["rows"])), "row_ids": arrive(local, poison(shapes["row_ids"]))}
        if "weights" in every:
            out["row_weights"] = arrive(every["weights"], poison(shapes["row_weights"]))
        if scales is not None:
            dense = arrive(scales, jnp.swapaxes(poison(shapes["row_scales"]), 0, 1))
            out["row_scales"] = jnp.swapaxes(dense, 0, 1)
    else:
        if mode == "again":
            rows_of = jnp.full((*ids.shape,), -1, jnp.int32)
            at = jnp.minimum(row, s.received - 1)
            rows_of = jnp.where(came[..., None], given["metadata"][at][..., 2:], -1)
        else:  # the last row of an expert first
            mine = local[..., None] == jnp.arange(el)
            flat = mine.reshape(-1, el)
            order = jnp.flip(jnp.cumsum(jnp.flip(flat, 0), 0, dtype=jnp.int32), 0) - 1
            rows_of = jnp.where(flat, ends[:-1] + order, -1).max(-1).reshape(ids.shape)
        metadata = metadata.at[:, 2:].set(arrive(rows_of, metadata[:, 2:]))
        target = jnp.where(rows_of >= 0, rows_of, s.expanded).reshape(-1)

        def spread(values: Array, into: Array) -> Array:
            return into.at[target].set(jnp.repeat(values.reshape(-1, *values.shape[2:]), k, 0), mode="drop")

        out = {"rows": spread(every["x"], poison(shapes["rows"]))}
        if "weights" in every:
            weights = poison(shapes["row_weights"])
            out["row_weights"] = weights.at[target].set(every["weights"].reshape(-1), mode="drop")
        if scales is not None:
            dense = spread(scales, jnp.swapaxes(poison(shapes["row_scales"]), 0, 1))
            out["row_scales"] = jnp.swapaxes(dense, 0, 1)
        ends = ends.at[:-1].add(counts)
    if mode != "again":
        out |= {"metadata": metadata, "ranks": ranks, "ends": ends, "counts": counts}
    return out, slots


def bring_back(s: Sizes, every: dict[str, Array], me: Array, *, expand: bool) -> dict[str, Array]:
    """What rank ``me`` gets back, from arrays of all ranks [R, ...]."""
    tokens, k = every["ids"].shape[1], s.top_k
    parts, weights, there = [], [], []
    for rank in range(s.ranks):
        rows, metadata, ranks = (every[n][rank] for n in ("rows", "metadata", "ranks"))
        real = jnp.arange(s.received) < ranks[-1]
        source = jnp.where(real, metadata[:, 0], -1)
        here = real & (source // s.tokens == me)
        token = jnp.where(here, source % s.tokens, tokens)
        if expand:
            at = jnp.where(real[:, None], metadata[:, 2:], -1)
            row = reduced(rows[jnp.maximum(at, 0)], at >= 0)
            if "weights" in every:
                weight = jnp.where(at >= 0, every["weights"][rank][jnp.maximum(at, 0)], 0.0)
        else:
            row = rows
            if "weights" in every:
                weight = every["weights"][rank]
        parts.append(jnp.zeros((tokens, rows.shape[1]), rows.dtype).at[token].set(row, mode="drop"))
        there.append(jnp.zeros(tokens, bool).at[token].set(True, mode="drop"))
        if "weights" in every:
            weights.append(jnp.zeros((tokens, k), jnp.float32).at[token].set(weight, mode="drop"))
    # Ranks are added in order of the last choice that names them.
    ids = every["ids"][me]
    owner = jnp.where(ids >= 0, ids // s.local_experts, -1)
    named = owner[:, None, :] == jnp.arange(s.ranks)[:, None]
    order = jnp.argsort(jnp.max(jnp.where(named, jnp.arange(k), -1), -1), axis=1)  # [T, R]
    rows, there_too = jnp.stack(parts, 1), jnp.stack(there, 1)
    y = reduced(jnp.take_along_axis(rows, order[..., None], 1), jnp.take_along_axis(there_too, order, 1))
    out = {"y": y}
    if weights:
        back = jnp.take_along_axis(jnp.stack(weights, 1), jnp.maximum(owner, 0)[:, None, :], axis=1)[:, 0]
        out["token_weights"] = jnp.where(ids >= 0, back, 0.0)
    return out


class ModelContext:
    """Stands for an EpContext."""

    def __init__(
        self,
        axis: Any,
        ranks: int,
        *,
        tokens: int,
        hidden: int,
        num_experts: int,
        top_k: int,
        replicated: int = 0,
        weights: WeightFormat = BF16,
        wire: str = "auto",
        alignment: int = 8,
    ):
        self.axis, self.hidden, self.num_experts, self.replicated = axis, hidden, num_experts, replicated
        self.quant: ActivationQuant | None
        self.quant, self.wire = choose_wire(hidden, weights, wire)
        experts = num_experts + ranks * replicated
        self.sizes = Sizes(ranks=ranks, tokens=tokens, hidden=hidden, experts=experts, top_k=top_k, alignment=alignment)
        self.calls = ModelCalls(self.sizes, axis)
