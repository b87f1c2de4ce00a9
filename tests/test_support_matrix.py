"""The README's support matrix: every backend is asked about every format, layout and GPU.

``JAXMOE_WRITE_README=1 pytest tests/test_support_matrix.py`` writes it anew.
"""

from __future__ import annotations

import itertools
import os
import pathlib
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.config import Layout
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.target import target
from jaxmoe.ops.grouped_gemm import grouped_gemm
from jaxmoe.ops.quantize import quantize
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant import quantize_weight
from jaxmoe.quant.formats import BF16, FORMATS, WeightFormat
from jaxmoe.quant.tensors import GroupedWeight

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = (
    f"<!-- {text} -->\n"
    for text in ("support matrix: written by tests/test_support_matrix.py", "end of support matrix")
)
GPUS = {"Hopper": Arch("sm_90a", 132), "Blackwell (10.0, 10.3)": Arch("sm_100f", 148)}
SHOWN = {"Hopper": "H200", "Blackwell (10.0, 10.3)": "compiled"}
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
E, M, N, K = 4, 512, 256, 256


def grouped(fmt: WeightFormat, layout: Layout, backend: str) -> jax.Array:
    shape = (E, M // E, K) if layout == "masked" else (M, K)
    x = jnp.zeros(shape, jnp.bfloat16)
    dense = jnp.zeros((E, N, K), jnp.bfloat16)
    weight = GroupedWeight(dense, None, BF16, K) if fmt is BF16 else quantize_weight(dense, fmt)
    rows = x if fmt.activation is None else quantize(x, fmt.activation)
    group = jnp.zeros(M if layout == "contiguous" else E, jnp.int32)
    return grouped_gemm(GroupedRows(rows, group, layout, 128), weight, backend=backend)


def supported(fmt: WeightFormat, layout: Layout, backend: str) -> bool:
    """Whether the backend accepts the case while it is traced; a refusal must give a reason."""
    try:
        jax.eval_shape(lambda: grouped(fmt, layout, backend))
    except NotImplementedError as refusal:
        assert fmt.name in str(refusal)
        return False
    return True


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced kernels are neither compiled nor launched."""
    monkeypatch.setattr(
        "jaxmoe.cuda.deepgemm.call.run_kernels",
        lambda planned, args, results, **options: [jnp.zeros(r.shape, r.dtype) for r in results],
    )


def matrix() -> str:
    """The table, in Markdown."""
    lines = ["| weights | " + " | ".join(f"deepgemm, {gpu}" for gpu in GPUS) + " |", "| --- |" + " --- |" * len(GPUS)]
    for fmt in FORMATS.values():
        cells = []
        for gpu, arch in GPUS.items():
            with target(arch):
                taken = [layout for layout in LAYOUTS if supported(fmt, layout, "deepgemm")]
            cells.append(f"{', '.join(taken)} ({SHOWN[gpu]})" if taken else "– (convert at load)")
        lines.append(f"| {fmt.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def test_readme_says_what_the_backends_say(no_launch: None) -> None:
    text = README.read_text()
    head, rest = text.split(BEGIN)
    written, tail = rest.split(END)
    if os.environ.get("JAXMOE_WRITE_README"):
        README.write_text(head + BEGIN + matrix() + END + tail)
    else:
        assert written == matrix()


@pytest.mark.parametrize("fmt, layout", list(itertools.product(FORMATS.values(), LAYOUTS)), ids=str)
def test_the_reference_takes_everything(fmt: WeightFormat, layout: Layout) -> None:
    assert supported(fmt, layout, "reference")
