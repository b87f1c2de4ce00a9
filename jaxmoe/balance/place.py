"""A layer's experts moved to the places of a placement."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.balance.placement import Placement
from jaxmoe.config import MoEConfig
from jaxmoe.errors import ShapeError
from jaxmoe.layer.checks import check_params
from jaxmoe.layer.params import MoEParams


def place_experts(params: MoEParams, config: MoEConfig, placement: Placement) -> tuple[MoEParams, MoEConfig]:
    """Copies experts to their places, in every format; the router then sends each token to one copy.

    y is what it was: to the last bit on one device, to rounding where sums over devices regroup. Experts may have been
    placed before. Do this before :func:`jaxmoe.parallel.shard_params`, with as many ranks as the layout's experts have
    devices. In training, gradients of copies are to be added; placing is for inference.

    Args:
      params, config: of the whole layer.
      placement: of all its E experts; :meth:`Placement.identity` undoes an earlier one.

    Returns:
      Parameters and config of the placed layer: P places, and the table of copies in the router.

    Raises:
      ShapeError: the placement is for another number of experts, or parameters and config do not fit.
    """
    check_params(params, config)
    router, experts = config.router, config.router.logical
    if placement.num_experts != experts:
        raise ShapeError(f"the placement is for {placement.num_experts} experts; the layer has {experts}")
    at = np.arange(experts) if params.router.replicas is None else np.asarray(params.router.replicas)[:, 0]
    fused = router.num_experts + np.arange(config.fused_slots)
    order = np.concatenate([at[placement.logical], fused]).astype(np.int32)
    stacks = jax.tree.map(lambda a: jnp.take(a, order, axis=0), params.experts)
    table, logical = jnp.asarray(placement.places), experts
    if placement.is_identity and placement.places.shape[1] == 1:
        table = logical = None
    params = dataclasses.replace(params, experts=stacks, router=dataclasses.replace(params.router, replicas=table))
    router = dataclasses.replace(router, num_experts=placement.num_places, logical_experts=logical)
    return params, dataclasses.replace(config, router=router)
