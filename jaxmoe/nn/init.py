"""Fresh parameters for a layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

from jaxmoe.config import MoEConfig
from jaxmoe.errors import FormatError
from jaxmoe.layer.build import make_params
from jaxmoe.layer.params import MoEParams
from jaxmoe.router import check_table

Array = jax.Array


def init_params(
    config: MoEConfig,
    rngs: nnx.Rngs,
    param_dtype: Any,
    kernel_init: Initializer,
    bias_init: Initializer,
    tid2eid: Array | None,
) -> MoEParams:
    """Draws every parameter; see :class:`jaxmoe.nn.MoE` for the arguments.

    Raises:
      FormatError: ``param_dtype`` is neither bfloat16 nor float32.
      ValueError: the table is missing, or there without hash routing, or not a table of K experts; experts have copies.
    """
    dtype = jnp.dtype(param_dtype)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise FormatError(f"param_dtype is {dtype.name}; it must be bfloat16 or float32")
    _check_table(config, tid2eid)
    if config.router.logical_experts is not None:
        raise ValueError(
            f"logical_experts is {config.router.logical_experts}, and fresh parameters hold no copies of experts; make "
            "the layer without it and place its experts with jaxmoe.balance.place_experts"
        )
    h, i, router = config.hidden, config.intermediate, config.router
    e = router.num_experts

    def kernel(*shape: int, dtype: Any = dtype) -> Array:
        return kernel_init(rngs.params(), shape, dtype)

    def bias(*shape: int) -> Array:
        return bias_init(rngs.params(), shape, jnp.float32)

    optional: dict[str, Array | None] = {"tid2eid": tid2eid}
    if router.logit_bias:
        optional["logit_bias"] = bias(e)
    if router.correction_bias:
        optional["correction_bias"] = jnp.zeros(e, jnp.float32)
    if config.expert_bias:
        optional.update(gate_bias=bias(e, i), up_bias=bias(e, i), down_bias=bias(e, h))
    if config.shared is not None:
        width = config.shared.intermediate
        gate, up, down = kernel(1, width, h), kernel(1, width, h), kernel(1, h, width)
        optional.update(shared_gate=gate[0], shared_up=up[0], shared_down=down[0])
        if config.shared.gate:
            optional["shared_gate_vector"] = kernel(1, 1, h, dtype=jnp.float32)[0, 0]
    return make_params(
        config,
        router_kernel=kernel(1, e, h, dtype=jnp.float32)[0].T,
        gate=kernel(e, i, h),
        up=kernel(e, i, h),
        down=kernel(e, h, i),
        **optional,
    )


def _check_table(config: MoEConfig, tid2eid: Array | None) -> None:
    k = config.router.top_k
    if config.router.hash_routing != (tid2eid is not None):
        have, need = "missing" if tid2eid is None else "given", f"True goes with an int32 table [V, {k}]"
        raise ValueError(f"hash_routing is {config.router.hash_routing} but tid2eid is {have}; {need}")
    if tid2eid is not None:
        check_table(tid2eid, config.router.num_experts, k)
