"""Rows grouped by expert: what flows between the rooms of the pipeline."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.config import Layout
from jaxmoe.quant.tensors import QuantizedRows

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedRows:
    """Rows sorted by expert, in one of three layouts. ``alignment`` (A) rows is the step experts start at.

    ============ =================== =====================================================================
    layout       rows                ``group``, int32
    ============ =================== =====================================================================
    psum         [M, W], M % A == 0  [El] end row (exclusive) of each expert's real rows; expert g starts at
                                     ``end[g-1]`` rounded up to A, expert 0 at 0
    contiguous   [M, W], M % A == 0  [M] expert of each row, -1 for padding; no A-row tile mixes experts
    masked       [El, C, W]          [El] real rows of each expert, at the front of its C rows; C % A == 0
    ============ =================== =====================================================================

    Rows that belong to no expert hold anything (also NaN) once they have been through a GEMM; they must be
    selected away, never multiplied away.

    Attributes:
      rows: a plain float array, or :class:`QuantizedRows` of the same leading shape.
      group: as above.
      layout, alignment: static.
    """

    rows: Array | QuantizedRows
    group: Array
    layout: Layout = dataclasses.field(metadata={"static": True})
    alignment: int = dataclasses.field(metadata={"static": True})

    @property
    def values(self) -> Array:
        """The row values, quantised or not."""
        return self.rows.values if isinstance(self.rows, QuantizedRows) else self.rows

    def with_rows(self, rows: Array | QuantizedRows) -> GroupedRows:
        """The same grouping over other rows."""
        return dataclasses.replace(self, rows=rows)


def psum_starts(ends: Array, alignment: int) -> Array:
    """First row of each expert of the psum layout, int32 [E], from their ends [E]."""
    return jnp.pad(lax.div(ends[:-1] + (alignment - 1), alignment) * alignment, (1, 0))


def psum_experts(ends: Array, alignment: int, num_rows: int) -> Array:
    """Expert of each of ``num_rows`` rows of the psum layout, int32 [num_rows], -1 for none.

    For kernels' buffers: a CPU holds a table of rows × experts meanwhile, which the oracle's search does without.
    """
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # Of several experts that start at one row, only the last can have rows. Other methods are loops on a GPU, or sort.
    owner = jnp.searchsorted(psum_starts(ends, alignment), row, side="right", method="compare_all")
    owner = owner.astype(jnp.int32) - 1
    return jnp.where(row < ends[owner], owner, -1)
