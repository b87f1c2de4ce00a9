"""How many choices each expert got."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxmoe.config import Execution, MoEConfig
from jaxmoe.dispatch.base import Dispatch
from jaxmoe.layer.checks import check_inputs
from jaxmoe.layer.params import MoEParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.ops.permute import expert_counts
from jaxmoe.parallel import ParallelLayout, moe_parallel
from jaxmoe.router import Routing, route

Array = jax.Array


def expert_load(routing: Routing, num_experts: int) -> Array:
    """Choices per expert, int32 [E].

    Args:
      routing: ids [..., K]; -1 counts nowhere, a repeated id each time.
      num_experts: E. A layer with copies of experts counts places in its stacks;
        :meth:`jaxmoe.balance.Placement.logical_load` adds copies up.
    """
    return expert_counts(routing.ids.reshape(-1, routing.ids.shape[-1]), num_experts)


def moe_with_load(
    params: MoEParams,
    x: Array,
    config: MoEConfig,
    execution: Execution | None = None,
    *,
    layout: ParallelLayout | None = None,
    mesh: Mesh | None = None,
    token_ids: Array | None = None,
    valid: Array | None = None,
    routing: Routing | None = None,
    transport: Dispatch | None = None,
) -> tuple[Array, Array]:
    """:func:`jaxmoe.moe`, or with a mesh :func:`jaxmoe.parallel.moe_parallel`, and the load of its routed experts.

    Tokens are routed once, before the layer; shared experts are not counted. A layer without this function computes no
    count at all.

    Args:
      params, x, config, execution, token_ids, valid, routing, transport: as of :func:`jaxmoe.moe`.
      layout, mesh: as of :func:`jaxmoe.parallel.moe_parallel`; give both or none.

    Returns:
      y [..., H], and int32 [E]: how many of the T·K choices each expert got, over all devices of the mesh.

    Raises:
      ValueError: only one of ``layout`` and ``mesh`` is given; and as :func:`jaxmoe.moe`.
    """
    if (layout is None) != (mesh is None):
        raise ValueError("layout and mesh go together: give both for many devices, or none of them")
    execution = Execution() if execution is None else execution
    check_inputs(x, config, token_ids=token_ids, valid=valid, routing=routing)
    if routing is None:
        routing = route(
            params.router,
            x.reshape(-1, config.hidden),
            config.router,
            token_ids=None if token_ids is None else token_ids.reshape(-1),
            valid=None if valid is None else valid.reshape(-1),
            deterministic=execution.deterministic,
        )
    counted = routing.ids if valid is None else jnp.where(valid.reshape(-1, 1), routing.ids, -1)
    load = expert_counts(counted, config.router.num_experts)
    given = {"valid": valid, "routing": routing, "transport": transport}
    if layout is None or mesh is None:
        return moe(params, x, config, execution, **given), load
    return moe_parallel(params, x, config, layout, mesh, execution, **given), load
