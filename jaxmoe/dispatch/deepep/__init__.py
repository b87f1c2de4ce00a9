"""Tokens reach experts on other GPUs of one host by DeepEP's kernels, through buffers that all of them can write to."""

from jaxmoe.dispatch.deepep.context import EpContext
from jaxmoe.dispatch.deepep.transport import DeepEP

__all__ = ["DeepEP", "EpContext"]
