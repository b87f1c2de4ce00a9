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
from jaxmoe.layer.pipeline import choose_layout, expected_rows
from jaxmoe.ops.grouped_gemm import row_alignment
from jaxmoe.ops.grouped_gemm.deepgemm import gemm_call
from jaxmoe.ops.permute import buffer_rows
from jaxmoe.quant.formats import WeightFormat
from jaxmoe.sizes import round_up


def kernels_for(
    config: MoEConfig, arch: Arch, tokens: Iterable[int], execution: Execution | None = None
) -> list[KernelSource]:
    """Lists the grouped GEMM kernels of a layer's forward pass, each once.

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
    layout, shared = choose_layout(execution), config.shared
    alignment = execution.row_alignment or row_alignment("deepgemm")
    slots, capacity = config.fused_slots, execution.masked_capacity
    # Format, experts, choices per token and width of the routed experts, and of a shared one.
    mlps = [(config.weights, config.router.num_experts + slots, config.router.top_k + slots, config.intermediate)]
    if shared is not None and not shared.fused:
        mlps.append((config.shared_format, 1, 1, shared.intermediate))
    found: dict[KernelSource, None] = {}
    for t in tokens:
        for fmt, experts, choices, width in mlps:
            rows = buffer_rows(layout, t, t * choices, experts, alignment, capacity)
            call = gemm_call(fmt, layout, arch, alignment=alignment, expected_m=expected_rows(t, choices, experts))
            found |= dict.fromkeys(_mlp(call, fmt, rows, experts, (config.hidden, width)))
    return list(found)


def _mlp(call: GemmCall, fmt: WeightFormat, rows: int, experts: int, sizes: tuple[int, int]) -> list[KernelSource]:
    """Both GEMMs of ``experts`` expert MLPs over ``rows`` rows in all."""
    hidden, intermediate = sizes
    stored = stored_width(intermediate, fmt)
    sources = []
    for n, k in ((2 * stored, hidden), (hidden, stored)):
        k = round_up(k, fmt.k_multiple)
        lead = (experts, rows // experts) if call.layout == "masked" else (rows,)
        a = jax.ShapeDtypeStruct((*lead, k), jnp.uint8)
        b = jax.ShapeDtypeStruct((experts, n, k), jnp.uint8)
        planned = call.plan((a, None, b) if call.scaled else (a, b))
        if planned is not None:
            sources.append(planned[0])
    return sources
