"""Launches against recorded launches of DeepGEMM's own host code, the rules of tensor maps, and every refusal."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.cuda.deepgemm import Gemm, Prenorm, choose, plan_launch, plan_prenorm
from jaxmoe.cuda.deepgemm.specs import argument_names, build
from jaxmoe.cuda.deepgemm.template import header, template_args
from jaxmoe.cuda.launch import Buffer, Integer, Pointer, TensorMap
from jaxmoe.cuda.source import KernelSource
from jaxmoe.errors import BackendUnavailable, ShapeError

RECORDS = json.loads((pathlib.Path(__file__).parent / "data" / "deepgemm_launches.json").read_text())["records"]
NUM_SMS = {"sm_90": 132, "sm_100": 148}
FP8 = {"a": "e4m3", "b": "e4m3"}
PSUM = Gemm(arch="sm_90", layout="psum", m=1024, n=512, k=256, groups=4)


def _launch(gemm: Gemm, **options: Any) -> tuple[KernelSource, Any]:
    plan = plan_launch(gemm, **options)
    assert plan is not None
    return plan


def _prenorm(problem: Prenorm) -> tuple[KernelSource, Any]:
    plan = plan_prenorm(problem)
    assert plan is not None
    return plan


def _described(param) -> dict:
    match param:
        case Pointer():
            return {"ptr": "null" if param.buffer is None else "device"}
        case Integer(value, 4):
            return {"u32": value}
        case TensorMap(_, dtype, dims, strides, box, swizzle):
            return {"map": [dtype, [*dims], [*strides], [*box], swizzle]}
    raise AssertionError(param)


def _numeric_bools(args: Iterable[str]) -> list[str]:
    """The wheel writes one of its bools as 1 or 0, ours are all true or false; to the compiler they are the same."""
    names = {"true": "1", "false": "0"}
    return [names.get(arg, arg) for arg in args]


@pytest.mark.parametrize("record", RECORDS, ids=[record["id"] for record in RECORDS])
def test_recorded_launch(record):
    gemm = Gemm(**record["gemm"])
    alignment = record["mk_alignment"]
    config = choose(gemm, num_sms=NUM_SMS[gemm.arch], mk_alignment=alignment)
    spec = build(gemm, config, cubin="key")
    assert f"{header(gemm)}_impl" == record["kernel"]
    args = template_args(gemm, config, mk_alignment=alignment)
    assert _numeric_bools(args) == _numeric_bools(record["template_args"])
    assert [_described(param) for param in spec.params] == record["params"]
    assert ([*spec.grid], [*spec.block]) == (record["grid"], record["block"])
    assert (spec.dynamic_smem, spec.cluster) == (record["dynamic_smem"], record["cluster"])
    assert (spec.cubin, spec.pdl, spec.cooperative) == ("key", False, False)


def test_all_records_are_there():
    assert len(RECORDS) == 110
    assert {record["kernel"] for record in RECORDS} == {
        "sm90_fp8_gemm_1d2d_impl",
        "sm90_bf16_gemm_impl",
        "sm100_fp8_fp4_gemm_1d1d_impl",
        "sm100_bf16_gemm_impl",
    }


@pytest.mark.parametrize("record", RECORDS, ids=[record["id"] for record in RECORDS])
def test_plan_is_the_recorded_launch_or_a_refusal(record):
    """224-row tiles on SM90 are recorded, but no kernel compiles for them."""
    gemm, options = Gemm(**record["gemm"]), {"mk_alignment": record["mk_alignment"]}
    options["num_sms"] = NUM_SMS[gemm.arch]
    if gemm.arch == "sm_90" and record["mk_alignment"] == 224:
        with pytest.raises(BackendUnavailable, match="BLOCK_M is 224; set mk_alignment to 64 or 128"):
            plan_launch(gemm, **options)
        return
    source, spec = _launch(gemm, **options)
    assert spec == build(gemm, choose(gemm, **options))
    assert source.name == spec.name == spec.cubin
    assert source.arch == {"sm_90": "sm_90a", "sm_100": "sm_100f"}[gemm.arch]
    include, using, body = source.code.splitlines()
    assert include == f"#include <deep_gemm/impls/{header(gemm)}.cuh>" and using == "using namespace deep_gemm;"
    config = choose(gemm, **options)
    args = template_args(gemm, config, mk_alignment=record["mk_alignment"])
    assert f"&{header(gemm)}_impl<{', '.join(args)}>" in body


def test_buffers_are_the_arguments_in_order():
    fp8 = dataclasses.replace(PSUM, **FP8)
    _, spec = _launch(fp8, num_sms=132)
    assert argument_names(fp8) == ("a", "scales_a", "b", "scales_b", "grouped_layout")
    buffers = [param.buffer for param in spec.params if not isinstance(param, Integer)]
    a, scales_a, b, scales_b, layout = (Buffer("argument", i) for i in range(5))
    assert buffers == [scales_b, layout, a, b, Buffer("result", 0), scales_a]
    assert [param.nbytes for param in spec.params[:2]] == [4 * 4 * (512 // 128) * (256 // 128), 4 * 4]
    labels = _launch(dataclasses.replace(fp8, layout="contiguous"), num_sms=132)[1].params[1]
    assert labels == Pointer(layout, 4 * 1024)
    _, spec = _launch(dataclasses.replace(fp8, arch="sm_100"), num_sms=148)
    buffers = [param.buffer for param in spec.params if not isinstance(param, Integer)]
    assert buffers == [layout, a, b, scales_a, scales_b, Buffer("result", 0)]
    _, spec = _launch(Gemm(arch="sm_100", layout="dense", m=64, n=64, k=64), num_sms=148)
    buffers = [param.buffer for param in spec.params if not isinstance(param, Integer)]
    assert buffers == [None, Buffer("argument", 0), Buffer("argument", 1), Buffer("result", 0)]


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("layout", ["psum", "masked"])
def test_mn_major_b_is_read_as_it_lies(arch, layout):
    """The input gradient: B is [G, k, n] in memory, so that a row of the map runs along n."""
    gemm = dataclasses.replace(PSUM, arch=arch, layout=layout, b_major="MN", n=2048)
    source, spec = _launch(gemm, num_sms=NUM_SMS[arch])
    b = spec.params[5]
    assert (b.dtype, b.dims, b.strides, b.box, b.swizzle) == (
        "BFLOAT16",
        (2048, 256 * 4),
        (2 * 2048,),
        (64, 64),
        128,
    )
    assert "<cute::UMMA::Major::K, cute::UMMA::Major::MN, 0, 2048, 256, " in source.code


def test_options_reach_the_launch():
    source, spec = _launch(PSUM, num_sms=40, pdl=True)
    assert spec.grid == (40, 1, 1) and spec.pdl and ", 40, GemmType" in source.code
    loose = dataclasses.replace(PSUM, arch="sm_100", zero_padding=False)
    assert ", 64, true, false, GemmType" in _launch(loose, num_sms=148, mk_alignment=64)[0].code


def test_m_is_no_reason_to_compile_again():
    sources = {
        _launch(dataclasses.replace(PSUM, m=m, expected_m=expected), num_sms=132)[0]
        for m, expected in [(1024, 0), (1024, 64), (2048, 64)]
    }
    assert len({source.code for source in sources}) <= 2
    masked = [dataclasses.replace(PSUM, layout="masked", m=m, expected_m=8) for m in (128, 4096)]
    assert _launch(masked[0], num_sms=132)[0] == _launch(masked[1], num_sms=132)[0]


@pytest.mark.parametrize("empty", [{"m": 0}, {"n": 0}, {"m": 0, "n": 0}])
def test_nothing_to_do_is_no_launch(empty):
    assert plan_launch(dataclasses.replace(PSUM, **empty), num_sms=132) is None


@pytest.mark.parametrize(
    ("change", "alignment", "error", "message"),
    [
        (
            {"layout": "masked", "m": 100},
            128,
            BackendUnavailable,
            "capacity m of an expert is 100, .* BLOCK_M .*; pad m to 1",
        ),
        (
            {"layout": "contiguous", "m": 1000},
            128,
            BackendUnavailable,
            "rows m is 1000, .* BLOCK_M 128, .*; pad m to 1024",
        ),
        ({}, 96, BackendUnavailable, "BLOCK_M is 96; set mk_alignment to 64 or 128"),
        (
            {"arch": "sm_100", "layout": "masked", "m": 448},
            224,
            BackendUnavailable,
            "BLOCK_M is 224; .* to 32, 64 or 128",
        ),
        ({"arch": "sm_100", **FP8}, 256, ShapeError, "524 columns of tensor memory, above 512; .* at most 240"),
        ({"m": -1}, 128, ShapeError, "m -1, n 512, k 256"),
        ({"k": 0}, 128, ShapeError, "k 0: m and n must"),
        ({"groups": 0}, 128, ShapeError, "groups is 0"),
        ({"layout": "dense"}, 128, ShapeError, "groups is 4 with layout 'dense'"),
        ({"layout": "contiguous", "expected_m": 8}, 128, ShapeError, "expected_m is 8 with layout 'contiguous'"),
        ({"layout": "batched"}, 128, ValueError, "layout is 'batched'; choose one of 'dense', 'contiguous'"),
        ({"n": 100}, 128, BackendUnavailable, "n is 100, not a multiple of 8 .* pad n to 104"),
        ({"k": 96}, 128, BackendUnavailable, "k is 96, not a multiple of 64 .* pad k to 128"),
        ({"arch": "sm_100", "k": 100}, 128, BackendUnavailable, "k is 100, not a multiple of 8 "),
        ({"arch": "sm_100", "k": 96, "b_major": "MN"}, 128, BackendUnavailable, "k is 96, not a multiple of 64 "),
        ({"k": 72, **FP8}, 128, BackendUnavailable, "k is 72, not a multiple of 16 .* pad k to 80"),
        (
            {"arch": "sm_100", "k": 2880, "a": "e4m3", "b": "e2m1", "gran_b": 32},
            128,
            BackendUnavailable,
            "k is 2880, not a multiple of 128 .* pad k to 2944",
        ),
        ({"a": "e4m3", "b": "e2m1"}, 128, BackendUnavailable, "a e4m3, b e2m1, d bf16 on sm_90"),
        ({"a": "e4m3"}, 128, BackendUnavailable, "a e4m3, b bf16"),
        ({"d": "f32"}, 128, BackendUnavailable, "float32 output is for dense"),
        ({"d": "e4m3"}, 128, BackendUnavailable, "the output is bf16 or f32"),
        ({"gran_b": 32, **FP8}, 128, BackendUnavailable, r"scales over \(128, 32\) columns"),
        ({"arch": "sm_100", "gran_a": 64, **FP8}, 128, BackendUnavailable, r"scales over \(64, 128\) columns"),
        ({"b_major": "MN", **FP8}, 128, BackendUnavailable, "MN-major B is for bf16"),
        ({"arch": "sm_120"}, 128, BackendUnavailable, "no kernels for sm_120"),
        ({"m": 2**31}, 128, BackendUnavailable, "rows of a: 2147483648 is not below 2.31"),
        ({"layout": "masked", "m": 2**29}, 128, BackendUnavailable, "rows of a: 2147483648 "),
        ({"n": 2**25, "groups": 64}, 128, BackendUnavailable, "rows of b: 2147483648 "),
        (
            {"n": 2**20, "k": 2**20, "groups": 32, **FP8},
            128,
            BackendUnavailable,
            "scales of b: 2147483648 is not below",
        ),
    ],
)
def test_refusals(change, alignment, error, message):
    with pytest.raises(error, match=message):
        plan_launch(dataclasses.replace(PSUM, **change), num_sms=132, mk_alignment=alignment)


def test_more_than_two_to_the_31_elements_are_fine():
    """DeepSeek-V3 on one GPU holds 256 × 4096 × 7168 = 7.5e9 weights: only coordinates have to fit into 32 bits."""
    big = dataclasses.replace(PSUM, m=320000, n=4096, k=7168, groups=256, **FP8)
    _, spec = _launch(big, num_sms=132)
    assert [param.dims for param in spec.params if isinstance(param, TensorMap)][1] == (7168, 1048576)


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(["sm_90", "sm_100"]),
    st.sampled_from(["dense", "contiguous", "psum", "masked"]),
    st.sampled_from(["bf16", "e4m3", "e2m1"]),
    st.tuples(st.integers(1, 20), st.integers(1, 300), st.integers(1, 60), st.integers(1, 40)),
    st.sampled_from([32, 128]),
)
def test_tensor_maps_obey_the_driver(arch, layout, b, extents, gran):
    m, n, k, groups = extents
    gemm = Gemm(
        arch=arch,
        layout=layout,
        m=m if layout == "dense" else 128 * m,
        n=8 * n,
        k=128 * k,
        groups=1 if layout == "dense" else groups,
        a="bf16" if b == "bf16" else "e4m3",
        b=b if arch == "sm_100" or b == "bf16" else "e4m3",
        gran_b=gran if arch == "sm_100" else 128,
    )
    _, spec = _launch(gemm, num_sms=NUM_SMS[arch])
    for tensor_map in (param for param in spec.params if isinstance(param, TensorMap)):
        assert all(1 <= extent <= 256 for extent in tensor_map.box)
        assert all(stride % (32 if tensor_map.dtype == "16U4_ALIGN16B" else 16) == 0 for stride in tensor_map.strides)
        assert tensor_map.swizzle in (0, 32, 64, 128)
        assert all(1 <= extent < 2**31 for extent in tensor_map.dims)


@pytest.mark.parametrize("block_m", [64, 128])
def test_psum_tiles_cover_every_row_once(block_m, rng):
    """The device walks the ends with unsigned arithmetic; each tile of real rows must come exactly once."""
    word = 2**32
    for _ in range(200):
        counts = rng.choice([0, 0, 1, 63, 64, 65, 127, 128, 129, 300], size=6)
        starts, ends, row = [], [], 0
        for count in counts:
            starts.append(row)
            ends.append(row + int(count) if count or rng.random() < 0.5 else (ends[-1] if ends else 0))
            row = -(-(row + int(count)) // block_m) * block_m
        rows = max(row, block_m)
        gemm = dataclasses.replace(PSUM, m=rows, groups=6)
        assert choose(gemm, num_sms=132, mk_alignment=block_m).block_m == block_m
        tiles, start, previous = [], 0, None
        for group, end in enumerate(ends):
            if previous is not None:
                start = -(-previous // block_m) * block_m
            blocks = ((end - start + block_m - 1) % word) // block_m
            tiles += [(group, start + block_m * i) for i in range(blocks)]
            previous = end
        wanted = [(g, s + i) for g, (s, c) in enumerate(zip(starts, counts, strict=True)) for i in range(0, c, block_m)]
        assert tiles == wanted


PRENORM = Prenorm(arch="sm_100", m=1000, n=24, k=28672, splits=16)


def test_prenorm_launch():
    source, spec = _prenorm(PRENORM)
    assert "sm100_tf32_hc_prenorm_gemm_impl<24, 28672, 64, 32, 64, 16, 128, 12, 128, 128>" in source.code
    assert (source.arch, spec.grid, spec.block, spec.cluster) == ("sm_100f", (16 * 16, 1, 1), (256, 1, 1), 1)
    assert spec.dynamic_smem == 12 * (64 * 64 * 2 + 32 * 64 * 4) + 64 * 128 + 49 * 8 + 4 <= 232448
    a, b = Buffer("argument", 0), Buffer("argument", 1)
    assert spec.params == (
        Integer(1000),
        TensorMap(a, "BFLOAT16", (28672, 1000), (57344,), (64, 64), 128),
        TensorMap(b, "TFLOAT32", (28672, 24), (114688,), (32, 32), 128),
        TensorMap(Buffer("result", 0), "FLOAT32", (24, 1000, 16), (96, 96000), (32, 64, 1), 128),
        Pointer(Buffer("result", 1), 4 * 16 * 1000),
    )


def test_prenorm_without_splits_has_a_flat_result():
    _, spec = _prenorm(dataclasses.replace(PRENORM, n=16, splits=1))
    assert spec.params[3] == TensorMap(Buffer("result", 0), "FLOAT32", (16, 1000), (64,), (16, 64), 64)
    assert plan_prenorm(dataclasses.replace(PRENORM, m=0)) is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"arch": "sm_90"}, BackendUnavailable, "SM90 prenorm kernel .*DeepGEMM#449.* use plain JAX"),
        ({"n": 40}, BackendUnavailable, "n is 40; the kernel has 8, 16, 24 and 32"),
        ({"k": 100}, BackendUnavailable, "k is 100, not a multiple of 64"),
        ({"m": -1}, ShapeError, "m is -1"),
        ({"k": 128, "splits": 3}, ShapeError, "splits is 3; k 128 has 2 tiles, choose 1 to 2"),
    ],
)
def test_prenorm_refusals(change, error, message):
    with pytest.raises(error, match=message):
        plan_prenorm(dataclasses.replace(PRENORM, **change))
