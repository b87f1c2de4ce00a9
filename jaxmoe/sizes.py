"""Integer arithmetic on sizes."""

from __future__ import annotations


def round_up(size: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple
