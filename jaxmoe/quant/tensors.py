"""Quantised arrays: stacks of expert matrices, and rows. Both carry their scales in the one layout the GEMMs eat."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxmoe.quant.formats import ActivationQuant, WeightFormat

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedWeight:
    """E matrices [N, K] in one format; a row holds one output's weights ("NT": D[m, n] = Σ_k A[m, k]·B[n, k]).

    K is stored padded with zeros to ``Kp``, a multiple of ``format.k_multiple``; ``k`` is the logical width.
    Scales, by format (P words of 4 exponent bytes, low byte first; Na = N rounded up to 4):

    ============= ===================== ===========================================
    format        values                scales
    ============= ===================== ===========================================
    BF16          [E, N, K] bf16 (f32)  None
    FP8Block      [E, N, Kp] e4m3       f32 [E, ⌈N/128⌉, Kp/128]
    FP8BlockUE8M0 [E, N, Kp] e4m3       int32 [E, P = ⌈Kp/512⌉, Na], repeated per row
    MXFP8         [E, N, Kp] e4m3       int32 [E, P = Kp/128, Na]
    MXFP4         [E, N, Kp/2] uint8    int32 [E, P = Kp/128, Na]
    ============= ===================== ===========================================

    Attributes:
      values, scales: as above.
      format: static.
      k: logical K, static.
    """

    values: Array
    scales: Array | None
    format: WeightFormat = dataclasses.field(metadata={"static": True})
    k: int = dataclasses.field(metadata={"static": True})

    @property
    def num_experts(self) -> int:
        """E."""
        return self.values.shape[0]

    @property
    def n(self) -> int:
        """Outputs, N."""
        return self.values.shape[1]

    @property
    def k_padded(self) -> int:
        """Stored K in elements, Kp."""
        return self.values.shape[2] * (2 if self.format.bits == 4 else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedRows:
    """Rows [..., M, Kp] of e4m3 values with MN-major scales, Ma = M rounded up to 4, S = Kp/block.

    ``quant.scale == "float32"``: scales f32 [..., S, Ma]. ``"ue8m0"``: int32 [..., ⌈S/4⌉, Ma], four exponent bytes
    a word, low byte first. Padding rows have values 0 and scales 1; bytes past S are 127 as well.
    """

    values: Array
    scales: Array
    quant: ActivationQuant = dataclasses.field(metadata={"static": True})


def scales_like(format: WeightFormat, e: int, n: int, k_padded: int) -> jax.ShapeDtypeStruct | None:
    """Shape and dtype of the scales that :class:`GroupedWeight` holds for E matrices [N, Kp]; None without scales."""
    if not format.quantized:
        return None
    groups = k_padded // format.block_k
    if format.scale == "float32":
        return jax.ShapeDtypeStruct((e, -(-n // format.block_n), groups), jnp.float32)
    return jax.ShapeDtypeStruct((e, -(-groups // 4), -(-n // 4) * 4), jnp.int32)
