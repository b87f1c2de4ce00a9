"""Row quantisation by a Pallas Mosaic GPU kernel: one pass, scales written where the GEMMs read them."""

from __future__ import annotations

import functools

import jax

from jaxmoe.ops import mosaic
from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.tensors import QuantizedRows

Array = jax.Array

TILE = mosaic.Tile(rows=16, units=4)
"""``benchmarks/kernels.py --tiles`` compares it with others."""


def quantize(x: Array, quant: ActivationQuant, *, valid: Array | None = None) -> QuantizedRows:
    """See :func:`jaxmoe.ops.quantize.quantize`; the same bits as the reference.

    Raises:
      BackendUnavailable: no Hopper or data-centre Blackwell GPU, K no multiple of 64, or too few rows.
    """
    mosaic.require_gpu()
    return quantize_kernel(x, quant, valid, TILE)


@functools.partial(jax.jit, static_argnames=("quant", "tile"))
def quantize_kernel(x: Array, quant: ActivationQuant, valid: Array | None, tile: mosaic.Tile) -> QuantizedRows:
    """The kernel with a tile of one's choice, on whatever device the program is for."""
    k = x.shape[-1]
    mosaic.check(x.shape, k, tile)
    from jaxmoe.ops import mosaic_rows  # heavy to import

    rows = mosaic_rows.run(mosaic_rows.RowOp((0,), k, _same, None, quant), x, valid, tile)
    assert isinstance(rows, QuantizedRows)
    return rows


def _same(x: Array) -> Array:
    return x
