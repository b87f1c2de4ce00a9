"""The tile choice against recorded choices of DeepGEMM's own host code, and its invariants over random GEMMs."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.cuda.deepgemm.checks import check, check_problem
from jaxmoe.cuda.deepgemm.gemm import SMEM_LIMIT, Gemm
from jaxmoe.cuda.deepgemm.heuristics import choose, tensor_memory_columns, theoretical_mk_alignment, waves
from jaxmoe.cuda.deepgemm.template import header, template_args
from jaxmoe.errors import BackendUnavailable, ShapeError

RECORDS = json.loads((pathlib.Path(__file__).parent / "data" / "deepgemm_configs.json").read_text())["records"]


@pytest.mark.parametrize("record", RECORDS, ids=[record["id"] for record in RECORDS])
def test_recorded_configuration(record):
    gemm = Gemm(**record["gemm"])
    config = choose(gemm, num_sms=record["num_sms"], mk_alignment=record["mk_alignment"])
    assert [*gemm.balanced] == record["expected"]
    chosen = dataclasses.asdict(config)
    assert {name: chosen[name] for name in record["config"]} == record["config"]
    assert (config.cluster, config.threads) == (record["cluster"], record["threads"])
    assert [*waves(gemm, config.block_m, config.block_n, config.num_sms)] == record["waves"]
    assert f"{header(gemm)}_impl" == record["kernel"]
    assert [*template_args(gemm, config, mk_alignment=record["mk_alignment"])] == record["template_args"]


def test_all_records_are_there():
    assert len(RECORDS) == 234
    assert len({(record["kernel"], *record["template_args"]) for record in RECORDS}) == 182


@pytest.mark.parametrize(
    ("expected_m", "alignment"),
    [(0, 224), (1, 32), (32, 32), (33, 64), (64, 64), (65, 96), (128, 128), (192, 192), (193, 224), (4096, 224)],
)
def test_theoretical_alignment(expected_m, alignment):
    assert theoretical_mk_alignment("sm_100", expected_m) == alignment
    assert theoretical_mk_alignment("sm_90", expected_m) == 128


@st.composite
def gemms(draw) -> tuple[Gemm, int, int]:
    """A GEMM that the checks accept, an SM count and an alignment."""
    arch = draw(st.sampled_from(["sm_90", "sm_100"]))
    layout = draw(st.sampled_from(["dense", "contiguous", "psum", "masked"]))
    fp8, fp4 = ("e4m3", "e4m3"), ("e4m3", "e2m1")
    a, b = draw(st.sampled_from([("bf16", "bf16"), fp8] + [fp4] * (arch == "sm_100")))
    f32 = layout == "dense" and (a == "bf16" or arch == "sm_100") and draw(st.booleans())
    steps = [64, 128] if arch == "sm_90" else [32, 64, 128] if layout == "masked" else [16, 32, 96, 128, 192, 224, 240]
    alignment = draw(st.sampled_from(steps))
    gran = st.sampled_from([128] if arch == "sm_90" else [32, 128])
    gemm = Gemm(
        arch=arch,
        layout=layout,
        m=draw(st.integers(1, 300)) if layout == "dense" else 1920 * 7 * draw(st.integers(1, 20)),
        n=8 * draw(st.integers(1, 1000)),
        k=128 * draw(st.integers(1, 100)),
        groups=1 if layout == "dense" else draw(st.integers(1, 300)),
        a=a,
        b=b,
        d="f32" if f32 else "bf16",
        b_major=draw(st.sampled_from(["K", "MN"])) if a == "bf16" else "K",
        gran_a=draw(gran),
        gran_b=draw(gran),
        expected_m=draw(st.integers(0, 2000)) if layout in ("psum", "masked") else 0,
    )
    return gemm, 2 * draw(st.integers(1, 74)), alignment


@settings(deadline=None, max_examples=150)
@given(gemms())
def test_every_choice_can_run(case):
    gemm, num_sms, alignment = case
    check_problem(gemm)
    config = choose(gemm, num_sms=num_sms, mk_alignment=alignment)
    check(gemm, config)
    assert config.smem_size <= SMEM_LIMIT
    assert config.num_sms == num_sms and num_sms % config.cluster == 0
    assert config.cluster in (1, 2) and (config.load_m, config.load_n) == (
        config.block_m // (config.cluster_n if gemm.arch == "sm_100" else 1),
        config.block_n // (config.cluster_m if gemm.arch == "sm_100" else 1),
    )
    if gemm.layout in ("contiguous", "psum"):
        assert config.block_m == alignment
    if gemm.arch == "sm_90":
        assert 3 <= config.stages <= 16 and not config.swap_ab
        assert config.block_m <= 128 or config.block_n <= 128
    else:
        assert 2 <= config.stages <= 32
        assert tensor_memory_columns(gemm, config) <= 512
        assert not (config.swap_ab and gemm.d == "f32")
        assert config.block_n == 128 if config.swap_ab else config.block_m in (32, 64, 128)


def test_float32_output_never_swaps_on_sm100():
    """Router logits, 64 rows: bf16 output swaps, float32 output must not (it would read sums too early)."""
    router = Gemm(arch="sm_100", layout="dense", m=64, n=256, k=7168)
    assert choose(router, num_sms=148).swap_ab
    assert not choose(dataclasses.replace(router, d="f32"), num_sms=148).swap_ab
    with pytest.raises(ShapeError, match="swap_ab=False"):
        check(dataclasses.replace(router, d="f32"), choose(router, num_sms=148))


@pytest.mark.parametrize("num_sms", [0, 1, 131, -2])
def test_sm_count_must_be_even(num_sms):
    with pytest.raises(ShapeError, match=f"num_sms is {num_sms};"):
        choose(Gemm(arch="sm_90", layout="dense", m=64, n=64, k=64), num_sms=num_sms)


@pytest.mark.parametrize("alignment", [0, 8, 100])
def test_alignment_must_be_a_multiple_of_16(alignment):
    with pytest.raises(BackendUnavailable, match=f"mk_alignment is {alignment};"):
        choose(Gemm(arch="sm_100", layout="psum", m=64, n=64, k=64), num_sms=2, mk_alignment=alignment)


def test_k_too_long_for_shared_memory():
    """The SM90 kernel keeps a whole row of B's scales, so that k has an end."""
    with pytest.raises(BackendUnavailable, match="232448 bytes"):
        choose(Gemm(arch="sm_90", layout="psum", m=128, n=128, k=2**24, a="e4m3", b="e4m3"), num_sms=132)
