"""Quantisation of activation rows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.ops import backend as _backend
from jaxmoe.ops.quantize import pallas, reference
from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.tensors import QuantizedRows

Array = jax.Array

BACKENDS: dict[str, Callable[..., QuantizedRows]] = {"pallas": pallas.quantize, "reference": reference.quantize}


def quantize(
    x: Array, quant: ActivationQuant, *, valid: Array | None = None, backend: str | tuple[str, ...] = "auto"
) -> QuantizedRows:
    """Quantises rows to e4m3 with one scale per row and ``quant.block`` columns, in the layout the GEMMs eat.

    Per block, in float32: ``amax`` is the largest magnitude, at least :data:`jaxmoe.quant.codecs.FLOOR`; the scale is
    ``amax · fl(1/448)`` (``float32``) or the smallest power of two with ``amax / scale <= 448`` (``ue8m0``); the code
    is ``x · (1/scale)`` saturated and rounded to nearest even. A NaN stays NaN and does not enter ``amax``; an
    infinity counts as the largest float32. No other block is touched by either.

    Args:
      x: bfloat16 or float32 [..., M, K].
      quant: block and kind of scale.
      valid: bool [..., M]; rows where it is False may hold anything and become values 0 with scales 1. None: all.
      backend: see design: ``"auto"``, a name, or names in order.

    Returns:
      Values [..., M, Kp], K padded with zeros to a multiple of 128.

    Raises:
      FormatError: dtype of ``x`` or ``valid``. ShapeError: rank, or ``valid`` does not fit the rows.
      NotImplementedError: the named backend cannot do this case.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise FormatError(f"rows to quantise have dtype {x.dtype}; they must be bfloat16 or float32")
    if x.ndim < 2:
        raise ShapeError(f"rows to quantise have shape {x.shape}; expected [..., M, K]")
    if valid is not None:
        if valid.dtype != jnp.bool_:
            raise FormatError(f"valid has dtype {valid.dtype}; it must be bool")
        if valid.shape != x.shape[:-1]:
            raise ShapeError(f"valid has shape {valid.shape}; rows of shape {x.shape} need {x.shape[:-1]}")
    return _backend.run("quantize", BACKENDS, backend, x, quant, valid=valid)
