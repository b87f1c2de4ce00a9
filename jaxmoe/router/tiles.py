"""Row-wise work in tiles of one size, so that a row's bits do not depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

_TILE = 64


def by_tiles(f: Callable[..., Any], *rows: Any) -> Any:
    """``f(*rows)`` for an f that treats rows alike and apart, as a loop over tiles of a fixed number of rows.

    The compiled code of f is then the same for every T; without that, matrix products and vector loops of other
    sizes may round differently.

    Args:
      f: takes and gives trees of arrays with leading extent T.
      rows: trees of arrays [T, ...]; padded with zeros inside.
    """
    t = jax.tree.leaves(rows)[0].shape[0]

    def cut(a: Array) -> Array:
        return jnp.pad(a, [(0, -t % _TILE)] + [(0, 0)] * (a.ndim - 1)).reshape(-1, _TILE, *a.shape[1:])

    # The barriers keep a loop that runs once, and is inlined for it, apart from what is around it.
    tiles = jax.lax.optimization_barrier(jax.tree.map(cut, rows))
    out = jax.lax.optimization_barrier(jax.lax.map(lambda tile: f(*tile), tiles))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:t], out)
