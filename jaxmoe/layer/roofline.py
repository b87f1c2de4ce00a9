"""Arithmetic, traffic and roofline time of each room of a layer.

Every room takes as long as its arithmetic or its memory traffic, whichever is longer, at the rates of
:data:`GPUS`. It is a floor to measure against, not a forecast. Element-wise arithmetic is not counted.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax

from jaxmoe.config import Execution, MoEConfig
from jaxmoe.layer.checks import stored_width
from jaxmoe.quant.formats import WeightFormat
from jaxmoe.quant.tensors import scales_like
from jaxmoe.sizes import round_up


@dataclasses.dataclass(frozen=True)
class GPU:
    """Rates of one GPU.

    Attributes:
      name: as users write it and as it appears in JAX's ``device_kind``.
      arch: what kernels are compiled for. num_sms: its multiprocessors.
      bandwidth: bytes per second. bf16, fp8: dense FLOP per second.
      source: where the figures come from.
    """

    name: str
    arch: str
    num_sms: int
    bandwidth: float
    bf16: float
    fp8: float
    source: str


_H200 = "measured 2026-11-30: copy, 8192³ bf16 matmul, grouped fp8 GEMM"
_H100 = "datasheet, H100 SXM"
_B200 = "datasheet, DGX B200, an eighth of the system, no sparsity"
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("H200", "sm_90a", 132, 4300e9, 790e12, 1320e12, _H200),
        GPU("H100", "sm_90a", 132, 3350e9, 989e12, 1979e12, _H100),
        GPU("B200", "sm_100f", 148, 8000e9, 2250e12, 4500e12, _B200),
    )
}
"""The GPUs whose rates are known, by name."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One room of the plan.

    Attributes:
      name: the room. flops: its multiplications and additions. bytes: read and written.
      seconds: the longer of the two at the GPU's rates; None without a GPU.
      bound: what takes that long; None without a GPU.
    """

    name: str
    flops: int
    bytes: int
    seconds: float | None
    bound: Literal["compute", "memory"] | None


def weight_bytes(fmt: WeightFormat, experts: int, n: int, k: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes of the values and of the scales of [experts, n, k] weights as ``GroupedWeight`` stores them."""
    k = round_up(k, fmt.k_multiple)
    scales = scales_like(fmt, experts, n, k)
    if scales is None:
        return experts * n * k * itemsize, 0
    return experts * n * k * fmt.bits // 8, scales.size * scales.dtype.itemsize


def find_gpu(device: str | None) -> GPU | None:
    """The named GPU, or (None) the one this process would use; None if that is none of :data:`GPUS`.

    Raises:
      ValueError: ``device`` is not one of :data:`GPUS`.
    """
    if device is not None:
        if device not in GPUS:
            raise ValueError(f"no figures for GPU {device!r}; choose one of {', '.join(map(repr, GPUS))}")
        return GPUS[device]
    kind = jax.devices()[0].device_kind
    return next((gpu for gpu in GPUS.values() if gpu.name in kind), None)


def touched_experts(tokens: int, config: MoEConfig) -> int:
    """Experts that uniform routing of ``tokens`` tokens is expected to reach, rounded."""
    e, k = config.router.num_experts, config.router.top_k
    return round(e * (1.0 - (1.0 - k / e) ** tokens))


def row_bytes(fmt: WeightFormat, execution: Execution, width: int, itemsize: int) -> int:
    """Bytes of one row of ``width`` as it meets the weights, its scales included."""
    if fmt.activation is None or not execution.quantize_activations:
        return width * itemsize
    width = round_up(width, fmt.k_multiple)
    groups = width // fmt.activation.block
    return width + 4 * (groups if fmt.activation.scale == "float32" else -(-groups // 4))


def mlp_weights(fmt: WeightFormat, experts: int, hidden: int, inter: int, itemsize: int) -> list[tuple[int, int]]:
    """(values, scales) bytes of the two projections."""
    inter = stored_width(inter, fmt)
    return [
        weight_bytes(fmt, experts, 2 * inter, hidden, itemsize),
        weight_bytes(fmt, experts, hidden, inter, itemsize),
    ]


def layer_weights(config: MoEConfig, itemsize: int) -> list[tuple[int, int]]:
    """(values, scales) bytes of every projection: both of the routed experts, then both of a shared expert apart."""
    experts, shared = config.router.num_experts + config.fused_slots, config.shared
    parts = mlp_weights(config.weights, experts, config.hidden, config.intermediate, itemsize)
    if shared is None or shared.fused:
        return parts
    return parts + mlp_weights(config.shared_format, 1, config.hidden, shared.intermediate, itemsize)


def quantise_stage(config: MoEConfig, ran: MoEConfig, itemsize: int, gpu: GPU | None) -> tuple[Stage, ...]:
    """Weights of ``config`` read, and written in the formats of ``ran``, where these are others; one stage or none."""
    pairs = zip(layer_weights(config, itemsize), layer_weights(ran, itemsize), strict=True)
    moved = sum(sum(kept) + sum(copy) for kept, copy in pairs if copy != kept)
    return (_stage("weights", 0, moved, gpu),) if moved else ()


def _stage(name: str, flops: int, nbytes: int, gpu: GPU | None, fp8: bool = False) -> Stage:
    if gpu is None:
        return Stage(name, flops, nbytes, None, None)
    compute, memory = flops / (gpu.fp8 if fp8 else gpu.bf16), nbytes / gpu.bandwidth
    return Stage(name, flops, nbytes, max(compute, memory), "compute" if compute > memory else "memory")


def room_stages(
    config: MoEConfig, tokens: int, execution: Execution, rows: int, touched: int, itemsize: int, gpu: GPU | None
) -> tuple[Stage, ...]:
    """Every room for T tokens, ``rows`` rows in use and ``touched`` experts with rows."""
    h, inter, fmt, r = config.hidden, config.intermediate, config.weights, config.router
    stored = stored_width(inter, fmt)
    up, down = (sum(part) for part in mlp_weights(fmt, touched, h, inter, itemsize))
    entering, activated = (row_bytes(fmt, execution, width, itemsize) for width in (h, stored))
    fp8 = fmt.quantized and execution.quantize_activations
    stage = functools.partial(_stage, gpu=gpu)
    stages = [
        stage("router", 2 * tokens * h * r.num_experts, tokens * (h * itemsize + 8 * r.top_k) + 4 * h * r.num_experts),
        stage("pre_permute", 0, tokens * h * itemsize + rows * entering),
        stage("gemm1", 4 * rows * h * inter, up + rows * (entering + 2 * stored * itemsize), fp8=fp8),
        stage("activation", 0, rows * (2 * stored * itemsize + activated)),
        stage("gemm2", 2 * rows * h * inter, down + rows * (activated + h * itemsize), fp8=fp8),
        stage("combine", 2 * rows * h, rows * (h * itemsize + 8) + tokens * h * itemsize),
    ]
    if config.shared is not None and not config.shared.fused and tokens:
        own, wide = config.shared_format, config.shared.intermediate
        weights = sum(map(sum, mlp_weights(own, 1, h, wide, itemsize)))
        moved = tokens * itemsize * (2 * h + 4 * stored_width(wide, own))
        fp8 = own.quantized and execution.quantize_activations
        stages.append(stage("shared", 6 * tokens * h * wide, weights + moved, fp8=fp8))
    return tuple(stages)
