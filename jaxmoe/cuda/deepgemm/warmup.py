"""Which kernels a layer will launch, known from its config before any weight or device is there."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxmoe.config import Execution, Layout, MoEConfig
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.source import KernelSource
from jaxmoe.layer.pipeline import choose_layout
from jaxmoe.layer.plan import rows_capacity
from jaxmoe.ops.grouped_gemm import row_alignment
from jaxmoe.ops.grouped_gemm.deepgemm import gemm_call
from jaxmoe.quant.formats import WeightFormat


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
    experts = config.router.num_experts + config.fused_slots
    found: dict[KernelSource, None] = {}
    for t in tokens:
        choices = t * (config.router.top_k + config.fused_slots)
        rows = rows_capacity(layout, t, choices, experts, alignment, execution.masked_capacity)
        sizes = config.hidden, config.intermediate
        found |= dict.fromkeys(_mlp(config.weights, arch, layout, rows, experts, sizes, alignment))
        if shared is not None and not shared.fused:
            rows, sizes = -(-t // alignment) * alignment, (config.hidden, shared.intermediate)
            found |= dict.fromkeys(_mlp(config.shared_format, arch, "psum", rows, 1, sizes, alignment))
    return list(found)


def _mlp(
    fmt: WeightFormat, arch: Arch, layout: Layout, rows: int, experts: int, sizes: tuple[int, int], alignment: int
) -> list[KernelSource]:
    """Both GEMMs of ``experts`` expert MLPs over ``rows`` rows in all."""
    hidden, intermediate = sizes
    call = gemm_call(fmt, layout, arch, alignment=alignment)
    multiple = fmt.k_multiple
    stored = -(-intermediate // multiple) * multiple
    sources = []
    for n, k in ((2 * stored, hidden), (hidden, stored)):
        k = -(-k // multiple) * multiple
        lead = (experts, rows // experts) if layout == "masked" else (rows,)
        a = jax.ShapeDtypeStruct((*lead, k), jnp.uint8)
        b = jax.ShapeDtypeStruct((experts, n, k), jnp.uint8)
        planned = call.plan((a, None, b) if call.scaled else (a, b))
        if planned is not None:
            sources.append(planned[0])
    return sources
