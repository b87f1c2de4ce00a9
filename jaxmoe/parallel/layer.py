"""The layer on a mesh, as one shard_map."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxmoe.config import Execution, MoEConfig
from jaxmoe.dispatch.all_to_all import AllToAll
from jaxmoe.dispatch.base import Dispatch
from jaxmoe.dispatch.local import Local
from jaxmoe.errors import ShapeError
from jaxmoe.layer.checks import check_inputs, check_params
from jaxmoe.layer.params import MoEParams
from jaxmoe.layer.pipeline import choose_experts, experts, shared_experts
from jaxmoe.parallel.collectives import gather, gather_equal, reduce_partial
from jaxmoe.parallel.mesh import ParallelLayout, devices
from jaxmoe.parallel.params import local_config, param_specs
from jaxmoe.router import Routing

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Tokens:
    """T tokens and what came with them; [..., H] and [...], or [T, H] and [T]."""

    x: Array
    token_ids: Array | None
    valid: Array | None
    routing: Routing | None


def moe_parallel(
    params: MoEParams,
    x: Array,
    config: MoEConfig,
    layout: ParallelLayout,
    mesh: Mesh,
    execution: Execution | None = None,
    *,
    token_ids: Array | None = None,
    valid: Array | None = None,
    routing: Routing | None = None,
    transport: Dispatch | None = None,
) -> Array:
    """One MoE layer on many devices; the result is that of :func:`jaxmoe.moe` on one, to rounding.

    A token's way: where ``layout.sliced`` has axes, its device is the one whose slice it is in. There the router
    chooses. If the experts are cut over an axis that cuts tokens too, it is gathered along that axis with its ids. It
    travels to the devices of its experts, and the weighted sums of each device come back to where it was routed, are
    added over devices, once over each axis they are partial on, meet the shared expert and are rounded to x's dtype.

    With ``execution.deterministic``, the bits of a token on one mesh and layout are a function of that token (and its
    routing, if given): they depend neither on how many tokens there are, nor on its place, device or neighbours. Sums
    over devices are then taken in order of device. On another mesh the last bits may differ, as sums are grouped by
    device.

    Args:
      params: from :func:`shard_params` with the same config, layout and mesh.
      x: [..., H], global, bf16 or f32, its leading axes cut as ``layout.tokens`` says. An axis that its devices do not
        divide is padded inside with tokens that are not valid.
      config: of the whole layer.
      layout, mesh: which mesh axes cut what. Over mesh axes that the layout does not name, all is equal.
      execution: how it runs; None is ``Execution()``.
      token_ids, valid, routing: as in :func:`jaxmoe.moe`, global. Devices that have different numbers of tokens say so
        with ``valid``.
      transport: how tokens reach experts on other devices; None is :class:`AllToAll` over ``layout.experts``.

    Returns:
      [..., H] in x's dtype, cut like x.

    Raises:
      ShapeError, FormatError, ValueError: layout, mesh, parameters, inputs and config do not fit.
    """
    layout.check(mesh, config)
    check_inputs(x, config, token_ids=token_ids, valid=valid, routing=routing)
    if len(layout.tokens) > x.ndim - 1:
        raise ShapeError(
            f"layout.tokens {layout.tokens} cuts {len(layout.tokens)} leading axes; x is {list(x.shape)}, which has "
            f"{x.ndim - 1} before H"
        )
    if transport is None:
        transport = AllToAll(layout.named_axes["experts"]) if layout.experts else Local()
    elif not layout.experts:
        raise ValueError(
            f"transport {transport} carries tokens between experts' devices, but layout.experts names no mesh axis; "
            "name the transport's axes there, or leave the transport out"
        )
    execution = Execution() if execution is None else execution
    return _run(params, _Tokens(x, token_ids, valid, routing), config, layout, mesh, execution, transport)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def _run(
    params: MoEParams,
    tokens: _Tokens,
    config: MoEConfig,
    layout: ParallelLayout,
    mesh: Mesh,
    execution: Execution,
    transport: Dispatch,
) -> Array:
    lead = tokens.x.shape[:-1]
    if tokens.routing is not None:
        unflat = jax.tree.map(lambda a: a.reshape(*lead, a.shape[-1]), tokens.routing)
        tokens = dataclasses.replace(tokens, routing=unflat)
    parts = [
        1 if part is None else devices(mesh, part if isinstance(part, tuple) else (part,)) for part in layout.tokens
    ]
    tokens = _pad(tokens, [-n % p for n, p in zip(lead, parts, strict=False)])

    body = functools.partial(_layer, config=local_config(config, layout, mesh), layout=layout)
    run = jax.shard_map(
        functools.partial(body, execution=execution, transport=transport),
        mesh=mesh,
        in_specs=(param_specs(config, layout), layout.tokens),
        out_specs=layout.tokens,
    )
    return run(params, tokens)[tuple(slice(n) for n in lead)]


def _pad(tokens: _Tokens, spare: list[int]) -> _Tokens:
    """Appends tokens that are not valid, ``spare[i]`` along axis i."""
    if not any(spare):
        return tokens
    if tokens.valid is None:
        tokens = dataclasses.replace(tokens, valid=jnp.ones(tokens.x.shape[:-1], bool))
    return jax.tree.map(lambda a: jnp.pad(a, [(0, n) for n in spare] + [(0, 0)] * (a.ndim - len(spare))), tokens)


def _layer(
    params: MoEParams,
    tokens: _Tokens,
    *,
    config: MoEConfig,
    layout: ParallelLayout,
    execution: Execution,
    transport: Dispatch,
) -> Array:
    """What one device does; ``config`` is its own, see :func:`local_config`."""
    check_params(params, config, held=transport.held(config.router.num_experts, config.fused_slots))
    shape, lead = tokens.x.shape, tokens.x.ndim - 1
    tokens = jax.tree.map(lambda a: a.reshape(-1, *a.shape[lead:]), tokens)
    if tokens.valid is not None:
        x = jnp.where(tokens.valid[:, None], tokens.x, jnp.zeros((), tokens.x.dtype))
        tokens = dataclasses.replace(tokens, x=x)
    axes = layout.named_axes
    own = _pad(tokens, [-tokens.x.shape[0] % _size(layout.sliced)])
    mine = _slice(own, layout.sliced)

    chosen = choose_experts(
        params,
        mine.x,
        config,
        execution,
        token_ids=mine.token_ids,
        valid=mine.valid,
        routing=mine.routing,
    )
    x, valid, chosen = gather((mine.x, mine.valid, chosen), _among(axes["intermediate"], layout.home))
    sent = transport.dispatch(x, chosen.ids, chosen.weights, config.router.num_experts)
    weights = params.experts
    if weights.down_bias is not None and axes["intermediate"]:
        first = lax.axis_index(axes["intermediate"]) == 0
        weights = dataclasses.replace(weights, down_bias=jnp.where(first, weights.down_bias, 0.0))
    y = experts(weights, sent.x, sent.ids, sent.weights, config, execution, expected=sent.expected)
    y = transport.combine(y, sent)

    total = functools.partial(reduce_partial, home=layout.home, in_order=execution.deterministic)

    def shared(x: Array, valid: Array | None) -> Array | None:
        partial = shared_experts(params.shared, x, config, execution, valid=valid)
        return None if partial is None else partial.astype(jnp.float32)

    if axes["shared"] == axes["intermediate"]:
        partial = shared(x, valid)
        y = total(y if partial is None else y + partial, axes["intermediate"])
    else:
        y = total(y, axes["intermediate"])
        source, along = mine, _among(axes["shared"], layout.home)
        over = along
        if layout.sliced and set(layout.sliced) <= set(along):  # slices of one's own tokens need no gathering
            source, along = own, _among(along, axes["tokens"])
            over = along + layout.sliced
        over += tuple(a for a in axes["shared"] if a not in over)
        partial = shared(gather(source.x, along), gather(source.valid, along))
        if partial is not None:
            y = y + total(partial, over)
    y = gather_equal(y.astype(tokens.x.dtype), layout.sliced)
    return y[: tokens.x.shape[0]].reshape(shape)


def _slice(tokens: _Tokens, axes: tuple[str, ...]) -> _Tokens:
    """This device's part of equal tokens."""
    if not axes:
        return tokens
    n, i = lax.axis_size(axes), lax.axis_index(axes)
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, i * (a.shape[0] // n), a.shape[0] // n), tokens)


def _size(axes: tuple[str, ...]) -> int:
    return lax.axis_size(axes) if axes else 1


def _among(axes: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a in axes if a in others)
