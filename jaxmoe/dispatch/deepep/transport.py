"""The transport of DeepEP's kernels."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmoe.cuda.deepep.sizes import combine_width
from jaxmoe.dispatch.base import Dispatched
from jaxmoe.dispatch.deepep import formats
from jaxmoe.dispatch.deepep.calls import Exchange, Way, bring_back, send
from jaxmoe.dispatch.deepep.context import EpContext
from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.ops.debug import debugging, guarded
from jaxmoe.ops.manual_axes import vary_together
from jaxmoe.ops.permute import expand_to_masked_slab, masked_slab_to_expand
from jaxmoe.ops.quantize import quantize
from jaxmoe.ops.rows import GroupedRows, psum_experts
from jaxmoe.quant.tensors import QuantizedRows

Array = jax.Array
Format = Literal["normal", "v2", "v2_psum", "ll"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """The way back, the expanded places that a slab was filled from, and T."""

    way: Way
    expanded: GroupedRows | None
    tokens: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class DeepEP:
    """Tokens travel by DeepEP's kernels, on NVLink; implements :class:`jaxmoe.dispatch.base.Dispatch`.

    A token goes once to each rank that holds any of its experts; that rank sums over its experts in f32 and rounds to
    bf16 (``v2_psum`` and ``ll`` round each expert's weighted row first), and the token's own rank sums over ranks in
    f32, in order of the token's choices, and rounds to bf16. So it is on one rank, too.

    =========== =====================================================================================================
    format      what arrives
    =========== =====================================================================================================
    ``normal``  [R·M, H], a row per token and rank, in order of sender and token; local ids [R·M, K]
    ``v2``      the same; in no particular order with ``deterministic=False``, which saves finding one
    ``v2_psum`` psum :class:`GroupedRows`, a row per token and expert, ready for the GEMMs
    ``ll``      masked :class:`GroupedRows` [El, R·M, H], as low-latency decoding has it
    =========== =====================================================================================================

    A repeated id of one token travels once, with the sum of its weights. Dispatch and combine of one context must run
    in the same order on all ranks: inside one program they do, whatever their data dependences; two programs that run
    at the same time need two contexts.

    Attributes:
      context: an open :class:`EpContext`.
      format: as above.
      deterministic: where rows lie follows from ids alone, also inside ``v2`` and ``v2_psum``; the latter then gathers
        all ranks' ids first. Results do not depend on it.
    """

    context: EpContext
    format: Format = "v2"
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise ValueError(f"format is {self.format!r}; one of {get_args(Format)} is needed")
        if self.format == "normal" and not self.deterministic:
            raise ValueError("format 'normal' is in order of sender and token; use 'v2' with deterministic=False")

    @property
    def _expand(self) -> bool:
        return self.format in ("v2_psum", "ll")

    @property
    def _exchange(self) -> Exchange:
        return Exchange(self.context.calls, self.context.wire, self._expand)

    def held(self, num_experts: int, replicated: int) -> int:
        """E / R and the replicated ones.

        Raises:
          ShapeError: the context was made for other numbers, or another number of ranks.
        """
        c = self.context
        if (num_experts, replicated) != (c.num_experts, c.replicated):
            raise ShapeError(
                f"the layer has {num_experts} experts and {replicated} fused shared ones; the {c} is for "
                f"{c.num_experts} and {c.replicated}"
            )
        ranks = lax.axis_size(c.axis)
        if ranks != c.sizes.ranks:
            raise ShapeError(f"mesh axis {c.axis!r} has {ranks} devices here; the {c} is for {c.sizes.ranks} ranks")
        return num_experts // ranks + replicated

    def dispatch(self, x: Array, ids: Array, weights: Array, num_experts: int) -> Dispatched:
        """Sends tokens; see the table for what arrives.

        Args:
          x: bf16 [T, H], T at most the context's ``tokens``.

        Raises:
          ShapeError: T, H or K is not what the context is for. FormatError: x is not bf16.
          RuntimeError: the context is closed.
        """
        c, s = self.context, self.context.sizes
        self.held(num_experts, c.replicated)
        _check(x, ids, c)
        x, ids, weights, me = vary_together(x, ids, weights, lax.axis_index(c.axis))
        if debugging():  # on all ranks' ids: one rank that stopped by itself would leave the others waiting
            ids = guarded(ids, _check_ids(num_experts + c.replicated), c.calls.gather(ids))
        tokens, even = x.shape[0], x.shape[0] * s.top_k
        if not tokens:  # every rank takes part, also one without tokens
            x, ids, weights = (
                jnp.pad(x, ((0, 1), (0, 0))),
                jnp.pad(ids, ((0, 1), (0, 0)), constant_values=-1),
                jnp.pad(weights, ((0, 1), (0, 0))),
            )
        ids, weights = formats.merge_repeats(formats.wire_ids(ids, num_experts, c.replicated, s.ranks, me), weights)
        out = self._exchange_rows(x, ids, weights, me)
        values, rows = out["rows"], out["rows"][:, : c.hidden]
        if c.quant is not None:
            rows = QuantizedRows(values, out["row_scales"], c.quant)
        if not self._expand:
            real = formats.received_rows(out["ranks"], s.received)
            ids = jnp.where(real[:, None], out["row_ids"], -1)
            return Dispatched(
                rows, ids, jnp.where(ids >= 0, out["row_weights"], 0.0), _State(_way(out, real), None, tokens), even
            )

        expert = psum_experts(out["ends"], s.alignment, s.expanded)[:, None]
        weights, way = jnp.where(expert >= 0, out["row_weights"][:, None], 0.0), _way(out, expert[:, 0] >= 0)
        grouped = GroupedRows(rows, out["ends"], "psum", s.alignment)
        if self.format == "v2_psum":
            return Dispatched(grouped, expert, weights, _State(way, None, tokens), even)
        places = grouped.with_rows(weights)
        slab, slab_weights = (expand_to_masked_slab(r, s.received) for r in (grouped, places))
        ids = formats.slab_experts(slab.group, slab.values.shape[1])
        weights = jnp.where(ids >= 0, slab_weights.values.reshape(-1, 1), 0.0)
        return Dispatched(slab, ids, weights, _State(way, places, tokens), even)

    def _exchange_rows(self, x: Array, ids: Array, weights: Array, me: Array) -> dict[str, Array]:
        """What arrives by name, places included; ``ends`` is [El], of real rows, if expanded."""
        c, s = self.context, self.context.sizes
        scales, places, ends = None, {"ids": ids}, None
        if c.quant is not None:
            quantized = quantize(x, c.quant)
            x, scales = quantized.values, quantized.scales
        if self.deterministic:
            places["slots"] = formats.slots_of(ids, s, me)
            if self._expand:
                places |= formats.expanded_places(c.calls.gather(ids), s, me)
                ends = places.pop("ends")
        out = send(self._exchange, _widen(x, c.wire.width), weights, scales, places)
        return out | {"ends": out["ends"][:-1] if ends is None else ends}

    def combine(self, y: Array, dispatched: Dispatched) -> Array:
        """Brings rows back and sums over ranks; f32 with the precision of bf16."""
        c, state = self.context, dispatched.state
        y = _widen(y.astype(jnp.bfloat16), combine_width(c.hidden))
        if state.expanded is not None:
            el, group = c.sizes.local_experts, state.expanded.group
            slab = GroupedRows(y.reshape(el, -1, y.shape[1]), group, "masked", c.sizes.alignment)
            y = masked_slab_to_expand(slab, state.expanded).values
        y, way = vary_together(y, state.way)
        y = bring_back(self._exchange, y, way)
        return y[: state.tokens, : c.hidden].astype(jnp.float32)


def _way(out: dict[str, Array], real: Array) -> Way:
    return Way(out["ids"], out["slots"], out["ranks"], out["metadata"], real)


def _check(x: Array, ids: Array, c: EpContext) -> None:
    if x.ndim != 2 or x.shape[1] != c.hidden or ids.shape != (x.shape[0], c.sizes.top_k):
        raise ShapeError(
            f"x is {list(x.shape)} and ids {list(ids.shape)}; the {c} takes [T, {c.hidden}] and [T, {c.sizes.top_k}]"
        )
    if x.shape[0] > c.sizes.tokens:
        raise ShapeError(
            f"{x.shape[0]} tokens per rank; the {c} holds {c.sizes.tokens}: make it with tokens={x.shape[0]}, or cut "
            "the batch"
        )
    if x.dtype != jnp.bfloat16:
        raise FormatError(
            f"x is {x.dtype}; DeepEP's kernels bring results back in bfloat16: cast x to it, or use the AllToAll "
            "transport"
        )


def _check_ids(limit: int) -> Any:
    def check(ids: np.ndarray) -> None:
        wrong = (ids < -1) | (ids >= limit)
        if wrong.any():
            rank, token, k = map(int, np.argwhere(wrong)[0])
            raise ShapeError(
                f"{int(wrong.sum())} ids are outside -1..{limit - 1}; the first is {ids[rank, token, k]}, of rank "
                f"{rank}, token {token}, choice {k}"
            )

    return check


def _widen(x: Array, width: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, width - x.shape[1]))) if width > x.shape[1] else x
