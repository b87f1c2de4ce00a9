"""How rows are grouped for the GEMMs: what was asked for, or a rule on sizes that are known before anything runs."""

from __future__ import annotations

import os
from typing import get_args

from jaxmoe.config import Execution, Layout
from jaxmoe.ops.permute import buffer_rows

FEW_ROWS = 64
"""Rows per expert up to which masked tiles are as fast as psum's; see benchmarks/RESULTS.md."""


def choose_layout(
    execution: Execution, tokens: int, choices: int, experts: int, *, alignment: int
) -> tuple[Layout, str]:
    """The layout of a run, and why in words. Only shapes decide, so that one compile serves every routing.

    ``execution.layout`` decides if it is not ``"auto"``, then ``JAXMOE_LAYOUT`` in the environment (read when the
    program is traced). Otherwise psum in deterministic mode, whatever T; masked for a few rows per expert (decode),
    as long as its buffer, which grows with experts × tokens, has no more rows than psum's or than
    ``execution.masked_rows`` allows; psum for all else. Every layout has every activation and every format.

    Args:
      tokens: T. choices: experts of one token. experts: groups.
      alignment: rows an expert starts at a multiple of.

    Raises:
      ValueError: ``JAXMOE_LAYOUT`` is no layout.
    """
    if execution.layout != "auto":
        return execution.layout, "asked for"
    asked = os.environ.get("JAXMOE_LAYOUT", "auto")
    if asked != "auto":
        if asked not in get_args(Layout):
            raise ValueError(f"JAXMOE_LAYOUT is {asked!r}; choose 'auto' or one of {', '.join(get_args(Layout))}")
        return asked, "asked for by JAXMOE_LAYOUT"  # pyright: ignore[reportReturnType]
    if execution.deterministic:
        return "psum", "deterministic mode runs the same kernels for every number of tokens"
    each = expected_rows(tokens * choices, experts)
    if each > FEW_ROWS:
        return "psum", f"{each} rows per expert fill their tiles, and experts that follow each other waste no memory"
    psum = buffer_rows("psum", tokens, tokens * choices, experts, alignment)
    try:
        masked = buffer_rows("masked", tokens, tokens * choices, experts, alignment, execution.masked_capacity)
    except ValueError:
        return "psum", f"masked_capacity {execution.masked_capacity} does not hold {tokens} tokens"
    limit = max(psum, execution.masked_rows or 0)
    if masked > limit:
        return "psum", f"masked would reserve {masked} rows, above the {limit} that psum or masked_rows allows"
    return (
        "masked",
        f"{each} rows per expert: each has its own {masked // experts} rows, and a tile starts at its first",
    )


def tile_rows(execution: Execution, choices: int, experts: int) -> int:
    """Rows per expert that tiles are chosen for: as many as even routing of ``choices`` choices brings, at least 1.

    In deterministic mode always the same, so that no tile, and with it perhaps a rounding, depends on T.
    """
    return 128 if execution.deterministic else expected_rows(choices, experts)


def expected_rows(choices: int, experts: int) -> int:
    """Rows of an expert under even routing of ``choices`` choices, rounded up, at least 1."""
    return max(-(-choices // experts), 1)
