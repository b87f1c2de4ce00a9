"""Parameters cut over a mesh: every device holds a proper stack of its own experts, in its own part of I.

A stack's shards lie one after the other along its first axis, by part of I and then by part of E. One PartitionSpec
then says where everything is, and no scale, block or pair of gate and up is ever cut by an even split: each shard was
cut out as its format needs, widened by zeros where a cut would fall inside a block.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.config import MoEConfig
from jaxmoe.layer.build import expert_weights
from jaxmoe.layer.checks import check_params
from jaxmoe.layer.params import ExpertWeights, MoEParams, SharedParams
from jaxmoe.parallel.mesh import ParallelLayout, devices
from jaxmoe.quant.formats import WeightFormat
from jaxmoe.quant.sharding import pad_k, pad_n, slice_k, slice_n

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class _Cuts:
    """Equal parts of a width; each is stored from a multiple of ``grid`` on, all ``width`` wide, zeros around."""

    ranges: tuple[tuple[int, int], ...]
    grid: int
    width: int


def _cuts(size: int, parts: int, fmt: WeightFormat) -> _Cuts:
    share, grid = size // parts, fmt.block
    ranges = tuple((r * share, (r + 1) * share) for r in range(parts))
    if all(start % grid == 0 for start, _ in ranges):
        return _Cuts(ranges, 1, share)
    return _Cuts(ranges, grid, max(-(-stop // grid) - start // grid for start, stop in ranges) * grid)


def local_config(config: MoEConfig, layout: ParallelLayout, mesh: Mesh) -> MoEConfig:
    """The layer as one device has it: E as on all devices, I and the shared width as stored on one."""
    cuts = _cuts(config.intermediate, devices(mesh, layout.named_axes["intermediate"]), config.weights)
    shared = config.shared
    if shared is not None:
        width = cuts.width * config.fused_slots
        if not shared.fused:
            width = _cuts(shared.intermediate, devices(mesh, layout.named_axes["shared"]), config.shared_format).width
        shared = dataclasses.replace(shared, intermediate=width)
    return dataclasses.replace(config, intermediate=cuts.width, shared=shared, partial_blocks=True)


def param_specs(config: MoEConfig, layout: ParallelLayout) -> MoEParams:
    """Where :func:`shard_params` puts a layer's parameters: a prefix of their tree, of PartitionSpecs."""
    everywhere, axes = PartitionSpec(), layout.named_axes
    cut = _stack(axes["intermediate"] + axes["experts"])
    experts = ExpertWeights(cut, cut, cut, _stack(axes["experts"]))  # type: ignore[arg-type]
    shared = None
    if config.shared is not None:
        cut = _stack(axes["shared"])
        shared = SharedParams(ExpertWeights(cut, cut, cut, everywhere), everywhere)  # type: ignore[arg-type]
        shared = SharedParams(None, everywhere) if config.shared.fused else shared  # type: ignore[arg-type]
    return MoEParams(everywhere, experts, shared)  # type: ignore[arg-type]


def _stack(axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(axes) if axes else PartitionSpec()


def shard_params(params: MoEParams, config: MoEConfig, layout: ParallelLayout, mesh: Mesh) -> MoEParams:
    """Cuts a whole layer's parameters and puts them on their devices.

    Values and scales are not changed. A fused shared expert is copied to every part of E; in training, the gradients
    of the copies are to be added.

    Args:
      params: the layer's parameters, as :func:`jaxmoe.moe` takes them. With several processes, the same on all.
      config: what the layer is.
      layout, mesh: which axes cut what.

    Returns:
      Parameters for :func:`jaxmoe.parallel.moe_parallel` with the same config, layout and mesh.

    Raises:
      ShapeError, FormatError, ValueError: the layout does not fit, or the parameters do not.
    """
    layout.check(mesh, config)
    check_params(params, config)
    axes = layout.named_axes
    cuts = _cuts(config.intermediate, devices(mesh, axes["intermediate"]), config.weights)
    experts = _cut_stack(params.experts, cuts)
    experts = _spread(experts, config, devices(mesh, axes["experts"]), len(cuts.ranges))
    shared = params.shared
    if shared is not None and shared.experts is not None and config.shared is not None:
        cuts = _cuts(config.shared.intermediate, devices(mesh, axes["shared"]), config.shared_format)
        shared = dataclasses.replace(shared, experts=_cut_stack(shared.experts, cuts))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(config, layout))
    return jax.device_put(MoEParams(params.router, experts, shared), shardings)


@functools.partial(jax.jit, static_argnums=1)  # or each of the many cuts would be compiled by itself
def _cut_stack(w: ExpertWeights, cuts: _Cuts) -> ExpertWeights:
    """All parts of I, one after the other along the experts; the down bias once."""
    if len(cuts.ranges) == 1:
        return w
    half, parts = w.gate_up.n // 2, []
    for start, stop in cuts.ranges:
        gate, up = (
            pad_n(slice_n(w.gate_up, [(first + start, first + stop)], grid=cuts.grid), cuts.width)
            for first in (0, half)
        )
        down = pad_k(slice_k(w.down, start, stop, grid=cuts.grid), cuts.width)
        biases = []
        if w.gate_up_bias is not None:
            before = start - start // cuts.grid * cuts.grid
            around = ((0, 0), (before, cuts.width - before - (stop - start)))
            biases = [jnp.pad(w.gate_up_bias[:, first + start : first + stop], around) for first in (0, half)] + [
                w.down_bias
            ]
        parts.append(expert_weights(gate, up, down, *biases))
    joined = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    return dataclasses.replace(joined, down_bias=w.down_bias)


def _spread(w: ExpertWeights, config: MoEConfig, ranks: int, parts: int) -> ExpertWeights:
    """Within each part of I: every rank's experts, then the fused ones."""
    if ranks == 1 or not config.fused_slots:
        return w
    e, held = config.router.num_experts, config.router.num_experts + config.fused_slots
    fused = np.arange(e, held)
    order = np.concatenate([np.concatenate([own, fused]) for own in np.split(np.arange(e), ranks)])
    all_parts = np.concatenate([part * held + order for part in range(parts)])
    spread = jax.tree.map(lambda a: a[all_parts], dataclasses.replace(w, down_bias=None))
    return dataclasses.replace(spread, down_bias=None if w.down_bias is None else w.down_bias[order])
