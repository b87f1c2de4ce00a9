"""Grouped top-k (DeepSeek-V2 and -V3): only experts of the best groups can be chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxmoe.config import GroupScore
from jaxmoe.router.scores import row_sum
from jaxmoe.router.topk import MASKED, order_keys, top_k

Array = jax.Array


def grouped_keys(selection: Array, num_groups: int, top_groups: int, group_score: GroupScore) -> Array:
    """Sort keys, int32 [T, E], of the selection scores f32 [T, E], with those of lesser groups masked.

    A group (E/num_groups neighbouring experts) ranks by the sum of its two best scores, or by its best; equal
    groups rank by index. Masked keys lie below those of -inf and NaN, so that a masked expert never wins as long
    as the selected groups hold K experts, which ``RouterConfig`` makes sure of.
    """
    t, e = selection.shape
    members = selection.reshape(t, num_groups, e // num_groups)
    best = jnp.take_along_axis(members, top_k(members, 2 if group_score == "top2_sum" else 1), axis=-1)
    chosen = top_k(row_sum(best)[..., 0], top_groups)
    groups = jnp.arange(num_groups, dtype=jnp.int32)
    selected = (chosen[:, :, None] == groups).any(axis=1)
    return jnp.where(jnp.repeat(selected, e // num_groups, axis=1), order_keys(selection), MASKED)
