"""How a layer's parameters become NNX variables: their types and their logical axis names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmoe.layer.params import MoEParams

Axes = tuple[str | None, ...]


class QuantizedParam(nnx.Variable[Any]):
    """Values or scales of quantised weights: saved and sharded like a parameter, but not trained by gradients."""


class Buffer(nnx.Variable[Any]):
    """What gradients do not reach: the selection bias (moved by its own rule), the hash table, the table of copies."""


nnx.register_variable_name("quantized_params", QuantizedParam)
nnx.register_variable_name("buffers", Buffer)

SHARDING: Mapping[str, Axes] = {
    "router.kernel": ("embed", None),
    "router.logit_bias": (None,),
    "router.correction_bias": (None,),
    "router.tid2eid": (None, None),
    "router.replicas": (None, None),
    "experts.gate_up.values": ("expert", "mlp", "embed"),
    "experts.gate_up.scales": ("expert", None, None),
    "experts.gate_up_bias": ("expert", "mlp"),
    "experts.down.values": ("expert", "embed", "mlp"),
    "experts.down.scales": ("expert", None, None),
    "experts.down_bias": ("expert", "embed"),
    "shared.experts.gate_up.values": (None, "mlp", "embed"),
    "shared.experts.gate_up.scales": (None, None, None),
    "shared.experts.gate_up_bias": (None, "mlp"),
    "shared.experts.down.values": (None, "embed", "mlp"),
    "shared.experts.down.scales": (None, None, None),
    "shared.experts.down_bias": (None, "embed"),
    "shared.gate": ("embed",),
}
"""Logical axis names of every parameter, by its path. Scales are split by expert only: their packed and blocked
axes seldom divide."""

_BUFFERS = ("router.correction_bias", "router.tid2eid", "router.replicas")


def to_variables(params: MoEParams, sharding: Mapping[str, Axes | None], metadata: Mapping[str, Any]) -> MoEParams:
    """The same tree with an ``nnx.Variable`` around every array.

    Args:
      params: arrays.
      sharding: axis names by path that replace those of :data:`SHARDING`; None for none.
      metadata: more metadata for every variable.

    Raises:
      ValueError: ``sharding`` names an unknown path, or has another number of axes than the parameter.
    """
    unknown = sorted(set(sharding) - set(SHARDING))
    if unknown:
        raise ValueError(f"sharding has no parameter {unknown[0]!r}; the paths are {', '.join(SHARDING)}")
    axes = {**SHARDING, **sharding}

    def wrap(key_path: tuple[Any, ...], value: jax.Array) -> nnx.Variable[Any]:
        path = jax.tree_util.keystr(key_path, simple=True, separator=".")
        names = axes[path]
        if names is not None and len(names) != value.ndim:
            raise ValueError(f"sharding of {path} names {len(names)} axes, {names}, but its shape is {value.shape}")
        return _kind(path, value)(value, **{"out_sharding": names, "eager_sharding": False, **metadata})

    return jax.tree_util.tree_map_with_path(wrap, params)


def to_arrays(variables: MoEParams) -> MoEParams:
    """The arrays of :func:`to_variables`' result."""
    return jax.tree.map(lambda v: v[...], variables, is_leaf=lambda v: isinstance(v, nnx.Variable))


def _kind(path: str, value: jax.Array) -> type[nnx.Variable[Any]]:
    if path in _BUFFERS:
        return Buffer
    trained = value.dtype in (jnp.float32, jnp.bfloat16, jnp.float16) and not path.endswith(".scales")
    return nnx.Param if trained else QuantizedParam
