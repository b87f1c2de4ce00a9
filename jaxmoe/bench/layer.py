"""A whole layer on random weights: how long it takes, what it could take at best, and where its time goes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.bench import timing
from jaxmoe.bench.trace import SEPARATE, Trace, trace_compiled
from jaxmoe.config import Execution, MoEConfig
from jaxmoe.layer.checks import stored_width
from jaxmoe.layer.layout import tile_rows
from jaxmoe.layer.params import ExpertWeights, MoEParams, RouterParams, SharedParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.layer.plan import Plan, plan
from jaxmoe.ops.dense_gemm import dense_gemm
from jaxmoe.ops.grouped_gemm import grouped_gemm
from jaxmoe.ops.permute import group_tokens
from jaxmoe.ops.quantize import quantize
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant import quantize_weight
from jaxmoe.quant.formats import WeightFormat
from jaxmoe.quant.tensors import QuantizedRows

Array = jax.Array

ROOMS = ("router", "dispatch", "pre_permute", "gemm1", "activation", "gemm2", "post_permute", "combine", "shared")
"""The named scopes of :func:`jaxmoe.layer.pipeline.moe`."""


@dataclasses.dataclass(frozen=True)
class Floor:
    """What a layer would take if its rooms did their work back to back at rates measured in the same run.

    Attributes:
      gemms: seconds of the same GEMMs, each run by itself.
      moved: seconds that all other rooms' bytes take at the copy rate.
    """

    gemms: float
    moved: float

    @property
    def seconds(self) -> float:
        """Both."""
        return self.gemms + self.moved


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured of one layer at one number of tokens.

    Attributes:
      plan: what was to be expected.
      seconds: a call of the jitted layer, median of back-to-back calls.
      peak: bytes of parameters, inputs, output and temporaries as XLA laid the program out.
      floor: see :class:`Floor`.
      trace: what ran, by instruction; None where the profiler sees nothing (CPU).
      replay: the same with command buffers, as the program usually runs, without instructions.
    """

    plan: Plan
    seconds: float
    peak: int
    floor: Floor
    trace: Trace | None
    replay: Trace | None

    @property
    def rooms(self) -> dict[str, float]:
        """Seconds by room, those in which no kernel of the replay ran as ``"idle"``; empty without a trace."""
        if self.trace is None or self.replay is None:
            return {}
        rooms = self.trace.by_room(ROOMS) | {"idle": self.replay.idle}
        return {room: seconds for room, seconds in rooms.items() if seconds > 0}


def measure(config: MoEConfig, tokens: int, execution: Execution | None = None, *, seed: int = 0) -> Figures:
    """Runs a layer of random weights on the device at hand.

    Args:
      config: what the layer is; its experts all live here. Without hash routing.
      tokens: T, at least 1.
      execution: how it runs; None is ``Execution()``.
      seed: of weights and tokens.

    Raises:
      ValueError: the layer routes by token ids.
    """
    if config.router.hash_routing:
        raise ValueError("a layer with hash_routing needs token ids and a table; measure it with a learned router")
    execution = Execution() if execution is None else execution
    expected = plan(config, tokens, execution)
    params = random_params(config, seed)
    x = jax.random.normal(jax.random.key(seed + 1), (tokens, config.hidden), jnp.bfloat16)
    lowered = jax.jit(functools.partial(moe, config=config, execution=execution)).lower(params, x)
    layer = lowered.compile()
    memory = layer.memory_analysis()
    assert memory is not None
    seconds = timing.seconds(layer, params, x)
    traced = replay = None
    if jax.default_backend() == "gpu":
        traced, replay = (trace_compiled(c, params, x) for c in (lowered.compile(SEPARATE), layer))
    return Figures(
        plan=expected,
        seconds=seconds,
        peak=memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes,
        floor=_floor(params, x, expected),
        trace=traced,
        replay=replay,
    )


def random_params(config: MoEConfig, seed: int = 0) -> MoEParams:
    """Parameters of a layer, drawn in bf16 one matrix stack at a time and quantised into the config's formats."""
    keys = iter(jax.random.split(jax.random.key(seed), 16))
    e = config.router.num_experts

    def draw(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16) * shape[-1] ** -0.5

    def mlp(fmt: WeightFormat, stack: int, width: int, bias: bool = False) -> ExpertWeights:
        stored = stored_width(width, fmt)
        return ExpertWeights(
            gate_up=_quantize_weight(draw(stack, 2 * stored, config.hidden), fmt),
            down=_quantize_weight(draw(stack, config.hidden, stored), fmt),
            gate_up_bias=jnp.zeros((stack, 2 * stored), jnp.float32) if bias else None,
            down_bias=jnp.zeros((stack, config.hidden), jnp.float32) if bias else None,
        )

    zeros = jnp.zeros(e, jnp.float32)
    router = RouterParams(
        kernel=draw(config.hidden, e).astype(jnp.float32),
        logit_bias=zeros if config.router.logit_bias else None,
        correction_bias=zeros if config.router.correction_bias else None,
    )
    shared = config.shared
    apart = None
    if shared is not None:
        own = None if shared.fused else mlp(config.shared_format, 1, shared.intermediate)
        gate = draw(config.hidden).astype(jnp.float32) if shared.gate else None
        apart = SharedParams(own, gate) if own is not None or gate is not None else None
    routed = mlp(config.weights, e + config.fused_slots, config.intermediate, config.expert_bias)
    return MoEParams(router, routed, apart)


_quantize_weight = jax.jit(quantize_weight, static_argnums=1)
_quantize = jax.jit(quantize, static_argnums=1)


def _floor(params: MoEParams, x: Array, expected: Plan) -> Floor:
    """Both parts; ids are spread evenly, as random weights spread them nearly."""
    config, execution, tokens = expected.config, expected.execution, x.shape[0]
    choices = config.router.top_k + config.fused_slots
    experts = config.router.num_experts + config.fused_slots
    ids = (jnp.arange(tokens * choices, dtype=jnp.int32) % experts).reshape(tokens, choices)
    grouping = group_tokens(
        ids, experts, layout=expected.layout, alignment=expected.alignment, capacity=execution.masked_capacity
    )

    def rows(width: int, fmt: WeightFormat, shape: tuple[int, ...]) -> Array | QuantizedRows:
        drawn = jax.random.normal(jax.random.key(9), (*shape, width), jnp.bfloat16)
        quant = fmt.activation if execution.quantize_activations else None
        return drawn if quant is None else _quantize(drawn, quant)

    each = tile_rows(execution, tokens * choices, experts)
    gemms = 0.0
    for weight in (params.experts.gate_up, params.experts.down):
        grouped = GroupedRows(
            rows(weight.k_padded, weight.format, grouping.row_shape),
            grouping.group,
            grouping.layout,
            grouping.alignment,
        )
        gemms += timing.kernel_seconds(_grouped(each, execution.backend), grouped, weight)
    if params.shared is not None and params.shared.experts is not None:
        for weight in (params.shared.experts.gate_up, params.shared.experts.down):
            dense = rows(weight.k_padded, weight.format, (tokens,))
            gemms += timing.kernel_seconds(_dense(execution.backend), dense, weight, inner=16)
    moved = sum(stage.bytes for stage in expected.stages if stage.name not in ("gemm1", "gemm2", "shared"))
    return Floor(gemms, moved / timing.copy_rate())


@functools.cache
def _grouped(each: int, backend: Any) -> Any:
    return jax.jit(lambda rows, weight: grouped_gemm(rows, weight, expected_m=each, backend=backend))


@functools.cache
def _dense(backend: Any) -> Any:
    return jax.jit(lambda rows, weight: dense_gemm(rows, weight, backend=backend))
