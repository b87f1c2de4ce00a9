"""Debug mode: what kernels silently get wrong is looked for on the device before each GEMM, on any backend.

Row labels, ends and counts must keep their layout's contract, and no exponent byte of a UE8M0 scale may be 0 or 255.
The first value that is wrong stops the program before the kernel with an error of the runtime that names it. It costs
a transfer to the host per GEMM; when it is off, which is the default, nothing of it is in the program.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.errors import FormatError
from jaxmoe.quant.scale_layout import unpack_ue8m0
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows

Array = jax.Array

_SWITCH = jax.make_user_context(default_value=None)


def debug(enabled: bool = True) -> AbstractContextManager[None]:
    """Programs traced inside are in debug mode, or are not; outside, ``JAXMOE_DEBUG=1`` in the environment decides."""
    return _SWITCH(enabled)


def debugging() -> bool:
    """Whether debug mode is on."""
    chosen = _SWITCH.value
    return os.environ.get("JAXMOE_DEBUG", "0") not in ("", "0") if chosen is None else chosen


def guarded(array: Array, check: Callable[..., None], *values: Array) -> Array:
    """``array``, int32, for which the program waits until ``check(*values)``, on the host, has not raised."""

    def run(*values: Any) -> np.ndarray:
        check(*map(np.asarray, values))
        return np.zeros((), np.int32)

    return array + jax.pure_callback(run, jax.ShapeDtypeStruct((), jnp.int32), *values, vmap_method="sequential")


def check_scales(array: Array, operand: QuantizedRows | GroupedWeight, real: Array | None = None) -> Array:
    """``array``, int32, guarded by a check of the operand's scales if they are UE8M0.

    Args:
      array: what the GEMM needs.
      operand: rows or a weight.
      real: bool, the rows' leading shape: rows to look at; None for all.
    """
    if isinstance(operand, QuantizedRows):
        what, kind, columns = "rows", operand.quant.scale, operand.quant.block
        groups = operand.values.shape[-1] // columns
    else:
        what, kind, columns = "weight", operand.format.scale, operand.format.block_k
        groups = operand.k_padded // columns
    if kind != "ue8m0" or not operand.values.size:
        return array
    assert operand.scales is not None
    stored = unpack_ue8m0(operand.scales, operand.values.shape[-2], groups)
    bad = (stored == 0) | (stored == 255)
    if real is not None:
        bad &= real[..., None]
    first = jnp.argmax(bad)

    def check(count: np.ndarray, first: np.ndarray, byte: np.ndarray) -> None:
        if count:
            *place, group = map(int, np.unravel_index(int(first), stored.shape))
            raise FormatError(
                f"{count} UE8M0 scales of the {what} are 0 or 255, which no finite value has; the first is {byte} at "
                f"row {place} (of {list(stored.shape[:-1])}), columns {group * columns}..{(group + 1) * columns - 1}"
            )

    return guarded(array, check, jnp.sum(bad, dtype=jnp.int32), first, stored.reshape(-1)[first])
