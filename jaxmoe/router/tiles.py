"""Row-wise work in tiles of one size, so that a row's bits do not depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

_TILE = 256
"""Rows of a tile. On a GPU the host drives the loop, tens of µs a turn whatever it holds; few tokens pay for two."""


def by_tiles(f: Callable[..., Any], *rows: Any) -> Any:
    """``f(*rows)`` for an f that treats rows alike and apart, as a loop over tiles of a fixed number of rows.

    The compiled code of f is then the same for every T; without that, matrix products and vector loops of other
    sizes may round differently.

    Args:
      f: takes and gives trees of arrays with leading extent T.
      rows: trees of arrays [T, ...]; padded with zeros inside.
    """
    t = jax.tree.leaves(rows)[0].shape[0]
    padded = max(t + -t % _TILE, 2 * _TILE)  # a loop that runs once would be compiled as none

    def cut(a: Array) -> Array:
        return jnp.pad(a, [(0, padded - t)] + [(0, 0)] * (a.ndim - 1)).reshape(-1, _TILE, *a.shape[1:])

    def one(tile: Any) -> Any:
        # The barriers keep slices of tiles, whose shapes know T, out of what is compiled, and timed, for f.
        return jax.lax.optimization_barrier(f(*jax.lax.optimization_barrier(tile)))

    out = jax.lax.map(one, jax.tree.map(cut, rows))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:t], out)
