"""What the Pallas Mosaic GPU kernels have in common with whoever chooses them; the kernels are in ``mosaic_rows``."""

from __future__ import annotations

import dataclasses

import jax

from jaxmoe.cuda import target
from jaxmoe.errors import BackendUnavailable

LOWERS = jax.__version_info__ < (0, 12)
"""Whether this JAX lowers the kernels: Mosaic GPU of 0.12 refuses stores that cover parts of 128-byte lines."""

UNIT = 64
"""Columns that the kernels work in; widths must be multiples of it."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a warpgroup works on at once.

    Attributes:
      rows: a multiple of 16.
      units: of 64 columns; 2 share a block of 128, and 8 a word of packed scales of such blocks.
      staged: fetch the tile into shared memory by the copy engine instead of loading it into registers.
    """

    rows: int = 32
    units: int = 8
    staged: bool = False


def require_gpu() -> None:
    """Raises ``BackendUnavailable`` unless JAX lowers the kernels and its device is what the program is traced for.

    Pallas compiles for the device at hand, never for a named target.
    """
    if not LOWERS:
        raise BackendUnavailable(
            f"the Pallas kernels are written for Mosaic GPU of JAX 0.11, this is {jax.__version__}; 'auto' takes XLA's "
            "fusion of the reference instead"
        )
    chosen = target.current()
    with target.target(None):
        here = target.current()
    if here.family != chosen.family:
        raise BackendUnavailable(
            f"Pallas kernels are compiled for the device at hand, {here.name}, not for {chosen.name}; "
            "use another backend"
        )


def check(shape: tuple[int, ...], width: int, tile: Tile) -> None:
    """Refuses what the row kernels cannot read.

    Args:
      shape: [..., M, W] of what is read. width: columns of every stripe of it.
      tile: the rows of one tile are the fewest that work.

    Raises:
      BackendUnavailable: with the reason.
    """
    if 0 in shape:
        raise BackendUnavailable(f"there is nothing to compute for shape {shape}; use backend='reference'")
    if width % UNIT:
        raise BackendUnavailable(f"the width, {width}, must be a multiple of {UNIT}; use backend='reference'")
    if shape[-2] < tile.rows:
        raise BackendUnavailable(f"{shape[-2]} rows are fewer than a tile's {tile.rows}; use backend='reference'")
