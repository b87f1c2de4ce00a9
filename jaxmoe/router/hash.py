"""Hash routing: expert ids from a table indexed by token id (the first layers of DeepSeek-V4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmoe.errors import FormatError, ShapeError

Array = jax.Array


def check_table(tid2eid: Array | np.ndarray, num_experts: int, top_k: int | None = None) -> None:
    """Refuses a table that does not hold K experts for every token id.

    Call it where a table enters (a loader, a constructor): :func:`lookup` runs under jit and cannot raise. A
    traced table is checked by shape and dtype only.

    Args:
      tid2eid: integers [V, K].
      num_experts: E.
      top_k: K, checked when given.

    Raises:
      ShapeError: wrong rank or K.
      FormatError: not integers.
      ValueError: an entry outside [0, E).
    """
    if tid2eid.ndim != 2 or (top_k is not None and tid2eid.shape[1] != top_k):
        want = "K" if top_k is None else top_k
        raise ShapeError(f"tid2eid has shape {tuple(tid2eid.shape)}; it must be [vocabulary, {want}]")
    if not jnp.issubdtype(tid2eid.dtype, jnp.integer):
        raise FormatError(f"tid2eid is {tid2eid.dtype}; expert ids must be integers")
    if isinstance(tid2eid, Tracer):
        return
    table = np.asarray(tid2eid)
    outside = np.argwhere((table < 0) | (table >= num_experts))
    if len(outside):
        t, k = outside[0]
        raise ValueError(
            f"tid2eid[{t}, {k}] is {table[t, k]}; expert ids must be in [0, {num_experts}) "
            f"({len(outside)} entries are not)"
        )


def lookup(tid2eid: Array, token_ids: Array, num_experts: int) -> Array:
    """Expert ids, int32 [T, K], of token ids [T]: rows of ``tid2eid`` [V, K].

    A token id outside [0, V), such as the -1 of padding, gives -1 (no expert) in all K places. So does a table row
    with an entry outside [0, E), which :func:`check_table` would have refused: it must not reach a kernel.
    """
    if token_ids.dtype.itemsize < 4:
        token_ids = token_ids.astype(jnp.int32)
    known = (token_ids >= 0) & (token_ids < tid2eid.shape[0])
    rows = tid2eid.astype(jnp.int32)[jnp.where(known, token_ids, jnp.zeros_like(token_ids))]
    usable = known & ((rows >= 0) & (rows < num_experts)).all(axis=1)
    return jnp.where(usable[:, None], rows, -1)
