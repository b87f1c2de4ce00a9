"""The parameters of one MoE layer, as pytrees without Flax."""

from __future__ import annotations

import dataclasses

import jax

from jaxmoe.quant.tensors import GroupedWeight

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterParams:
    """The router's parameters; E are the experts it knows, ``RouterConfig.logical``.

    Attributes:
      kernel: f32 [H, E].
      logit_bias: f32 [E], added to the logits, or None.
      correction_bias: f32 [E], added to the selection scores only, or None.
      tid2eid: int32 [V, K], expert ids by token id (hash routing), or None.
      replicas: int32 [E, C], where in the stacks each expert's copies are, -1 after the last; None: expert e is at e.
    """

    kernel: Array
    logit_bias: Array | None = None
    correction_bias: Array | None = None
    tid2eid: Array | None = None
    replicas: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """Both projections of all local experts; fused shared experts are the last of them.

    I here is the stored width Ip: the config's I, padded with zeros to 128 for quantised formats.

    Attributes:
      gate_up: [E, 2·Ip, H]; the first Ip rows are the gate, the rest the up projection.
      down: [E, H, Ip].
      gate_up_bias: f32 [E, 2·Ip] in the same order, or None.
      down_bias: f32 [E, H], or None.
    """

    gate_up: GroupedWeight
    down: GroupedWeight
    gate_up_bias: Array | None = None
    down_bias: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedParams:
    """A shared expert kept apart: one dense MLP (its weights are stacks of one) and perhaps a gate vector.

    Attributes:
      experts: None when the shared experts are fused slots of the routed ones.
      gate: f32 [H], or None.
    """

    experts: ExpertWeights | None
    gate: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEParams:
    """All parameters of one MoE layer."""

    router: RouterParams
    experts: ExpertWeights
    shared: SharedParams | None = None
