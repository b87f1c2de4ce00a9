"""What a layer will do for T tokens, before it does it: layout, rows, bytes, kernels, time at best."""

from __future__ import annotations

import dataclasses
import textwrap

from jaxmoe.config import Execution, Layout, MoEConfig
from jaxmoe.cuda.arch import Arch
from jaxmoe.errors import ShapeError
from jaxmoe.layer.checks import stored_width
from jaxmoe.layer.kernels import kernels_for
from jaxmoe.layer.layout import choose_layout
from jaxmoe.layer.roofline import (
    GPU,
    GPUS,
    Stage,
    find_gpu,
    layer_weights,
    quantise_stage,
    room_stages,
    row_bytes,
    touched_experts,
)
from jaxmoe.layer.straight_through import backward_config, forward_config
from jaxmoe.ops import grouped_gemm
from jaxmoe.ops.permute import buffer_rows


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes by item.

    Attributes:
      weights, scales: expert weights (shared experts and biases included) and their scales; with a
        ``forward_format`` also their quantised copies.
      router: the router's parameters, a hash table not counted.
      rows: grouped rows that enter gemm1, scales included.
      intermediate: gemm1's output and the activated rows, scales included.
      outputs: gemm2's rows and y.
      peak: parameters, x, y, and the largest set of other buffers that are alive together.
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
      kernels: (backend, its kernels for the grouped GEMMs or why it cannot); with a ``forward_format`` of the forward
        and of the backward pass.
      memory: bytes by item, of the forward pass.
      stages: rooms of the forward pass with their arithmetic and traffic.
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

    Memory and time are those of a forward pass.

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
    gpu = find_gpu(device)
    experts = config.router.num_experts + config.fused_slots
    assignments = tokens * (config.router.top_k + config.fused_slots)
    asked = ("deepgemm", "reference") if gpu and execution.backend == "auto" else execution.backend
    alignment = execution.row_alignment or grouped_gemm.row_alignment(asked)
    layout, reason = choose_layout(
        execution, tokens, config.router.top_k + config.fused_slots, experts, alignment=alignment
    )
    capacity = buffer_rows(layout, tokens, assignments, experts, alignment, execution.masked_capacity)
    touched = touched_experts(tokens, config) + (config.fused_slots if tokens else 0)
    ran = forward_config(config, execution)
    backend, backend_reason, kernels = _kernels(config, tokens, execution, itemsize, gpu)
    return Plan(
        config=config,
        tokens=tokens,
        execution=execution,
        layout=layout,
        layout_reason=reason,
        alignment=alignment,
        capacity=capacity,
        assignments=assignments,
        touched_experts=touched,
        backend=backend,
        backend_reason=backend_reason,
        kernels=kernels,
        memory=_memory(config, ran, tokens, execution, capacity, itemsize),
        stages=(
            *quantise_stage(config, ran, itemsize, gpu),
            *room_stages(ran, tokens, execution, assignments, touched, itemsize, gpu),
        ),
        gpu=gpu,
    )


def _memory(config: MoEConfig, ran: MoEConfig, tokens: int, execution: Execution, rows: int, itemsize: int) -> Memory:
    """Of a layer of ``config`` whose experts run as ``ran`` says."""
    h, fmt = config.hidden, ran.weights
    stored = stored_width(config.intermediate, fmt)
    experts = config.router.num_experts + config.fused_slots
    parts = layer_weights(config, itemsize)
    parts += [copy for kept, copy in zip(parts, layer_weights(ran, itemsize), strict=True) if copy != kept]
    biases = 4 * experts * (2 * stored_width(config.intermediate, config.weights) + h) if config.expert_bias else 0
    gate = 4 * h if config.shared is not None and config.shared.gate else 0
    r = config.router
    router = 4 * r.num_experts * (h + r.logit_bias + r.correction_bias)
    weights, scales = sum(values for values, _ in parts) + biases + gate, sum(scales for _, scales in parts)
    entering = rows * row_bytes(fmt, execution, h, itemsize)
    halves = rows * 2 * stored * itemsize
    activated = rows * row_bytes(fmt, execution, stored, itemsize)
    leaving, x = rows * h * itemsize, tokens * h * itemsize
    before = tokens * row_bytes(fmt, execution, h, itemsize) if fmt.quantized and execution.quantize_activations else 0
    alive = max(before + entering, entering + halves, halves + activated, activated + leaving)
    if config.shared is not None and not config.shared.fused:
        alive = max(alive, leaving + _shared_rows(ran, tokens, execution, itemsize))
    return Memory(
        weights=weights,
        scales=scales,
        router=router,
        rows=entering,
        intermediate=halves + activated,
        outputs=leaving + x,
        peak=weights + scales + router + 2 * x + alive,
    )


def _shared_rows(config: MoEConfig, tokens: int, execution: Execution, itemsize: int) -> int:
    """Bytes of the largest set of a shared expert's rows that are alive together; routed rows wait meanwhile."""
    assert config.shared is not None
    fmt, h = config.shared_format, config.hidden
    width = stored_width(config.shared.intermediate, fmt)
    entering, activated = (row_bytes(fmt, execution, w, itemsize) for w in (h, width))
    halves, leaving = 2 * width * itemsize, h * itemsize
    return tokens * max(entering + halves, halves + activated, activated + leaving)


def _kernels(
    config: MoEConfig, tokens: int, execution: Execution, itemsize: int, gpu: GPU | None
) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """The backend of the grouped GEMMs, why, and what each backend would run."""
    refusal, names = _deepgemm(config, tokens, execution, itemsize, gpu)
    kernels = (
        ("deepgemm", f"cannot: {refusal}" if refusal else names),
        ("reference", "plain JAX: any device, format and layout"),
    )
    asked = execution.backend
    order = ("deepgemm", "reference") if asked == "auto" else (asked,) if isinstance(asked, str) else asked
    for name in order:
        if name not in dict(kernels):
            raise ValueError(f"grouped_gemm has no backend {name!r}; choose 'auto', 'deepgemm' or 'reference'")
    backend = next((name for name in order if name == "reference" or refusal is None), None)
    if backend is None:
        return "none", "the only one asked for cannot", kernels
    return backend, "the first below that accepts the case" if asked == "auto" else "asked for", kernels


def _deepgemm(
    config: MoEConfig, tokens: int, execution: Execution, itemsize: int, gpu: GPU | None
) -> tuple[str | None, str]:
    """Why DeepGEMM cannot take the case, or None; and its kernels."""
    if gpu is None:
        return "this machine has no GPU it knows", ""
    if "deepgemm" not in grouped_gemm.BACKENDS:
        return "it is not among the backends of this version of jaxmoe", ""
    if itemsize != 2:
        return "it takes and gives bfloat16 only", ""
    if config.weights.quantized and not execution.quantize_activations:
        return "it runs quantised weights on quantised rows only", ""
    arch = Arch(gpu.arch, gpu.num_sms)
    try:
        passes = [kernels_for(config, arch, [tokens], execution, gradients=False)]
        if execution.forward_format is not None:
            plain = dataclasses.replace(execution, forward_format=None)
            passes.append(kernels_for(backward_config(config), arch, [tokens], plain, gradients=True))
    except (NotImplementedError, ShapeError) as refusal:
        return str(refusal), ""
    names = [", ".join(dict.fromkeys(source.name for source in sources)) for sources in passes]
    if not any(names):
        return None, "nothing, for there are no rows"
    return None, names[0] if len(names) == 1 else f"forward {names[0]}; backward {names[1]}"


def _size(nbytes: int) -> str:
    exponent = min(4, (len(str(nbytes)) - 1) // 3)
    return f"{nbytes / 1000**exponent:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[exponent]}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _describe_passes(p: Plan) -> list[str]:
    """What the passes of training run in, where they differ."""
    fmt = p.execution.forward_format
    if fmt is None:
        return []
    kept = p.config.weights
    weights = f"{kept.name} as they are" if kept.quantized else f"quantised to {fmt.name} in every pass"
    again = "dequantised" if kept.quantized else "unquantised"
    return [
        f"forward   experts {weights}, rows to match; memory, work and time below are of this pass alone",
        f"backward  experts {again}, in the dtype of x: the forward GEMMs once more, then those of the gradients",
    ]


def _describe(p: Plan) -> str:
    c, r, m = p.config, p.config.router, p.memory
    slots = f" and {c.fused_slots} fused shared" if c.fused_slots else ""
    experts = r.num_experts + c.fused_slots
    unread = "; the others' weights are not read" if p.touched_experts < experts else ""
    lines = [
        f"{p.tokens} tokens, hidden {c.hidden}, {r.num_experts} experts{slots} of {c.intermediate}, "
        f"{r.top_k} per token, weights {c.weights.name}",
        *_describe_passes(p),
        f"layout    {p.layout}: {p.layout_reason}",
        f"rows      {p.capacity} reserved for {p.assignments} in use, experts start at multiples of {p.alignment}",
        f"experts   {p.touched_experts} of {experts} get tokens if routing is even{unread}",
        f"backend   {p.backend}: {p.backend_reason}",
        *(textwrap.fill(f"  {name:<10}{what}", 118, subsequent_indent=" " * 12) for name, what in p.kernels),
        f"memory    {_size(m.peak)} at the peak, of which weights {_size(m.weights)}, scales {_size(m.scales)}",
        f"          buffers: rows {_size(m.rows)}, intermediate {_size(m.intermediate)}, outputs {_size(m.outputs)}",
        f"work      {p.flops / 1e9:.4g} GFLOP, {_size(p.bytes)} read and written",
    ]
    if p.gpu is None:
        lines.append(f"time      no estimate: none of {', '.join(GPUS)} is at hand; name one as device")
        return "\n".join(lines)
    g, total = p.gpu, p.seconds or 0.0
    lines.append(f"time      {_time(total)} at best on {g.name}, bound by {p.bound}")
    for stage in p.stages:
        seconds = stage.seconds or 0.0
        share = 100 * seconds / total if total else 0.0
        lines.append(f"  {stage.name:<12}{_time(seconds):>10} {share:3.0f} %  {stage.bound}")
    rates = f"{g.bandwidth / 1e9:.0f} GB/s, {g.bf16 / 1e12:.0f} TFLOP/s bf16, {g.fp8 / 1e12:.0f} fp8"
    return "\n".join([*lines, f"  rates: {rates} ({g.source})"])
