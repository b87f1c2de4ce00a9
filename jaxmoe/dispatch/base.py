"""What a transport is: it takes tokens to the experts' devices, and the experts' results back."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.tensors import QuantizedRows

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """Tokens on the device of their experts. N rows, of which any may be unused.

    Attributes:
      x: [N, H], plain or quantised; rows without an id hold anything. Or rows that are grouped by expert already: N is
        then the number of all rows of the buffer, those of padding included, and K is 1.
      ids: int32 [N, K], local expert ids 0..El-1, -1 for none and for experts that live elsewhere.
      weights: f32 [N, K], final; not read where the id is -1.
      state: what the transport needs to bring results back, a pytree or None.
      expected: static, choices that even routing brings here, for which GEMMs choose tiles; None: N·K.
    """

    x: Array | QuantizedRows | GroupedRows
    ids: Array
    weights: Array
    state: Any = None
    expected: int | None = dataclasses.field(default=None, metadata={"static": True})


class Dispatch(Protocol):
    """A transport."""

    def held(self, num_experts: int, replicated: int) -> int:
        """El, the experts that each device holds: its part of E, then ``replicated`` ones that every device holds."""
        ...

    def dispatch(self, x: Array, ids: Array, weights: Array, num_experts: int) -> Dispatched:
        """Sends tokens to the devices of their experts.

        Args:
          x: [T, H].
          ids: int32 [T, K], global, -1 for none; those from ``num_experts`` on are the replicated experts, which a
            token meets where it is.
          weights: f32 [T, K].
          num_experts: E.
        """
        ...

    def combine(self, y: Array, dispatched: Dispatched) -> Array:
        """Brings y [N, H], weighted and summed over local experts, back: f32 [T, H], summed over devices."""
        ...
