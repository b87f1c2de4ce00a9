from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.router.grouped import grouped_keys
from jaxmoe.router.topk import MASKED, order_keys, top_k, top_k_of_keys

NAN, INF = np.nan, np.inf


def _ids(row: list[float], k: int) -> list[int]:
    return np.asarray(jax.jit(top_k, static_argnums=1)(jnp.array([row], jnp.float32), k))[0].tolist()


@pytest.mark.parametrize(
    ("row", "k", "ids"),
    [
        ([1, 2, 2, 1, 2], 5, [1, 2, 4, 0, 3]),
        ([-0.0, 0.0, -0.0], 3, [0, 1, 2]),
        ([0.0, -0.0, 1e-40, -1e-40], 4, [0, 1, 2, 3]),
        ([NAN, -INF, INF, NAN, 0], 5, [2, 4, 1, 0, 3]),
        ([NAN] * 4, 3, [0, 1, 2]),
        ([-INF] * 4, 4, [0, 1, 2, 3]),
        ([INF, 3.4e38, -3.4e38, -INF], 4, [0, 1, 2, 3]),
        ([5.0], 1, [0]),
    ],
)
def test_order(row: list[float], k: int, ids: list[int]) -> None:
    assert _ids(row, k) == ids


def test_nan_of_either_sign_and_any_payload_ranks_last() -> None:
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0xFF800000], np.uint32)
    assert np.asarray(top_k(jnp.asarray(bits.view(np.float32))[None], 5))[0].tolist() == [4, 0, 1, 2, 3]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16))
def test_any_bits_give_a_total_order(bits: list[int]) -> None:
    x = np.array(bits, np.uint32).view(np.float32)
    flushed = np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)
    want = sorted(range(16), key=lambda i: (np.isnan(flushed[i]), 0.0 if np.isnan(flushed[i]) else -flushed[i], i))
    assert np.asarray(top_k(jnp.asarray(x)[None], 16))[0].tolist() == want
    assert (np.asarray(order_keys(jnp.asarray(x))) > MASKED).all()


def test_no_rows_and_many_leading_axes() -> None:
    assert top_k(jnp.zeros((0, 8)), 3).shape == (0, 3)
    assert top_k(jnp.zeros((2, 3, 8)), 2).shape == (2, 3, 2)


def _grouped(row: list[float], groups: int, top: int, k: int, rule: str = "top2_sum") -> list[int]:
    keys = grouped_keys(jnp.array([row], jnp.float32), groups, top, rule)  # type: ignore[arg-type]
    return np.asarray(top_k_of_keys(keys, k))[0].tolist()


@pytest.mark.parametrize(
    ("row", "groups", "top", "k", "rule", "ids"),
    [
        # -inf and NaN inside the selected group still go before any expert of another group.
        ([-INF, 9, 8, NAN, 5, 5, 5, 5], 2, 1, 4, "top2_sum", [1, 2, 0, 3]),
        # A group that is all NaN never beats one that is all -inf.
        ([NAN, NAN, -INF, -INF], 2, 1, 2, "top2_sum", [2, 3]),
        # One NaN of two makes the sum NaN; the maximum rule does not see it.
        ([NAN, 7, 1, 1], 2, 1, 2, "top2_sum", [2, 3]),
        ([NAN, 7, 1, 1], 2, 1, 2, "max", [1, 0]),
        # All NaN: the first groups, ids distinct.
        ([NAN] * 6, 3, 2, 4, "top2_sum", [0, 1, 2, 3]),
        # Equal groups: the lowest.
        ([1, 2, 2, 1, 2, 1], 3, 2, 4, "top2_sum", [1, 2, 0, 3]),
        # inf - inf is NaN and ranks last.
        ([INF, -INF, -1, -1], 2, 1, 2, "top2_sum", [2, 3]),
        # Groups of one expert.
        ([3, 1, 2, 0], 4, 2, 2, "max", [0, 2]),
        # Every group selected is plain top-k.
        ([3, 1, 2, 9], 2, 2, 3, "top2_sum", [3, 0, 2]),
    ],
)
def test_groups(row: list[float], groups: int, top: int, k: int, rule: str, ids: list[int]) -> None:
    assert _grouped(row, groups, top, k, rule) == ids
