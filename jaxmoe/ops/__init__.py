"""The operations of the layer, one package each; see their ``api`` modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmoe.ops.grouped_gemm.deepgemm import mk_alignment

__all__ = ["mk_alignment"]


def __getattr__(name: str) -> Any:
    if name != "mk_alignment":
        raise AttributeError(f"module 'jaxmoe.ops' has no attribute {name!r}")
    from jaxmoe.ops.grouped_gemm.deepgemm import mk_alignment

    globals()[name] = mk_alignment
    return mk_alignment
