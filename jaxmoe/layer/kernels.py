"""Which kernels a layer will launch, known from its config before any weight or device is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxmoe.config import Execution, MoEConfig
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.deepgemm.call import GemmCall
from jaxmoe.cuda.source import KernelSource
from jaxmoe.errors import FormatError
from jaxmoe.layer.checks import stored_width
from jaxmoe.layer.layout import choose_layout, tile_rows
from jaxmoe.layer.straight_through import backward_config, forward_config
from jaxmoe.ops.grouped_gemm import row_alignment
from jaxmoe.ops.grouped_gemm.deepgemm import gemm_call, gradient_gemms
from jaxmoe.ops.permute import buffer_rows
from jaxmoe.ops.permute.cuda import kernel_source as move_source
from jaxmoe.quant.formats import WeightFormat
from jaxmoe.sizes import round_up


def kernels_for(
    config: MoEConfig,
    arch: Arch,
    tokens: Iterable[int],
    execution: Execution | None = None,
    *,
    gradients: bool | None = None,
) -> list[KernelSource]:
    """Lists the kernels of a layer that are compiled ahead of time, each once: the forward pass's, then the backward's.

    The tile is chosen by the number of rows, so different token counts may need different kernels.

    Args:
      config: the layer; its experts are those of one device.
      arch: what to compile for.
      tokens: values of T that the layer will be called with.
      execution: how it runs; None takes ``Execution()``.
      gradients: whether it is differentiated; None: if ``execution`` has a ``forward_format``, which is for training.

    Raises:
      BackendUnavailable: there is no kernel for the format on ``arch``.
      FormatError: gradients of quantised weights, without a ``forward_format``.
      ShapeError: sizes that no kernel can take, a masked capacity below T.
    """
    execution = Execution() if execution is None else execution
    straight = execution.forward_format is not None
    gradients = straight if gradients is None else gradients
    formats = [config.weights] if config.shared is None else [config.weights, config.shared_format]
    if gradients and not straight and any(fmt.quantized for fmt in formats):
        raise FormatError(
            f"weights in {' and '.join(fmt.name for fmt in formats)} have no gradient; train with "
            "Execution(forward_format=...), which quantises forward only"
        )
    tokens, plain = tuple(tokens), dataclasses.replace(execution, forward_format=None)
    found = _run(forward_config(config, execution), arch, tokens, plain, gradients and not straight)
    if gradients and straight:
        found |= _run(backward_config(config), arch, tokens, plain, True)
    return list(found)


def _run(
    config: MoEConfig, arch: Arch, tokens: tuple[int, ...], execution: Execution, gradients: bool
) -> dict[KernelSource, None]:
    """Kernels of the layer as its config says, in order."""
    shared, slots = config.shared, config.fused_slots
    alignment = execution.row_alignment or row_alignment("deepgemm")
    experts, choices = config.router.num_experts + slots, config.router.top_k + slots
    found: dict[KernelSource, None] = {}
    for t in tokens:
        if t:
            moves = ("group_tokens", "permute_rows") if config.weights.quantized else ("group_tokens",)
            found |= dict.fromkeys(move_source(arch.name, name) for name in moves)
        layout, _ = choose_layout(execution, t, choices, experts, alignment=alignment)
        rows = buffer_rows(layout, t, t * choices, experts, alignment, execution.masked_capacity)
        each = tile_rows(execution, t * choices, experts)
        call = gemm_call(config.weights, layout, arch, alignment=alignment, expected_m=each)
        lead = (experts, rows // experts) if layout == "masked" else (rows,)
        found |= _mlp(call, config.weights, lead, (experts,), (config.hidden, config.intermediate), gradients)
        if shared is not None and not shared.fused:
            sizes = config.hidden, shared.intermediate
            if execution.deterministic:
                each = tile_rows(execution, t, 1)
                call = gemm_call(config.shared_format, "psum", arch, alignment=alignment, expected_m=each)
                found |= _mlp(call, config.shared_format, (round_up(t, alignment),), (1,), sizes, gradients)
            else:
                call = gemm_call(config.shared_format, "dense", arch)
                found |= _mlp(call, config.shared_format, (t,), (), sizes, gradients)
    return found


def _mlp(
    call: GemmCall,
    fmt: WeightFormat,
    rows: tuple[int, ...],
    stack: tuple[int, ...],
    sizes: tuple[int, int],
    gradients: bool,
) -> dict[KernelSource, None]:
    """Both GEMMs of an MLP over rows [*rows, K], weights [*stack, N, K], and those of the gradients."""
    hidden, intermediate = sizes
    stored = stored_width(intermediate, fmt)
    planned = []
    for n, k in ((2 * stored, hidden), (hidden, stored)):
        k = round_up(k, fmt.k_multiple)
        a, b, y = (jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in ((*rows, k), (*stack, n, k), (*rows, n)))
        planned += call.plan((a, None, b) if call.scaled else (a, b))
        if gradients:
            planned += [one for gemm, operands in gradient_gemms(call, a, b, y) for one in gemm.plan(operands)]
    return dict.fromkeys(source for source, _ in planned)
