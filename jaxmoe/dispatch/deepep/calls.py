"""The exchanges as JAX operations: custom calls, and their gradients, which are exchanges the other way."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.cuda.deepep import specs
from jaxmoe.cuda.deepep.sizes import Sizes, Wire, combine_wire
from jaxmoe.cuda.kernel import run_kernels

Array = jax.Array
Arrays = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Calls:
    """The custom calls of one peer context.

    XLA may not leave one out.

    Attributes:
      arch: what kernels are compiled for. sizes: of the context. context: its id.
      command_buffers: whether XLA may record them into its command buffers.
    """

    arch: str
    sizes: Sizes
    context: int
    command_buffers: bool = False

    def dispatch(self, wire: Wire, arrays: Arrays, *, mode: specs.Mode, expand: bool) -> Arrays:
        """:func:`jaxmoe.cuda.deepep.specs.dispatch` on arrays by name."""
        call = self.plan_dispatch(wire, arrays["x"].shape[0], mode=mode, expand=expand, weights="weights" in arrays)
        return self._run(call, arrays)

    def combine(self, arrays: Arrays, *, expand: bool) -> Arrays:
        """:func:`jaxmoe.cuda.deepep.specs.combine` on arrays by name."""
        return self._run(self.plan_combine(arrays["ids"].shape[0], expand=expand, weights="weights" in arrays), arrays)

    def gather(self, ids: Array) -> Array:
        """All ranks' ids, int32 [R, T, K], from this rank's, [T, K]."""
        call = specs.gather(self.arch, self.sizes, self.context, ids.shape[0])
        return self._run(call, {"ids": ids})["all_ids"]

    def plan_dispatch(self, wire: Wire, tokens: int, **options: Any) -> specs.Call:
        """What :meth:`dispatch` runs."""
        return specs.dispatch(self.arch, self.sizes, wire, self.context, tokens, **options)

    def plan_combine(self, tokens: int, **options: Any) -> specs.Call:
        """What :meth:`combine` runs."""
        return specs.combine(self.arch, self.sizes, self.context, tokens, **options)

    def _run(self, call: specs.Call, arrays: Arrays) -> Arrays:
        results = run_kernels(
            call.launches,
            [arrays[name] for name in call.arguments],
            list(call.results.values()),
            name=call.name,
            command_buffer=self.command_buffers,
            has_side_effect=True,
        )
        return dict(zip(call.results, results, strict=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Way:
    """What brings results back: where tokens went, and where rows came from.

    Attributes:
      ids: int32 [T, K]. slots: int32 [T, K].
      ranks: int32 [R]. metadata: int32 [R·M, 2+K].
      real: bool [rows], whether anything arrived there.
    """

    ids: Array
    slots: Array
    ranks: Array
    metadata: Array
    real: Array


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How a context is used; static.

    Attributes:
      calls: a :class:`Calls`, or what stands for one.
      wire: what travels to experts. expand: one row per expert instead of one per rank.
    """

    calls: Any
    wire: Wire
    expand: bool


def send(exchange: Exchange, x: Array, weights: Array, scales: Array | None, places: Arrays) -> Arrays:
    """Sends rows x [T, width] with their weights.

    Differentiable in x, if it is as wide as what comes back, and in weights.

    Args:
      places: ``ids`` and, where the caller chooses places, ``slots``, ``ranks`` and ``metadata``.

    Returns:
      What arrives, by name, and ``places``.
    """
    out: Any = _send(exchange, x, weights, scales, places)
    return places | out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send(exchange: Exchange, x: Array, weights: Array, scales: Array | None, places: Arrays) -> Any:
    mode = "again" if "ranks" in places else "given" if "slots" in places else "plain"
    arrays = {"x": x, "weights": weights, **places}
    if scales is not None:
        arrays["scales"] = scales
    return exchange.calls.dispatch(exchange.wire, arrays, mode=mode, expand=exchange.expand)


def _send_fwd(exchange: Exchange, x: Array, weights: Array, scales: Array | None, places: Arrays) -> Any:
    out: Any = _send(exchange, x, weights, scales, places)
    return out, {name: (out | places)[name] for name in ("ids", "ranks", "metadata")}


def _send_bwd(exchange: Exchange, saved: Arrays, d_out: Arrays) -> Any:
    if exchange.wire != combine_wire(exchange.calls.sizes.hidden):
        raise NotImplementedError(
            "rows that travel quantised have no gradient; make the EpContext with wire='bf16' to train, or stop the "
            "gradient before the layer"
        )
    arrays = {"rows": d_out["rows"], "weights": d_out["row_weights"], **saved}
    back = exchange.calls.combine(arrays, expand=exchange.expand)
    return back["y"], back["token_weights"], None, None


_send.defvjp(_send_fwd, _send_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def bring_back(exchange: Exchange, rows: Array, way: Way) -> Array:
    """Sums rows, bf16 [rows, H], over the ranks a token went to: bf16 [T, H]. Differentiable in rows."""
    arrays = {"rows": rows, "metadata": way.metadata, "ranks": way.ranks, "ids": way.ids}
    return exchange.calls.combine(arrays, expand=exchange.expand)["y"]


def _bring_back_fwd(exchange: Exchange, rows: Array, way: Way) -> tuple[Array, Way]:
    return bring_back(exchange, rows, way), way


def _bring_back_bwd(exchange: Exchange, way: Way, d_y: Array) -> tuple[Array, None]:
    arrays = {"x": d_y, "ids": way.ids, "slots": way.slots, "ranks": way.ranks, "metadata": way.metadata}
    wire = combine_wire(exchange.calls.sizes.hidden)
    rows = exchange.calls.dispatch(wire, arrays, mode="again", expand=exchange.expand)["rows"]
    return jnp.where(way.real[:, None], rows, jnp.zeros((), rows.dtype)), None


bring_back.defvjp(_bring_back_fwd, _bring_back_bwd)
