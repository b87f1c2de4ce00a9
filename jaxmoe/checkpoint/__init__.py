"""Hugging Face checkpoints: from files to the parameters of one MoE layer, kept quantised, and back."""

from __future__ import annotations

from jaxmoe.checkpoint.layer import moe_layers
from jaxmoe.checkpoint.load import LoadedMoE, load_config, load_moe
from jaxmoe.checkpoint.reader import CheckpointReader, TensorInfo
from jaxmoe.checkpoint.save import save_moe

__all__ = ["CheckpointReader", "LoadedMoE", "TensorInfo", "load_config", "load_moe", "moe_layers", "save_moe"]
