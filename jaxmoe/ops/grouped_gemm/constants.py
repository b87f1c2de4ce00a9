"""Operands that have no gradient, and say so when they are differentiated."""

from __future__ import annotations

import jax

from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows

Array = jax.Array


def undifferentiable[T: (QuantizedRows, GroupedWeight)](operand: T) -> T:
    """``operand``, quantised rows or a quantised weight, unchanged; differentiating it is refused with the way out."""
    what = "quantised rows" if isinstance(operand, QuantizedRows) else "quantised weights"
    return jax.tree.map(lambda leaf: _constant(leaf, what), operand)


def _identity(leaf: Array, what: str) -> Array:
    del what
    return leaf


_constant = jax.custom_jvp(_identity, nondiff_argnums=(1,))


@_constant.defjvp
def _refuse(what: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    raise NotImplementedError(
        f"{what} have no gradient; for gradients of x and of the router differentiate with "
        "Execution(forward_format=...), which quantises forward only, or with quantize_activations=False; keep weights "
        "that train in BF16"
    )
