"""Placements: who is copied, who goes where, and how even that is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.balance import Placement, plan_placements
from jaxmoe.errors import ShapeError


def test_the_hottest_are_copied_and_ranks_are_even():
    """By hand: 90 → 3 × 30, 40 → 2 × 20; then 30 30 30 20 20 12 10 8 go to ranks of 30+12, 30+10, 30+8 and 20+20."""
    (placement,) = plan_placements([[10, 90, 40, 8, 12]], ranks=4, redundant=3)
    assert placement.copies.tolist() == [1, 3, 2, 1, 1]
    assert sorted(placement.rank_load([10, 90, 40, 8, 12])) == [38, 40, 40, 42]
    assert placement.imbalance([10, 90, 40, 8, 12]) == pytest.approx(42 / 40)
    assert placement.logical.reshape(4, 2).tolist() == [[1, 4], [0, 1], [1, 3], [2, 2]]
    before = Placement.identity(5)
    assert before.is_identity and before.imbalance([10, 90, 40, 8, 12]) == 1.0


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_placement_holds_every_expert_and_is_no_worse(data):
    ranks = data.draw(st.integers(1, 6))
    per_rank = data.draw(st.integers(1, 8))
    experts = data.draw(st.integers(max(per_rank, 1), ranks * per_rank))
    counts = np.array(data.draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)))
    (placement,) = plan_placements(counts[None], ranks, ranks * per_rank - experts)
    assert placement.num_places == ranks * per_rank and placement.num_experts == experts
    assert set(placement.logical.tolist()) == set(range(experts))
    assert placement.copies.max() <= ranks and placement.copies.sum() == placement.num_places
    for expert, places in enumerate(placement.places):
        own = places[places >= 0]
        assert (placement.logical[own] == expert).all() and (places[len(own) :] == -1).all()
    load = placement.rank_load(counts)
    assert load.sum() == pytest.approx(counts.sum())
    if counts.any() and experts % ranks == 0 and experts == ranks * per_rank:
        # What a heaviest-first packing promises: no rank is above the mean by more than the heaviest copy.
        assert load.max() <= load.mean() + counts.max() + 1e-9


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 50), min_size=6, max_size=9))
def test_no_exchange_would_relieve_the_fullest_rank(counts):
    redundant = -len(counts) % 3
    (placement,) = plan_placements([counts], 3, redundant)
    load, size = placement.rank_load(counts), placement.num_places // 3
    top = int(load.argmax())
    for p in range(placement.num_places):
        for q in range(top * size, (top + 1) * size):
            if p // size != top:
                moved = placement.logical.copy()
                moved[[p, q]] = moved[[q, p]]
                other = Placement.of(moved, 3).rank_load(counts)
                assert max(other[top], other[p // size]) >= load[top] * (1 - 1e-6)


def test_a_skewed_layer_gets_even():
    """256 experts, 32 ranks, popularity 1/rank: what DeepSeek-V3's decoding has, 32 redundant places."""
    rng = np.random.default_rng(0)
    counts = rng.permutation(1e6 / np.arange(1, 257))[None]
    before = Placement.identity(256, 32).imbalance(counts[0])
    without, with_copies = (plan_placements(counts, 32, r)[0].imbalance(counts[0]) for r in (0, 32))
    assert before > 3 and without < before and with_copies < 1.1
    # A second planning gives the same.
    again = plan_placements(counts, 32, 32)[0]
    np.testing.assert_array_equal(again.logical, plan_placements(counts, 32, 32)[0].logical)


def test_layers_share_one_width():
    even, skewed = plan_placements([[1, 1, 1, 1], [100, 1, 1, 1]], ranks=4, redundant=4)
    assert even.copies.tolist() == [2, 2, 2, 2] and skewed.copies.tolist() == [4, 2, 1, 1]
    assert even.places.shape == skewed.places.shape == (4, 4)
    (narrow,) = plan_placements([[100, 1, 1, 1]], ranks=4, redundant=4, max_copies=2)
    assert narrow.copies.tolist() == [2, 2, 2, 2]
    (none,) = plan_placements(np.zeros((1, 4)), ranks=2, redundant=2)
    assert none.copies.tolist() == [2, 2, 1, 1] and none.imbalance(np.zeros(4)) == 1.0


def test_logical_load_adds_copies_up():
    placement = Placement.of([0, 1, 1, 2], ranks=2)
    np.testing.assert_array_equal(placement.logical_load([[1, 2, 3, 4], [0, 0, 5, 0]]), [[1, 5, 4], [0, 5, 0]])
    np.testing.assert_array_equal(placement.rank_load([1, 5, 4]), [3.5, 6.5])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: plan_placements([1, 2], 2), r"counts are \[2\]; they must be \[layers, E\]"),
        (lambda: plan_placements([[1, 2, 3]], 2), "use 1 redundant places"),
        (lambda: plan_placements([[1, 2, 3]], 2, 5), r"5 redundant places are more than 3 experts of at most 2 copies"),
        (lambda: plan_placements([[1, -2]], 2), "the smallest is -2"),
        (lambda: plan_placements([[1, float("nan")]], 2), "must be finite"),
        (lambda: Placement.of([0, 2], 1), "expert 1 has no place"),
        (lambda: Placement.of([0, 1, 2], 2), "3 places do not divide over 2 ranks"),
        (lambda: Placement.of([0, 0], 2, max_copies=1), "expert 0 has 2 places; max_copies is 1"),
        (lambda: Placement.identity(3).rank_load([1, 2]), r"counts are \[2\]; the placement has \[3\]"),
        (lambda: Placement.identity(3).logical_load([1, 2]), "the load has 2 places, the placement 3"),
    ],
)
def test_refusals(call, message):
    with pytest.raises((ShapeError, ValueError), match=message):
        call()
