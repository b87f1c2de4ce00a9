"""What a layer will do for T tokens, before it does it: layout, rows, bytes, kernels, expected time.

The time is a roofline: every room takes as long as its arithmetic or its memory traffic, whichever is longer, at
the rates of :data:`GPUS`. It is a floor to measure against, not a forecast.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from jaxmoe.config import Execution, Layout, MoEConfig
from jaxmoe.errors import ShapeError
from jaxmoe.ops import grouped_gemm
from jaxmoe.ops.permute import padded_rows
from jaxmoe.quant.formats import WeightFormat

DECODE_TOKENS = 128
"""Up to so many tokens ``layout="auto"`` takes masked: no expert then has more than one tile of rows."""


@dataclasses.dataclass(frozen=True)
class GPU:
    """Rates of one GPU.

    Attributes:
      name: as users write it and as it appears in JAX's ``device_kind``.
      arch: of the kernels, e.g. ``sm90``.
      bandwidth: bytes per second. bf16, fp8: dense FLOP per second.
      source: where the figures come from.
    """

    name: str
    arch: str
    bandwidth: float
    bf16: float
    fp8: float
    source: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(
            "H200",
            "sm90",
            4300e9,
            790e12,
            1320e12,
            "measured 2026-11-30: copy rate, 8192³ bf16 matmul, grouped fp8 GEMM",
        ),
        GPU("H100", "sm90", 3350e9, 989e12, 1979e12, "datasheet, H100 SXM"),
        GPU(
            "B200", "sm100", 8000e9, 2250e12, 4500e12, "datasheet, DGX B200, an eighth of the system, without sparsity"
        ),
    )
}


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


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes by item.

    Attributes:
      weights, scales: expert weights (shared experts and biases included) and their scales.
      router: the router's parameters, a hash table not counted.
      rows: grouped rows that enter gemm1, scales included.
      intermediate: gemm1's output and the activated rows, scales included.
      outputs: gemm2's rows and y.
      peak: parameters, x, and the largest set of buffers that are alive together between two rooms.
    """

    weights: int
    scales: int
    router: int
    rows: int
    intermediate: int
    outputs: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The answer of :func:`plan`; ``print`` it.

    Attributes:
      config, tokens, execution: what was asked.
      layout: rows' layout, and ``layout_reason`` why.
      alignment: A, rows an expert starts at a multiple of.
      capacity: rows M of the grouped buffers (E·C for masked).
      assignments: rows that hold a token, T·K and the fused slots.
      touched_experts: experts that get a token when routing is uniform.
      backend: what the grouped GEMMs run on, ``backend_reason`` why.
      kernels: (room, what runs there).
      memory: bytes by item.
      stages: rooms with their arithmetic and traffic.
      gpu: rates the times are from, None on CPU.
    """

    config: MoEConfig
    tokens: int
    execution: Execution
    layout: Layout
    layout_reason: str
    alignment: int
    capacity: int
    assignments: int
    touched_experts: int
    backend: str
    backend_reason: str
    kernels: tuple[tuple[str, str], ...]
    memory: Memory
    stages: tuple[Stage, ...]
    gpu: GPU | None

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole layer."""
        return sum(stage.flops for stage in self.stages)

    @property
    def bytes(self) -> int:
        """Bytes read and written by the whole layer."""
        return sum(stage.bytes for stage in self.stages)

    @property
    def seconds(self) -> float | None:
        """Roofline time of the whole layer; None without a GPU."""
        return None if self.gpu is None else sum(stage.seconds or 0.0 for stage in self.stages)

    @property
    def bound(self) -> str | None:
        """What most of the time goes to: ``"compute"`` or ``"memory"``; None without a GPU."""
        if self.gpu is None:
            return None
        compute = sum(stage.seconds or 0.0 for stage in self.stages if stage.bound == "compute")
        return "compute" if 2 * compute > (self.seconds or 0.0) else "memory"

    def __str__(self) -> str:
        return _describe(self)


def plan(
    config: MoEConfig,
    tokens: int,
    execution: Execution | None = None,
    *,
    device: str | None = None,
    itemsize: int = 2,
) -> Plan:
    """Says what a layer will do for ``tokens`` tokens; runs nothing on a device.

    Args:
      config: the layer.
      tokens: T, at least 0.
      execution: how it runs; None takes ``Execution()``.
      device: a name of :data:`GPUS`, or None for the machine at hand (a CPU gets no times).
      itemsize: bytes of a value of x, y and unquantised weights: 2 for bf16, 4 for f32.

    Raises:
      ShapeError: ``tokens`` is not an integer of at least 0.
      ValueError: ``device`` is not one of :data:`GPUS`.
    """
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise ShapeError(f"tokens is {tokens!r}; it must be an integer of at least 0")
    execution = Execution() if execution is None else execution
    gpu = _find_gpu(device)
    layout, layout_reason = choose_layout(tokens, execution)
    experts = config.router.num_experts + config.fused_slots
    assignments = tokens * (config.router.top_k + config.fused_slots)
    alignment = row_alignment(execution, gpu is not None)
    capacity = rows_capacity(layout, tokens, assignments, experts, alignment, execution.masked_capacity)
    touched = _touched(tokens, config) + (config.fused_slots if tokens else 0)
    backend, backend_reason, kernels = _kernels(config.weights, layout, execution, gpu)
    return Plan(
        config=config,
        tokens=tokens,
        execution=execution,
        layout=layout,
        layout_reason=layout_reason,
        alignment=alignment,
        capacity=capacity,
        assignments=assignments,
        touched_experts=touched,
        backend=backend,
        backend_reason=backend_reason,
        kernels=kernels,
        memory=_memory(config, tokens, execution, capacity, itemsize),
        stages=_stages(config, tokens, execution, assignments, touched, itemsize, gpu),
        gpu=gpu,
    )


def choose_layout(tokens: int, execution: Execution) -> tuple[Layout, str]:
    """The rows' layout for T tokens, and why."""
    if execution.layout != "auto":
        return execution.layout, "asked for"
    if tokens <= DECODE_TOKENS:
        return "masked", f"a decode batch: at most {DECODE_TOKENS} tokens, one tile of rows per expert"
    return "psum", f"a prefill batch: over {DECODE_TOKENS} tokens, so experts are packed one after the other"


def row_alignment(execution: Execution, gpu: bool) -> int:
    """A: what was asked for, or one GEMM tile of 128 rows on a GPU and 8 rows on a CPU."""
    return execution.row_alignment or (128 if gpu else 8)


def rows_capacity(
    layout: Layout, tokens: int, assignments: int, experts: int, alignment: int, masked_capacity: int | None
) -> int:
    """Rows M (E·C for masked) of the buffers that ``group_tokens`` makes; they hold any routing.

    Raises:
      ShapeError: the masked capacity is below T.
    """
    if layout != "masked":
        return padded_rows(assignments, experts, alignment)
    capacity = tokens if masked_capacity is None else masked_capacity
    if capacity < tokens:
        raise ShapeError(
            f"masked capacity {capacity} is below the {tokens} tokens an expert may get; raise it to {tokens}"
        )
    return experts * max(_up(capacity, alignment), alignment)


def weight_bytes(fmt: WeightFormat, experts: int, n: int, k: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes of the values and of the scales of [experts, n, k] weights as ``GroupedWeight`` stores them."""
    if not fmt.quantized:
        return experts * n * k * itemsize, 0
    k = _up(k, fmt.k_multiple)
    if fmt.scale == "float32":
        words = -(-n // fmt.block_n) * (k // fmt.block_k)
    else:
        words = -(-k // (4 * fmt.block_k)) * _up(n, 4)
    return experts * n * k * fmt.bits // 8, experts * words * 4


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _find_gpu(device: str | None) -> GPU | None:
    if device is not None:
        if device not in GPUS:
            raise ValueError(f"no figures for GPU {device!r}; choose one of {', '.join(map(repr, GPUS))}")
        return GPUS[device]
    kind = jax.devices()[0].device_kind
    return next((gpu for gpu in GPUS.values() if gpu.name in kind), None)


def _touched(tokens: int, config: MoEConfig) -> int:
    """Experts that uniform routing of ``tokens`` tokens is expected to reach, rounded."""
    e, k = config.router.num_experts, config.router.top_k
    return round(e * (1.0 - (1.0 - k / e) ** tokens))


def _row_bytes(fmt: WeightFormat, execution: Execution, width: int, itemsize: int) -> int:
    """Bytes of one row of ``width`` as it meets the weights, its scales included."""
    if fmt.activation is None or not execution.quantize_activations:
        return width * itemsize
    width = _up(width, fmt.k_multiple)
    groups = width // fmt.activation.block
    return width + 4 * (groups if fmt.activation.scale == "float32" else -(-groups // 4))


def _mlp_weights(fmt: WeightFormat, experts: int, hidden: int, inter: int, itemsize: int) -> list[tuple[int, int]]:
    """(values, scales) bytes of the two projections."""
    inter = _up(inter, fmt.k_multiple)
    return [
        weight_bytes(fmt, experts, 2 * inter, hidden, itemsize),
        weight_bytes(fmt, experts, hidden, inter, itemsize),
    ]


def _memory(config: MoEConfig, tokens: int, execution: Execution, rows: int, itemsize: int) -> Memory:
    h, inter, fmt = config.hidden, config.intermediate, config.weights
    stored = _up(inter, fmt.k_multiple)
    experts = config.router.num_experts + config.fused_slots
    parts = _mlp_weights(fmt, experts, h, inter, itemsize)
    biases = 4 * experts * (2 * stored + h) if config.expert_bias else 0
    if config.shared is not None and not config.shared.fused:
        parts += _mlp_weights(config.shared_format, 1, h, config.shared.intermediate, itemsize)
    gate = 4 * h if config.shared is not None and config.shared.gate else 0
    r = config.router
    router = 4 * r.num_experts * (h + r.logit_bias + r.correction_bias)
    weights, scales = sum(values for values, _ in parts) + biases + gate, sum(scales for _, scales in parts)
    entering = rows * _row_bytes(fmt, execution, h, itemsize)
    halves = rows * 2 * stored * itemsize
    activated = rows * _row_bytes(fmt, execution, stored, itemsize)
    leaving, x = rows * h * itemsize, tokens * h * itemsize
    alive = max(entering + halves, halves + activated, activated + leaving, leaving + x)
    return Memory(
        weights=weights,
        scales=scales,
        router=router,
        rows=entering,
        intermediate=halves + activated,
        outputs=leaving + x,
        peak=weights + scales + router + x + alive,
    )


def _stages(
    config: MoEConfig, tokens: int, execution: Execution, rows: int, touched: int, itemsize: int, gpu: GPU | None
) -> tuple[Stage, ...]:
    h, inter, fmt, r = config.hidden, config.intermediate, config.weights, config.router
    stored = _up(inter, fmt.k_multiple)
    up, down = (sum(part) for part in _mlp_weights(fmt, touched, h, inter, itemsize))
    entering, activated = (_row_bytes(fmt, execution, width, itemsize) for width in (h, stored))
    fp8 = fmt.quantized and execution.quantize_activations

    def stage(name: str, flops: int, nbytes: int, fp8: bool = False) -> Stage:
        if gpu is None:
            return Stage(name, flops, nbytes, None, None)
        compute, memory = flops / (gpu.fp8 if fp8 else gpu.bf16), nbytes / gpu.bandwidth
        return Stage(name, flops, nbytes, max(compute, memory), "compute" if compute > memory else "memory")

    stages = [
        stage("router", 2 * tokens * h * r.num_experts, tokens * (h * itemsize + 8 * r.top_k) + 4 * h * r.num_experts),
        stage("pre_permute", 0, rows * (h * itemsize + entering)),
        stage("gemm1", 4 * rows * h * inter, up + rows * (entering + 2 * stored * itemsize), fp8),
        stage("activation", 0, rows * (2 * stored * itemsize + activated)),
        stage("gemm2", 2 * rows * h * inter, down + rows * (activated + h * itemsize), fp8),
        stage("combine", 2 * rows * h, rows * (h * itemsize + 8) + tokens * h * itemsize),
    ]
    if config.shared is not None and not config.shared.fused and tokens:
        own, wide = config.shared_format, config.shared.intermediate
        weights = sum(map(sum, _mlp_weights(own, 1, h, wide, itemsize)))
        moved = tokens * itemsize * (2 * h + 4 * _up(wide, own.k_multiple))
        stages.append(
            stage("shared", 6 * tokens * h * wide, weights + moved, own.quantized and execution.quantize_activations)
        )
    return tuple(stages)


_DEEPGEMM = {
    ("sm90", "BF16"): "sm90_bf16_gemm",
    ("sm90", "FP8Block"): "sm90_fp8_gemm_1d2d",
    ("sm100", "BF16"): "sm100_bf16_gemm",
    ("sm100", "FP8BlockUE8M0"): "sm100_fp8_fp4_gemm_1d1d",
    ("sm100", "MXFP8"): "sm100_fp8_fp4_gemm_1d1d",
    ("sm100", "MXFP4"): "sm100_fp8_fp4_gemm_1d1d",
}


def _kernels(
    fmt: WeightFormat, layout: Layout, execution: Execution, gpu: GPU | None
) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """The backend of the grouped GEMMs, why, and what each backend would run."""
    refusal = _deepgemm_refusal(fmt, execution, gpu)
    deepgemm = f"cannot: {refusal}" if gpu is None or refusal else f"{_DEEPGEMM[gpu.arch, fmt.name]}, {layout}"
    kernels = (("deepgemm", deepgemm), ("reference", "plain JAX: any device, format and layout"))
    asked = execution.backend
    names = ("deepgemm", "reference") if asked == "auto" else (asked,) if isinstance(asked, str) else asked
    for name in names:
        if name not in dict(kernels):
            raise ValueError(f"grouped_gemm has no backend {name!r}; choose 'auto', 'deepgemm' or 'reference'")
    backend = next((name for name in names if name == "reference" or refusal is None), None)
    if backend is None:
        return "none", f"only deepgemm was asked for; it cannot: {refusal}", kernels
    if asked != "auto":
        return backend, "asked for", kernels
    return backend, "the first below that accepts the case", kernels


def _deepgemm_refusal(fmt: WeightFormat, execution: Execution, gpu: GPU | None) -> str | None:
    if gpu is None:
        return "this machine has no GPU it knows"
    if "deepgemm" not in grouped_gemm.BACKENDS:
        return "it is not part of this version of jaxmoe"
    if fmt.quantized and not execution.quantize_activations:
        return "it runs quantised weights on quantised rows only"
    if (gpu.arch, fmt.name) not in _DEEPGEMM:
        formats = " or ".join(name for arch, name in _DEEPGEMM if arch == gpu.arch)
        return f"it has no kernel for {fmt.name} on {gpu.arch}; convert the weights at load to {formats}"
    return None


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            break
        nbytes /= 1000
    else:
        unit = "TB"
    return (
        f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}" if nbytes < 1000 else f"{nbytes:.0f} {unit}"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _describe(p: Plan) -> str:
    c, r, m = p.config, p.config.router, p.memory
    slots = f" and {c.fused_slots} fused shared" if c.fused_slots else ""
    lines = [
        f"{p.tokens} tokens, hidden {c.hidden}, {r.num_experts} experts{slots} of {c.intermediate}, "
        f"{r.top_k} per token, weights {c.weights.name}",
        f"layout    {p.layout}: {p.layout_reason}",
        f"rows      {p.capacity} reserved for {p.assignments} in use, experts start at multiples of {p.alignment}",
        f"experts   {p.touched_experts} get tokens if routing is even; the others' weights are not read",
        f"backend   {p.backend}: {p.backend_reason}",
        *(f"  {name:<10}{what}" for name, what in p.kernels),
        f"memory    {_size(m.peak)} at the peak, of which weights {_size(m.weights)}, scales {_size(m.scales)}",
        f"          buffers: rows {_size(m.rows)}, intermediate {_size(m.intermediate)}, outputs {_size(m.outputs)}",
        f"work      {p.flops / 1e9:.4g} GFLOP, {_size(p.bytes)} read and written",
    ]
    if p.gpu is None:
        return "\n".join(
            [*lines, "time      no estimate: none of " + ", ".join(GPUS) + " is at hand; name one as device"]
        )
    g, total = p.gpu, p.seconds or 0.0
    lines.append(f"time      {_time(total)} at best on {g.name}, bound by {p.bound}")
    for stage in p.stages:
        seconds = stage.seconds or 0.0
        share = 100 * seconds / total if total else 0.0
        lines.append(f"  {stage.name:<12}{_time(seconds):>10} {share:3.0f} %  {stage.bound}")
    rates = f"{g.bandwidth / 1e9:.0f} GB/s, {g.bf16 / 1e12:.0f} TFLOP/s bf16, {g.fp8 / 1e12:.0f} fp8"
    return "\n".join([*lines, f"  rates: {rates} ({g.source})"])
