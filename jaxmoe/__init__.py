"""Mixture-of-Experts inference for JAX.

Everything here is loaded at its first use: importing the package touches no device and needs no GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmoe import balance, checkpoint, errors, nn, parallel
    from jaxmoe.config import Activation, Execution, MoEConfig, RouterConfig, SharedExperts
    from jaxmoe.layer.params import MoEParams
    from jaxmoe.layer.pipeline import moe
    from jaxmoe.layer.plan import plan
    from jaxmoe.ops.debug import debug
    from jaxmoe.quant.formats import BF16, MXFP4, MXFP8, FP8Block, FP8BlockUE8M0
    from jaxmoe.router import Routing, route

_HOME = {
    "BF16": "jaxmoe.quant.formats",
    "FP8Block": "jaxmoe.quant.formats",
    "FP8BlockUE8M0": "jaxmoe.quant.formats",
    "MXFP4": "jaxmoe.quant.formats",
    "MXFP8": "jaxmoe.quant.formats",
    "Activation": "jaxmoe.config",
    "Execution": "jaxmoe.config",
    "MoEConfig": "jaxmoe.config",
    "RouterConfig": "jaxmoe.config",
    "SharedExperts": "jaxmoe.config",
    "MoEParams": "jaxmoe.layer.params",
    "Routing": "jaxmoe.router",
    "debug": "jaxmoe.ops.debug",
    "moe": "jaxmoe.layer.pipeline",
    "plan": "jaxmoe.layer.plan",
    "route": "jaxmoe.router",
}
_MODULES = ("balance", "checkpoint", "errors", "nn", "parallel")

__version__ = "0.1.0"
__all__ = [
    "BF16",
    "MXFP4",
    "MXFP8",
    "Activation",
    "Execution",
    "FP8Block",
    "FP8BlockUE8M0",
    "MoEConfig",
    "MoEParams",
    "RouterConfig",
    "Routing",
    "SharedExperts",
    "__version__",
    "balance",
    "checkpoint",
    "debug",
    "errors",
    "moe",
    "nn",
    "parallel",
    "plan",
    "route",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = importlib.import_module(f"jaxmoe.{name}")
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'jaxmoe' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
