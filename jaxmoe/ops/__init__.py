"""The operations of the layer, one package each; see their ``api`` modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmoe.ops.grouped_gemm.deepgemm import kernel_format, mk_alignment

__all__ = ["kernel_format", "mk_alignment"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jaxmoe.ops' has no attribute {name!r}")
    from jaxmoe.ops.grouped_gemm import deepgemm

    return globals().setdefault(name, getattr(deepgemm, name))
