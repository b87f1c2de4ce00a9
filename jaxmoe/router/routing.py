"""What the router gives: :class:`Routing`, and the shared experts' slots appended to it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxmoe.errors import FormatError, ShapeError

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Where each token goes.

    Attributes:
      ids: int32 [T, K], the chosen experts, best first (hash routing: in the table's order); -1 is no expert.
        The others of a row are distinct.
      weights: f32 [T, K], what the experts' outputs are multiplied by: final, ``routed_scaling_factor``
        included. 0 where the id is -1.
    """

    ids: Array
    weights: Array


def append_shared_slots(
    routing: Routing, num_experts: int, slots: int, gate: Array | None = None, valid: Array | None = None
) -> Routing:
    """Adds fused shared experts as columns E … E+slots-1 of every token's routing.

    Args:
      routing: of the E routed experts.
      num_experts: E.
      slots: how many expert slots the shared experts take.
      gate: f32 [T], the weight of the shared experts: σ(x · gate vector), sigmoid already applied; None is 1.
        ``routed_scaling_factor`` never touches it.
      valid: bool [T]; False rows get -1 and 0. None: all are valid.

    Returns:
      ids [T, K + slots] and weights [T, K + slots].

    Raises:
      ShapeError: ``gate`` or ``valid`` is not [T], or ``slots`` is below 0.
      FormatError: ``gate`` is not f32 or ``valid`` not bool.
    """
    t = routing.ids.shape[0]
    if slots < 0:
        raise ShapeError(f"slots is {slots}; it must be at least 0")
    for name, value, dtype in (("gate", gate, jnp.float32), ("valid", valid, jnp.bool_)):
        if value is not None and value.shape != (t,):
            raise ShapeError(f"{name} has shape {value.shape}; the routing has {t} tokens, so it must be [{t}]")
        if value is not None and value.dtype != dtype:
            raise FormatError(f"{name} is {value.dtype}; it must be {jnp.dtype(dtype).name}")
    ids = jnp.broadcast_to(jnp.arange(num_experts, num_experts + slots, dtype=jnp.int32), (t, slots))
    weights = jnp.ones((t, slots), jnp.float32) if gate is None else jnp.broadcast_to(gate[:, None], (t, slots))
    if valid is not None:
        ids = jnp.where(valid[:, None], ids, -1)
        weights = jnp.where(valid[:, None], weights, 0.0)
    return Routing(jnp.concatenate([routing.ids, ids], axis=1), jnp.concatenate([routing.weights, weights], axis=1))
