"""Gathering rows and adding partial sums over mesh axes, inside shard_map."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.parallel.mesh import Axes

Array = jax.Array


def gather(rows: Any, axes: Axes) -> Any:
    """Rows of all devices along the axes, in order of device; typed as differing between them."""
    return jax.tree.map(lambda a: lax.all_gather(a, axes, tiled=True), rows) if axes else rows


def gather_equal(rows: Array, axes: Axes) -> Array:
    """The same, typed as equal on all of them."""
    return lax.all_gather(rows, axes, tiled=True, to="invarying") if axes else rows


def reduce_partial(y: Array, axes: Axes, home: Axes, *, in_order: bool) -> Array:
    """Adds partial sums over ``axes``; over those in ``home``, each device keeps its own rows.

    Args:
      y: f32 [n·T, H], n the devices along the axes in ``home``, rows as :func:`gather` gives them.
      axes: over which y is partial.
      home: axes over which rows differ.
      in_order: add in order of device, whatever the collectives of the platform do: as much traffic, more memory.

    Returns:
      [T, H].
    """
    scatter, everywhere = tuple(a for a in axes if a in home), tuple(a for a in axes if a not in home)
    if scatter:
        y = _ordered_scatter(y, scatter) if in_order else lax.psum_scatter(y, scatter, tiled=True)
    if everywhere:
        y = _ordered_sum(y, everywhere) if in_order else lax.psum(y, everywhere)
    return y


def _ordered_scatter(y: Array, axes: Axes) -> Array:
    n = lax.axis_size(axes)
    parts = lax.all_to_all(y.reshape(n, y.shape[0] // n, y.shape[1]), axes, 0, 0)
    total = parts[0]
    for i in range(1, n):
        total = total + parts[i]
    return total


def _ordered_sum(y: Array, axes: Axes) -> Array:
    rows, n = y.shape[0], lax.axis_size(axes)
    y = jnp.pad(y, ((0, -rows % n), (0, 0)))
    return gather_equal(_ordered_scatter(y, axes), axes)[:rows]
