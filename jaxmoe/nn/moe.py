"""The NNX module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import initializers
from flax.typing import Initializer
from jax.sharding import Mesh

from jaxmoe.balance.load import moe_with_load
from jaxmoe.config import Activation, Execution, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.dispatch.base import Dispatch
from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.layer.params import MoEParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.layer.plan import Plan, plan
from jaxmoe.nn.init import init_params
from jaxmoe.nn.variables import SHARDING, Axes, to_arrays, to_variables
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.quant.formats import BF16, WeightFormat
from jaxmoe.quant.tensors import GroupedWeight
from jaxmoe.router import Routing

Array = jax.Array

KERNEL_INIT = initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=-1, out_axis=-2, batch_axis=0)
"""LeCun normal for stacks of [outputs, inputs], each matrix by itself."""
BIAS_INIT = initializers.zeros_init()


class MoE(nnx.Module):
    """A mixture-of-experts layer: router, routed experts and perhaps shared experts.

    The parameters keep the structure of :class:`jaxmoe.MoEParams` with a variable in place of every array, e.g.
    ``layer.router.kernel`` and ``layer.experts.gate_up.values``. Floats are ``nnx.Param``; quantised values and
    their scales are :class:`jaxmoe.nn.QuantizedParam`, which optimisers of ``nnx.Param`` leave alone. Each carries
    logical axis names (``expert``, ``mlp``, ``embed``; :data:`jaxmoe.nn.SHARDING`) for ``nnx.get_named_sharding``
    under ``nnx.logical_axis_rules``.

    ``jax.jit(layer)`` works and bakes the parameters in as they are at its first call. To see later updates, and
    with weights too large to be constants of a program, pass the layer in: ``jax.jit(MoE.__call__)(layer, x)``.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxmoe
      >>> layer = jaxmoe.nn.MoE(64, 32, 8, top_k=2, rngs=nnx.Rngs(0))
      >>> jax.jit(layer)(jnp.ones((2, 5, 64), jnp.bfloat16)).shape
      (2, 5, 64)
      >>> layer.experts.gate_up.values.shape
      (8, 64, 64)
      >>> packed = jaxmoe.nn.MoE(128, 128, 8, top_k=2, weights=jaxmoe.MXFP4, rngs=nnx.Rngs(0))
      >>> packed.experts.gate_up.values.shape, packed.experts.gate_up.values.dtype.name
      ((8, 256, 64), 'uint8')

    Attributes:
      config: what the layer is. execution: how it runs. dtype: of the computation, or None.
      layout, mesh, transport: where it runs, or None for one device; how tokens travel there.
      router, experts, shared: the parameters.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        *,
        top_k: int | None = None,
        router: RouterConfig | None = None,
        weights: WeightFormat = BF16,
        activation: Activation | None = None,
        shared: SharedExperts | None = None,
        expert_bias: bool = False,
        partial_blocks: bool = False,
        tid2eid: Array | None = None,
        execution: Execution | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.bfloat16,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        rngs: nnx.Rngs | None = None,
        params: MoEParams | None = None,
        layout: ParallelLayout | None = None,
        mesh: Mesh | None = None,
        transport: Dispatch | None = None,
        sharding: Mapping[str, Axes | None] = MappingProxyType({}),
        metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        """Makes the layer.

        Args:
          hidden, intermediate, num_experts: H, I, E.
          top_k: K; may be left out when ``router`` says it.
          router: how tokens choose experts; None is softmax over all, the best K, renormalised.
          weights: format of the expert weights; other formats than BF16 quantise what ``kernel_init`` gives.
          activation: None is ``Activation()``, SiLU(gate) · up.
          shared: experts that see every token, or None.
          expert_bias: biases for both expert projections.
          partial_blocks: accept sizes that are not multiples of the format's block.
          tid2eid: int32 [V, K], the table that hash routing needs.
          execution: None is ``Execution()``.
          dtype: of the computation and of y; None takes what x and the unquantised weights promote to.
          param_dtype: of unquantised expert weights, bfloat16 or float32. The router and all biases are float32.
          kernel_init: makes stacks of [outputs, inputs]: gate and up [E, I, H], down [E, H, I], router [1, E, H].
          bias_init: for biases; the selection bias always starts at 0.
          rngs: ``params`` stream; needed unless ``params`` are given.
          params: arrays to take as they are, instead of initialising.
          layout, mesh: cut the parameters over the mesh by :func:`jaxmoe.parallel.shard_params` and run there by
            :func:`jaxmoe.parallel.moe_parallel`; both or none. Parameters then carry no logical axis names.
          transport: of tokens between devices; None is XLA's collectives.
          sharding: logical axis names by parameter path that replace those of ``SHARDING``; None for no names.
          metadata: more metadata for every variable, e.g. ``eager_sharding=True`` to place parameters on creation.

        Raises:
          ValueError: sizes, formats, router and parameters do not fit together.
        """
        if router is None:
            if top_k is None:
                raise ValueError("top_k is missing: give top_k, or a RouterConfig as router")
            router = RouterConfig(num_experts=num_experts, top_k=top_k)
        elif router.num_experts != num_experts or top_k not in (None, router.top_k):
            raise ValueError(
                f"router has {router.num_experts} experts and top_k {router.top_k}, but the layer was asked for "
                f"num_experts {num_experts} and top_k {top_k}; make them equal or leave top_k out"
            )
        config = MoEConfig(
            hidden=hidden,
            intermediate=intermediate,
            router=router,
            weights=weights,
            activation=Activation() if activation is None else activation,
            expert_bias=expert_bias,
            shared=shared,
            partial_blocks=partial_blocks,
        )
        if params is None:
            if rngs is None:
                raise ValueError("rngs is missing: give rngs=nnx.Rngs(seed), or params")
            params = init_params(config, rngs, param_dtype, kernel_init, bias_init, tid2eid)
        if (layout is None) != (mesh is None) or (transport is not None and mesh is None):
            raise ValueError("layout and mesh go together, and a transport with them: give both, or none of the three")
        if layout is not None and mesh is not None:
            params = shard_params(params, config, layout, mesh)
            sharding = dict.fromkeys(SHARDING) | dict(sharding)
        variables = to_variables(params, sharding, metadata)
        self.config = config
        self.execution = Execution() if execution is None else execution
        self.dtype = dtype
        self.layout = layout
        self.mesh = mesh
        self.transport = transport
        self.router = nnx.data(variables.router)
        self.experts = nnx.data(variables.experts)
        self.shared = nnx.data(variables.shared)

    @classmethod
    def from_params(
        cls,
        config: MoEConfig,
        params: MoEParams,
        execution: Execution | None = None,
        *,
        dtype: Any = None,
        layout: ParallelLayout | None = None,
        mesh: Mesh | None = None,
        transport: Dispatch | None = None,
    ) -> MoE:
        """A layer around existing parameters, e.g. a checkpoint's; nothing is converted.

        Nothing is copied either, unless ``layout`` and ``mesh`` cut whole parameters over many devices.
        """
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        sizes = fields.pop("hidden"), fields.pop("intermediate"), config.router.num_experts
        where = {"layout": layout, "mesh": mesh, "transport": transport}
        return cls(*sizes, **fields, execution=execution, dtype=dtype, params=params, **where)

    @property
    def params(self) -> MoEParams:
        """The parameters as plain arrays, for :func:`jaxmoe.moe`."""
        return to_arrays(MoEParams(router=self.router, experts=self.experts, shared=self.shared))

    def __call__(
        self,
        x: Array,
        *,
        token_ids: Array | None = None,
        valid: Array | None = None,
        routing: Routing | None = None,
    ) -> Array:
        """Applies the layer to tokens of any leading shape.

        Args:
          x: [..., H] floating point.
          token_ids: int32 [...], for hash routing.
          valid: bool [...]; False marks padding, whose y is 0.
          routing: ids and weights [..., K] to use in place of the router's.

        Returns:
          y [..., H] in ``dtype``, or in what x and the unquantised weights promote to.

        Raises:
          ValueError: shapes or dtypes do not fit.
        """
        params, x, routing = self._inputs(x, routing)
        given = {"token_ids": token_ids, "valid": valid, "routing": routing}
        if self.layout is None or self.mesh is None:
            return moe(params, x, self.config, self.execution, **given)
        given["transport"] = self.transport
        return moe_parallel(params, x, self.config, self.layout, self.mesh, self.execution, **given)

    def with_load(
        self,
        x: Array,
        *,
        token_ids: Array | None = None,
        valid: Array | None = None,
        routing: Routing | None = None,
    ) -> tuple[Array, Array]:
        """Applies the layer and counts: y, and int32 [E], the choices that each routed expert got.

        Takes what a call of the layer takes; see :func:`jaxmoe.balance.moe_with_load`.
        """
        params, x, routing = self._inputs(x, routing)
        return moe_with_load(
            params,
            x,
            self.config,
            self.execution,
            layout=self.layout,
            mesh=self.mesh,
            transport=self.transport,
            token_ids=token_ids,
            valid=valid,
            routing=routing,
        )

    def _inputs(self, x: Array, routing: Routing | None) -> tuple[MoEParams, Array, Routing | None]:
        """Arrays as the functional core takes them."""
        if routing is not None:
            if routing.ids.shape[:-1] != x.shape[:-1]:
                raise ShapeError(
                    f"routing ids are {routing.ids.shape}; for x {x.shape} they must be {x.shape[:-1]} + (K,)"
                )
            routing = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), routing)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise FormatError(f"x is {x.dtype}; it must be floating point")
        return *self._promote(self.params, x), routing

    def _promote(self, params: MoEParams, x: Array) -> tuple[MoEParams, Array]:
        """x and the unquantised weights in the dtype of the computation."""

        def is_stack(node: Any) -> bool:
            return isinstance(node, GroupedWeight)

        def cast(node: Any) -> Any:
            floats = is_stack(node) and not node.format.quantized
            return dataclasses.replace(node, values=node.values.astype(dtype)) if floats else node

        dtype = self.dtype
        if dtype is None:
            stacks = filter(is_stack, jax.tree.leaves(params, is_leaf=is_stack))
            with jax.numpy_dtype_promotion("standard"):
                dtype = jnp.result_type(x, *(w.values for w in stacks if not w.format.quantized))
        return jax.tree.map(cast, params, is_leaf=is_stack), x.astype(dtype)

    def plan(self, tokens: int, *, device: str | None = None) -> Plan:
        """What the layer will do for ``tokens`` tokens: see :func:`jaxmoe.plan`.

        It is that of the whole layer on one device, also if the layer is cut over a mesh. x is taken to be in
        ``dtype``, or without one in the dtype of the weights, bf16 for quantised ones.
        """
        weights = jnp.bfloat16 if self.config.weights.quantized else self.experts.gate_up.values.dtype
        itemsize = jnp.dtype(weights if self.dtype is None else self.dtype).itemsize
        return plan(self.config, tokens, self.execution, device=device, itemsize=itemsize)
