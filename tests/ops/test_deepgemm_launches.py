"""GEMMs that users call, through jit, custom call and handler, are the launches of DeepGEMM's own host code."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.deepgemm import Gemm
from jaxmoe.cuda.target import target
from jaxmoe.ops.dense_gemm import dense_gemm
from jaxmoe.ops.grouped_gemm import grouped_gemm
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.formats import BF16, MXFP4, MXFP8, FP8Block, FP8BlockUE8M0, WeightFormat
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows

RECORDS = json.loads((pathlib.Path(__file__).parents[1] / "cuda/data/deepgemm_launches.json").read_text())["records"]
ARCHS = {"sm_90": Arch("sm_90a", 132), "sm_100": Arch("sm_100f", 148)}
FORMATS = {
    ("sm_90", "fp8"): FP8Block,
    ("sm_90", "bf16"): BF16,
    ("sm_100", "fp8"): FP8BlockUE8M0,
    ("sm_100", "mxfp8"): MXFP8,
    ("sm_100", "fp8xfp4"): MXFP4,
    ("sm_100", "bf16"): BF16,
}


def _small(record: dict) -> bool:
    """Ours (no row scales of 32 with FP4; no tile of 224 rows on SM90), and not the large one of two sizes."""
    arch, _, values, *_ = record["id"].split("/")[1:]
    gemm = record["gemm"]
    ours = (arch, values) in FORMATS and not (arch == "sm_90" and record["mk_alignment"] == 224)
    return ours and gemm["n"] * gemm["k"] <= 1536 * 2048


def _weight(fmt: WeightFormat, e: int, n: int, k: int) -> GroupedWeight:
    if fmt is BF16:
        return GroupedWeight(jnp.zeros((e, n, k), jnp.bfloat16), None, fmt, k)
    if fmt is FP8Block:
        scales = jnp.ones((e, -(-n // 128), k // 128), jnp.float32)
    else:
        scales = jnp.full((e, -(-k // (4 * fmt.block_k)), -(-n // 4) * 4), 0x7F7F7F7F, jnp.int32)
    values = jnp.zeros((e, n, k // 2), jnp.uint8) if fmt is MXFP4 else jnp.zeros((e, n, k), jnp.float8_e4m3fn)
    return GroupedWeight(values, scales, fmt, k)


def _rows(fmt: WeightFormat, *shape: int) -> jax.Array | QuantizedRows:
    quant = fmt.activation
    if quant is None:
        return jnp.zeros(shape, jnp.bfloat16)
    *lead, m, k = shape
    groups, ma = k // quant.block, -(-m // 4) * 4
    scales = jnp.ones((*lead, groups, ma), jnp.float32)
    if quant.scale == "ue8m0":
        scales = jnp.full((*lead, -(-groups // 4), ma), 0x7F7F7F7F, jnp.int32)
    return QuantizedRows(jnp.zeros(shape, jnp.float8_e4m3fn), scales, quant)


@pytest.mark.parametrize("record", [r for r in RECORDS if _small(r)], ids=lambda record: record["id"])
def test_call_is_the_recorded_launch(record, launches):
    gemm, alignment = Gemm(**record["gemm"]), record["mk_alignment"]
    fmt = FORMATS[gemm.arch, record["id"].split("/")[3]]
    weight = _weight(fmt, gemm.groups, gemm.n, gemm.k)
    out_dtype = jnp.float32 if gemm.d == "f32" else jnp.bfloat16
    if gemm.layout == "dense":
        rows = _rows(fmt, gemm.m, gemm.k)

        def run(rows, weight):
            return dense_gemm(rows, weight, out_dtype=out_dtype, backend="deepgemm")
    else:
        lead = (gemm.groups,) if gemm.layout == "masked" else ()
        group = jnp.zeros(gemm.m if gemm.layout == "contiguous" else gemm.groups, jnp.int32)
        rows = GroupedRows(_rows(fmt, *lead, gemm.m, gemm.k), group, gemm.layout, alignment)

        def run(rows, weight):
            return grouped_gemm(rows, weight, expected_m=gemm.expected_m or None, backend="deepgemm")

    with target(ARCHS[gemm.arch]):
        lowered = jax.jit(run).lower(rows, weight)
        y = jax.block_until_ready(lowered.compile()(rows, weight))
    assert f"@jaxmoe_{gemm.name}(" in lowered.as_text()
    assert y.dtype == out_dtype and y.size == gemm.rows * gemm.n
    (launch,) = launches()
    addresses = launch.pop("addresses")
    assert launch == {key: record[key] for key in launch if key != "pdl"} | {"pdl": False}
    # The kernel reads the very arrays of the caller: no copy, transposition or gather before it.
    leaves = [rows.rows if isinstance(rows, GroupedRows) else rows, weight]
    values = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(leaves)]
    b_first = 2 if gemm.scaled else 1
    assert addresses[:2] == [values[0], values[b_first]]
    if gemm.kind == "1d1d":
        assert addresses[2:4] == [values[1], values[3]]
    if gemm.kind == "1d2d":
        assert addresses[3] == values[1]


def test_every_format_and_layout_is_among_the_records():
    seen = {tuple(record["id"].split("/")[1:4]) for record in RECORDS if _small(record)}
    layouts = ("contig", "psum", "masked", "dense")
    assert {(arch, layout, values) for arch, values in FORMATS for layout in layouts} <= seen
