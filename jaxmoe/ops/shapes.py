"""Named shapes that tests and benchmarks share: real models, and small hostile ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np

Spread = Literal["even", "skewed", "one", "empty"]
SPREADS: tuple[Spread, ...] = ("even", "skewed", "one", "empty")
"""How rows spread over experts; see :func:`group_sizes`."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one layer.

    Attributes:
      hidden, intermediate, num_experts, top_k: H, I, E, K.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int


MODELS: dict[str, Shape] = {
    "deepseek-v3": Shape(7168, 2048, 256, 8),
    "deepseek-v4-like": Shape(7168, 3072, 384, 6),
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4),
}
"""Published sizes; the expert count of deepseek-v4-like is an assumption."""

HOSTILE: dict[str, Shape] = {
    "one-expert": Shape(128, 128, 1, 1),
    "all-experts": Shape(128, 128, 4, 4),
    "five-scale-groups": Shape(640, 384, 3, 2),
    "many-small": Shape(128, 256, 37, 2),
}
"""Small sizes that break layouts: E = 1, K = E, scale groups that are no multiple of 4, E prime."""


def group_sizes(spread: Spread, num_experts: int, rows: int, seed: int = 0) -> np.ndarray:
    """Rows per expert, int32 [E].

    Args:
      spread: ``even``: equal shares; ``skewed``: a Zipf-like share each, in random order, some experts without rows;
        ``one``: all rows to one expert in the middle; ``empty``: no rows at all.
      num_experts: E. rows: their sum (0 for ``empty``).
      seed: of ``skewed``.
    """
    sizes = np.zeros(num_experts, np.int32)
    if spread == "even":
        sizes += rows // num_experts
        sizes[: rows % num_experts] += 1
    elif spread == "skewed":
        rng = np.random.default_rng(seed)
        share = rng.permutation(1.0 / np.arange(1, num_experts + 1) ** 1.5)
        sizes += rng.multinomial(rows, share / share.sum()).astype(np.int32)
    elif spread == "one":
        sizes[num_experts // 2] = rows
    return sizes


def routings(shape: Shape, tokens: int, seed: int = 0) -> Iterator[tuple[str, np.ndarray]]:
    """Named ids, int32 [T, K]: random, all to the same K experts, the last experts only, with holes, none at all."""
    rng = np.random.default_rng(seed)
    e, k = shape.num_experts, shape.top_k
    random = np.argsort(rng.random((tokens, e)), axis=1)[:, :k].astype(np.int32)
    yield "random", random
    yield "same", np.broadcast_to(np.arange(k, dtype=np.int32), (tokens, k)).copy()
    yield "last", np.broadcast_to(np.arange(e - k, e, dtype=np.int32), (tokens, k)).copy()
    yield "holes", np.where(rng.random((tokens, k)) < 0.4, np.int32(-1), random)
    yield "none", np.full((tokens, k), -1, np.int32)
