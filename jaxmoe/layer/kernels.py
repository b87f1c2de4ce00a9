"""Which kernels a layer will launch, known from its config before any weight or device is there."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxmoe.config import Execution, MoEConfig
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.deepgemm.call import GemmCall
from jaxmoe.cuda.source import KernelSource
from jaxmoe.layer.checks import stored_width
from jaxmoe.layer.layout import choose_layout, tile_rows
from jaxmoe.ops.grouped_gemm import row_alignment
from jaxmoe.ops.grouped_gemm.deepgemm import gemm_call
from jaxmoe.ops.permute import buffer_rows
from jaxmoe.ops.permute.cuda import kernel_source as move_source
from jaxmoe.quant.formats import WeightFormat
from jaxmoe.sizes import round_up


def kernels_for(
    config: MoEConfig, arch: Arch, tokens: Iterable[int], execution: Execution | None = None
) -> list[KernelSource]:
    """Lists the kernels of a layer's forward pass that are compiled ahead of time, each once.

    The tile is chosen by the number of rows, so different token counts may need different kernels.

    Args:
      config: the layer; its experts are those of one device.
      arch: what to compile for.
      tokens: values of T that the layer will be called with.
      execution: how it runs; None takes ``Execution()``.

    Raises:
      BackendUnavailable: there is no kernel for the format on ``arch``.
      ShapeError: sizes that no kernel can take, a masked capacity below T.
    """
    execution = Execution() if execution is None else execution
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
        found |= _mlp(call, config.weights, lead, (experts,), (config.hidden, config.intermediate))
        if shared is not None and not shared.fused:
            sizes = config.hidden, shared.intermediate
            if execution.deterministic:
                call = gemm_call(config.shared_format, "psum", arch, alignment=alignment, expected_m=each)
                found |= _mlp(call, config.shared_format, (round_up(t, alignment),), (1,), sizes)
            else:
                call = gemm_call(config.shared_format, "dense", arch)
                found |= _mlp(call, config.shared_format, (t,), (), sizes)
    return list(found)


def _mlp(
    call: GemmCall, fmt: WeightFormat, rows: tuple[int, ...], stack: tuple[int, ...], sizes: tuple[int, int]
) -> dict[KernelSource, None]:
    """Both GEMMs of an MLP over rows [*rows, K], weights [*stack, N, K]."""
    hidden, intermediate = sizes
    stored = stored_width(intermediate, fmt)
    sources = {}
    for n, k in ((2 * stored, hidden), (hidden, stored)):
        k = round_up(k, fmt.k_multiple)
        a, b = (jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in ((*rows, k), (*stack, n, k)))
        planned = call.plan((a, None, b) if call.scaled else (a, b))
        if planned is not None:
            sources[planned[0]] = None
    return sources
