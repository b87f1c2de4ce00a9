"""The layer for Flax: :class:`MoE` for NNX, and :mod:`jaxmoe.nn.linen`."""

from jaxmoe.nn import linen
from jaxmoe.nn.moe import MoE
from jaxmoe.nn.variables import SHARDING, Buffer, QuantizedParam

__all__ = ["SHARDING", "Buffer", "MoE", "QuantizedParam", "linen"]
