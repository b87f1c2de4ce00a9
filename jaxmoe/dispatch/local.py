"""The transport of one device, where every expert is: tokens stay."""

from __future__ import annotations

import jax

from jaxmoe.dispatch.base import Dispatched

Array = jax.Array


class Local:
    """Tokens stay where they are; implements :class:`jaxmoe.dispatch.base.Dispatch`."""

    def held(self, num_experts: int, replicated: int) -> int:
        """All."""
        return num_experts + replicated

    def dispatch(self, x: Array, ids: Array, weights: Array, num_experts: int) -> Dispatched:
        """The tokens themselves."""
        return Dispatched(x, ids, weights)

    def combine(self, y: Array, dispatched: Dispatched) -> Array:
        """The results themselves."""
        return y
