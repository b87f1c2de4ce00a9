"""Quantised on the way forward, unquantised on the way back (straight-through estimation)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.config import Execution, MoEConfig
from jaxmoe.layer.build import expert_weights
from jaxmoe.layer.checks import stored_width
from jaxmoe.layer.params import ExpertWeights
from jaxmoe.ops.grouped_gemm.constants import undifferentiable
from jaxmoe.ops.manual_axes import vary_together
from jaxmoe.quant.formats import BF16, WeightFormat
from jaxmoe.quant.tensors import GroupedWeight
from jaxmoe.quant.weights import dequantize, quantize_weight

Array = jax.Array
Room = Callable[[Any, Any, Execution], Array]


def straight_through(room: Room, execution: Execution, operands: Any, rest: Any) -> Array:
    """``room`` with quantised weights and rows, whose gradients are those of ``room`` without any quantisation.

    Weights that are not quantised are quantised for this call. The way back runs ``room`` once more, in the dtype of
    the rows, with the weights as they were or dequantised: it keeps the operands and nothing else.

    Args:
      room: ``room(operands, rest, execution)``; closes over no array.
      execution: with a ``forward_format``.
      operands: what gradients flow to, any tree; expert weights in it are :class:`ExpertWeights`, x is its last leaf.
      rest: what they do not flow to.
    """
    operands = jax.tree.map(_refuse_gradient, operands, is_leaf=lambda node: isinstance(node, GroupedWeight))
    operands, rest = vary_together(operands, rest)
    return _run(room, execution, operands, rest)


def _refuse_gradient(node: Any) -> Any:
    return undifferentiable(node) if isinstance(node, GroupedWeight) and node.format.quantized else node


def _each_mlp(change: Callable[[ExpertWeights], ExpertWeights], operands: Any) -> Any:
    def is_mlp(node: Any) -> bool:
        return isinstance(node, ExpertWeights)

    return jax.tree.map(lambda node: change(node) if is_mlp(node) else node, operands, is_leaf=is_mlp)


def forward_config(config: MoEConfig, execution: Execution) -> MoEConfig:
    """The layer as its experts run forward: those that are not quantised are in ``forward_format``, if there is one."""
    fmt = execution.forward_format
    if fmt is None:
        return config
    weights, shared = (kept if kept.quantized else fmt for kept in (config.weights, config.shared_format))
    own = None if config.shared is None else dataclasses.replace(config.shared, weights=shared)
    return dataclasses.replace(config, weights=weights, shared=own, partial_blocks=True)


def backward_config(config: MoEConfig) -> MoEConfig:
    """The layer as its experts run once more on the way back: unquantised, as wide as they are stored."""
    width, own = stored_width(config.intermediate, config.weights), config.shared
    if own is not None:
        slots, stored = config.fused_slots, stored_width(own.intermediate, config.shared_format)
        own = dataclasses.replace(own, weights=BF16, intermediate=slots * width if own.fused else stored)
    return dataclasses.replace(config, weights=BF16, intermediate=width, shared=own)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(room: Room, execution: Execution, operands: Any, rest: Any) -> Array:
    fmt = execution.forward_format
    assert fmt is not None
    quantised = _each_mlp(lambda mlp: _quantised(mlp, fmt), operands)
    return room(quantised, rest, dataclasses.replace(execution, forward_format=None))


def _forward(room: Room, execution: Execution, operands: Any, rest: Any) -> tuple[Array, Any]:
    return _run(room, execution, operands, rest), (operands, rest)


def _backward(room: Room, execution: Execution, saved: Any, dy: Array) -> tuple[Any, None]:
    operands, rest = saved
    exact = dataclasses.replace(execution, forward_format=None, quantize_activations=False)
    dtype = jax.tree.leaves(operands)[-1].dtype
    masters = _each_mlp(lambda mlp: _dequantised(mlp, dtype), operands)
    gradients = jax.vjp(lambda operands: room(operands, rest, exact), masters)[1](dy)[0]

    def none_if_quantised(node: Any, gradient: Any) -> Any:
        return None if isinstance(node, GroupedWeight) and node.format.quantized else gradient

    def is_stack(node: Any) -> bool:
        return isinstance(node, GroupedWeight)

    nodes, tree = jax.tree.flatten(operands, is_leaf=is_stack)
    found = tree.flatten_up_to(gradients)
    return tree.unflatten(map(none_if_quantised, nodes, found)), None


_run.defvjp(_forward, _backward)


def _quantised(mlp: ExpertWeights, fmt: WeightFormat) -> ExpertWeights:
    if mlp.gate_up.format.quantized:
        return mlp
    halves = jnp.split(mlp.gate_up.values, 2, axis=1)
    gate, up, down = (quantize_weight(values, fmt) for values in (*halves, mlp.down.values))
    if mlp.gate_up_bias is None:
        return expert_weights(gate, up, down)
    gate_bias, up_bias = jnp.split(mlp.gate_up_bias, 2, axis=1)
    return expert_weights(gate, up, down, gate_bias, up_bias, mlp.down_bias)


def _dequantised(mlp: ExpertWeights, dtype: Any) -> ExpertWeights:
    if not mlp.gate_up.format.quantized:
        return mlp
    down = dequantize(mlp.down, dtype)
    down = jnp.pad(down, ((0, 0), (0, 0), (0, mlp.down.k_padded - mlp.down.k)))  # as wide as what gate_up gives
    stacks = (GroupedWeight(w, None, BF16, w.shape[2]) for w in (dequantize(mlp.gate_up, dtype), down))
    return dataclasses.replace(mlp, **dict(zip(("gate_up", "down"), stacks, strict=True)))
