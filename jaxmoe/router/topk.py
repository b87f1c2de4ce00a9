"""Deterministic top-k: one total order of floats, NaN included, and ties to the lowest index.

Floats are ranked by int32 keys made from their bits. Integer compares mean the same on every backend; float
compares do not, once NaN, signed zeros or subnormals (which some backends flush) are among them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

MASKED = np.int32(np.iinfo(np.int32).min)
"""Key of an entry that may not be chosen; below every key that :func:`order_keys` gives."""

_NAN = np.int32(MASKED + 1)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INF = np.int32(0x7F800000)
_SMALLEST_NORMAL = np.int32(0x00800000)


def order_keys(values: Array) -> Array:
    """int32 keys that sort as the f32 ``values`` do.

    NaN ranks below -inf and all NaNs tie. Zeros of either sign and subnormals tie.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    magnitude = bits & _MAGNITUDE
    key = jnp.where(bits < 0, -magnitude, magnitude)
    key = jnp.where(magnitude < _SMALLEST_NORMAL, np.int32(0), key)
    return jnp.where(magnitude > _INF, _NAN, key)


def top_k_of_keys(keys: Array, k: int) -> Array:
    """Indices, int32 [..., k], of the k largest int32 ``keys`` [..., N], best first, ties to the lowest index.

    They are k distinct values in [0, N) whatever the keys are.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, keys.shape, keys.ndim - 1)
    # ``~`` turns the order round. Key and index together are unique, so any correct sort gives this one result.
    _, order = jax.lax.sort((~keys, index), dimension=-1, is_stable=False, num_keys=2)
    return order[..., :k]


def top_k(values: Array, k: int) -> Array:
    """Indices, int32 [..., k], of the k largest f32 ``values`` [..., N] in the order of :func:`order_keys`."""
    return top_k_of_keys(order_keys(values), k)
