"""``jaxmoe bench`` and what it prints of a layer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from jaxmoe import cli
from jaxmoe.bench import layer, report, timing
from jaxmoe.bench.layer import Figures, Floor
from jaxmoe.bench.trace import Kernel, Trace
from jaxmoe.config import MoEConfig, RouterConfig, SharedExperts
from jaxmoe.layer.checks import check_params
from jaxmoe.layer.plan import plan
from jaxmoe.quant.formats import BF16, MXFP4, FP8Block

SHAPE = ["bench", "--experts", "4", "--hidden", "128", "--intermediate", "128", "--top-k", "2"]


def config(**changes) -> MoEConfig:
    sizes = {"hidden": 256, "intermediate": 128, "router": RouterConfig(num_experts=8, top_k=2), "weights": FP8Block}
    return MoEConfig(**(sizes | changes))


def figures(*, traced: bool = True) -> Figures:
    kernels = tuple(
        Kernel(name, "op", f"jit(moe)/{room}/x", start * 1e-6, 5e-6)
        for start, name, room in [(0, "a", "router"), (5, "b", "gemm1"), (10, "MemcpyD2D", "gemm1"), (20, "c", "gemm2")]
    )
    trace = Trace(kernels, 25e-6) if traced else None
    return Figures(plan(config(), 64), 30e-6, 2_000_000, Floor(10e-6, 5e-6), trace, trace)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_MIN_SECONDS", 1e-4)
    monkeypatch.setattr(timing, "copy_rate", lambda: 1e9)


@pytest.mark.parametrize(
    "changes",
    [
        {"shared": SharedExperts(intermediate=384, gate=True)},
        {"shared": SharedExperts(intermediate=256, fused=True), "weights": BF16},
        {"router": RouterConfig(num_experts=8, top_k=2, correction_bias=True, logit_bias=True), "expert_bias": True},
        {"weights": MXFP4, "intermediate": 192, "partial_blocks": True},
    ],
)
def test_random_parameters_fit_every_config(changes) -> None:
    check_params(layer.random_params(config(**changes)), config(**changes))


def test_text_says_rooms_floor_memory_and_copies() -> None:
    text = report.text(figures(), kernels=True)
    for part in ("0.50 of the rate of its floor", "25.0 us from first to last of 4 kernels", "5.0 us idle"):
        assert part in text
    assert "copies and transposes: 1, 5.0 us" in text and "MemcpyD2D" in text
    assert figures().rooms == pytest.approx({"router": 5e-6, "gemm1": 10e-6, "gemm2": 5e-6, "idle": 5e-6})
    assert "traced" not in report.text(figures(traced=False))


@pytest.mark.parametrize("traced", [True, False])
def test_picture_is_a_png(tmp_path: Path, traced: bool) -> None:
    pytest.importorskip("matplotlib")
    report.picture([figures(traced=traced), figures(traced=traced)], str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_command_prints_each_token_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SHAPE, "--tokens", "3,5"]) == 0
    out = capsys.readouterr().out
    assert "3 tokens, 4 experts" in out and "5 tokens, 4 experts" in out
    if jax.default_backend() == "cpu":
        assert "no GPU here" in out


def test_json_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SHAPE, "--tokens", "3", "--format", "FP8Block", "--json", "--deterministic"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["tokens"] == 3 and row["seconds"] > 0 and row["floor_gemms"] > 0 and row["peak_bytes"] > 0


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--tokens", "3"]) == 2
    assert "pass --experts, --hidden" in capsys.readouterr().err


def test_what_is_timed_is_the_program_whose_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []
    monkeypatch.setattr(timing, "seconds", lambda f, *args, **options: timed.append(f) or 1e-3)
    figures = layer.measure(config(weights=BF16), 4)
    assert isinstance(timed[0], jax.stages.Compiled) and figures.seconds == 1e-3
    assert figures.peak > sum(a.nbytes for a in jax.tree.leaves(layer.random_params(config(weights=BF16))))


def test_hash_routing_is_refused() -> None:
    hashed = dataclasses.replace(config().router, hash_routing=True)
    with pytest.raises(ValueError, match="needs token ids"):
        layer.measure(config(router=hashed), 4)
