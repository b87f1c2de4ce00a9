"""Which expert goes to which place, and the hottest to several: expert-parallel load balancing (EPLB).

DeepSeek's open-source EPLB does the same two steps: copy whatever has the most load per copy, then pack copies on
ranks, the heaviest first; exchanges between ranks follow here. On the host, in NumPy; nothing here is traced.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxmoe.errors import ShapeError


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Where the E experts of a layer are among P places, P/R on each of R ranks in order.

    Attributes:
      ranks: R.
      logical: int32 [P], the expert at each place.
      places: int32 [E, C], each expert's places, -1 after the last.
    """

    ranks: int
    logical: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, logical: Any, ranks: int, *, max_copies: int | None = None) -> Placement:
        """The placement that has expert ``logical[p]`` at place p.

        Args:
          logical: [P]; every expert from 0 up to the largest must be there.
          ranks: R, which divides P.
          max_copies: width C of ``places``; None takes what is needed.

        Raises:
          ShapeError: R does not divide P, an expert has no place, or more places than ``max_copies``.
        """
        logical = np.asarray(logical, np.int32)
        if ranks < 1 or len(logical) % ranks or not len(logical):
            raise ShapeError(f"{len(logical)} places do not divide over {ranks} ranks; use a multiple of the ranks")
        copies = np.bincount(logical)
        if not copies.all():
            raise ShapeError(f"expert {int(copies.argmin())} has no place; every expert needs at least one")
        width = int(copies.max()) if max_copies is None else max_copies
        if width < copies.max():
            raise ShapeError(f"expert {int(copies.argmax())} has {copies.max()} places; max_copies is {max_copies}")
        places = np.full((len(copies), width), -1, np.int32)
        for expert in range(len(copies)):
            places[expert, : copies[expert]] = np.flatnonzero(logical == expert)
        return cls(ranks, logical, places)

    @classmethod
    def identity(cls, num_experts: int, ranks: int = 1) -> Placement:
        """Every expert once, in order: what a layer has before it is placed."""
        return cls.of(np.arange(num_experts), ranks)

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.places)

    @property
    def num_places(self) -> int:
        """P."""
        return len(self.logical)

    @property
    def copies(self) -> np.ndarray:
        """int64 [E], places of each expert."""
        return (self.places >= 0).sum(axis=1)

    @property
    def is_identity(self) -> bool:
        """Whether every expert is where it would be without a placement."""
        return bool(np.array_equal(self.logical, np.arange(self.num_experts)))

    def logical_load(self, load: Any) -> np.ndarray:
        """Choices per expert, int64 [..., E], of choices per place [..., P]."""
        load = np.asarray(load)
        if load.shape[-1] != self.num_places:
            raise ShapeError(f"the load has {load.shape[-1]} places, the placement {self.num_places}")
        return np.where(self.places >= 0, load[..., self.places], 0).sum(axis=-1, dtype=np.int64)

    def rank_load(self, counts: Any) -> np.ndarray:
        """Load of each rank, float64 [R], if an expert's ``counts`` [E] spread evenly over its copies."""
        counts = np.asarray(counts, np.float64)
        if counts.shape != (self.num_experts,):
            raise ShapeError(f"counts are {list(counts.shape)}; the placement has [{self.num_experts}] experts")
        return (counts / self.copies)[self.logical].reshape(self.ranks, -1).sum(axis=1)

    def imbalance(self, counts: Any) -> float:
        """The fullest rank's load over the mean, 1.0 at best; what the slowest rank makes the others wait for."""
        load = self.rank_load(counts)
        return float(load.max() / load.mean()) if load.any() else 1.0


def plan_placements(
    counts: Any, ranks: int, redundant: int = 0, *, max_copies: int | None = None
) -> tuple[Placement, ...]:
    """Places experts so that ranks get about the same load: a copy more for the hottest, then packing.

    An expert never gets more copies than ranks. The same counts always give the same placement.

    Args:
      counts: [layers, E], at least 0: choices that each expert got, as :func:`jaxmoe.balance.expert_load` counts them.
      ranks: R.
      redundant: places beyond E, to be filled with copies; R must divide E + redundant.
      max_copies: copies of one expert at most, and the width of every layer's table, so that a new placement needs no
        new compilation. None: as many as needed, the same width for all layers of the call.

    Returns:
      One placement a layer.

    Raises:
      ShapeError: counts are not [layers, E], R does not divide E + redundant, or the copies cannot be placed.
      ValueError: a count is negative, infinite or NaN.
    """
    counts = np.asarray(counts, np.float64)
    if counts.ndim != 2 or not counts.size:
        raise ShapeError(f"counts are {list(counts.shape)}; they must be [layers, E]")
    if not (np.isfinite(counts) & (counts >= 0)).all():
        raise ValueError(f"counts must be finite and at least 0; the smallest is {counts.min()}")
    experts = counts.shape[1]
    if ranks < 1 or redundant < 0 or (experts + redundant) % ranks:
        more = -(experts + max(redundant, 0)) % max(ranks, 1)
        raise ShapeError(
            f"{experts} experts and {redundant} redundant places do not divide over {ranks} ranks; "
            f"use {max(redundant, 0) + more} redundant places"
        )
    limit = ranks if max_copies is None else min(ranks, max_copies)
    if experts + redundant > experts * limit:
        raise ShapeError(
            f"{redundant} redundant places are more than {experts} experts of at most {limit} copies fill; use at most "
            f"{experts * (limit - 1)}"
        )
    chosen = [_pack(load, _copies(load, redundant, limit), ranks) for load in counts]
    width = max_copies or max(int(np.bincount(logical).max()) for logical in chosen)
    return tuple(Placement.of(logical, ranks, max_copies=width) for logical in chosen)


def _copies(load: np.ndarray, redundant: int, limit: int) -> np.ndarray:
    """Copies of each expert [E]: one, and again one for whichever has the most load per copy, the fewest on a tie."""
    copies = np.ones(len(load), np.int64)
    for _ in range(redundant):
        per_copy = np.where(copies < limit, load / copies, -1.0)
        copies[np.lexsort((copies, -per_copy))[0]] += 1
    return copies


def _pack(load: np.ndarray, copies: np.ndarray, ranks: int) -> np.ndarray:
    """The expert at each place [P]: copies on the least loaded rank with room, on a tie one without that expert."""
    experts = np.repeat(np.arange(len(load)), copies)
    weight = (load / copies)[experts]
    room = len(experts) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    total = np.zeros(ranks)
    for i in np.argsort(-weight, kind="stable"):
        expert = int(experts[i])
        open_ranks = [r for r in range(ranks) if len(held[r]) < room]
        rank = min(open_ranks, key=lambda r: (total[r], expert in held[r], r))
        held[rank].append(expert)
        total[rank] += weight[i]
    places = np.array(held)
    _swap(places, load / copies)
    return np.sort(places, axis=1).reshape(-1).astype(np.int32)


def _swap(places: np.ndarray, weight: np.ndarray) -> None:
    """Exchanges experts of the fullest rank with others, as long as the fuller of the two ranks gets less; in place."""
    for _ in range(places.size):
        total = weight[places].sum(axis=1)
        top = int(total.argmax())
        moved = weight[places[top]][:, None, None] - weight[places]  # what each exchange takes from the fullest rank
        fuller = np.maximum(total[top] - moved, total[:, None] + moved)
        fuller[:, top] = np.inf
        mine, rank, theirs = np.unravel_index(int(fuller.argmin()), fuller.shape)
        if not fuller[mine, rank, theirs] < total[top] * (1 - 1e-9):
            return
        places[top, mine], places[rank, theirs] = places[rank, theirs], places[top, mine]
