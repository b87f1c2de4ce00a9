"""The layer for Flax Linen."""

from __future__ import annotations

from typing import Any

from flax import linen, nnx

from jaxmoe.nn.moe import MoE as NnxMoE


def MoE(hidden: int, intermediate: int, num_experts: int, *, name: str | None = None, **kwargs: Any) -> linen.Module:
    """:class:`jaxmoe.nn.MoE` as a Linen module.

    ``init`` gives the same names as the NNX module, nested: ``params`` holds ``router/kernel``,
    ``experts/gate_up/values``, ``experts/down/values`` and so on; quantised weights are in the collection
    ``quantized_params``, the selection bias and the hash table in ``buffers``. Leaves are
    ``linen.LogicallyPartitioned`` with the logical axis names of :data:`jaxmoe.nn.SHARDING`, so that
    ``linen.get_partition_spec`` and ``linen.logical_to_mesh_sharding`` work. The module takes one array by position,
    x [..., H], and ``token_ids``, ``valid`` and ``routing`` by keyword. With ``nnx_method="with_load"`` it gives y and
    the load of every expert.

    Every ``apply`` draws the module's initial values before it takes the given ones; under ``jax.jit`` they are dead
    code and cost nothing.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> import jaxmoe.nn.linen
      >>> layer = jaxmoe.nn.linen.MoE(64, 32, 8, top_k=2)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((5, 64), jnp.bfloat16))
      >>> jax.jit(layer.apply)(variables, jnp.ones((5, 64), jnp.bfloat16)).shape
      (5, 64)
      >>> layer.apply(variables, jnp.ones((5, 64), jnp.bfloat16), nnx_method="with_load")[1].sum()
      Array(10, dtype=int32)

    Args:
      hidden, intermediate, num_experts: H, I, E.
      name: of the module, for Linen.
      **kwargs: those of :class:`jaxmoe.nn.MoE`, without ``rngs``.
    """
    return nnx.bridge.to_linen(NnxMoE, hidden, intermediate, num_experts, name=name, metadata_fn=_box, **kwargs)


def _box(variable: nnx.Variable[Any]) -> Any:
    names = variable.get_metadata("out_sharding", None)
    return variable.get_value() if names is None else linen.LogicallyPartitioned(variable.get_value(), names)
