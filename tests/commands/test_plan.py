"""``jaxmoe plan``: the numbers are those of ``jaxmoe.plan``, mistakes are one line, and no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxmoe
from jaxmoe import cli
from jaxmoe.config import MoEConfig, RouterConfig

SHAPE = ["--experts", "8", "--hidden", "512", "--intermediate", "256", "--top-k", "2", "--format", "FP8Block"]
CONFIG = MoEConfig(
    hidden=512,
    intermediate=256,
    router=RouterConfig(num_experts=8, top_k=2),
    weights=jaxmoe.FP8Block,
    partial_blocks=True,
)
DATA = Path(__file__).parents[2] / "examples" / "data" / "deepseek_v4_fp4"


def test_text(capsys):
    assert cli.main(["plan", *SHAPE, "--tokens", "64,4096", "--gpu", "H200"]) == 0
    out = capsys.readouterr().out
    assert out == "\n\n".join(str(jaxmoe.plan(CONFIG, t, device="H200")) for t in (64, 4096)) + "\n"
    assert "sm90_fp8" in out and "at best on H200" in out


def test_json(capsys):
    assert cli.main(["plan", *SHAPE, "--tokens", "4096", "--gpu", "B200", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    want = jaxmoe.plan(CONFIG, 4096, device="B200")
    assert found["seconds"] == want.seconds > 0 and found["memory"]["peak"] == want.memory.peak
    assert found["config"]["weights"] == "FP8Block" and found["gpu"]["arch"] == "sm_100f"
    assert "FP8Block" in found["kernels"]["deepgemm"] and found["kernels"]["deepgemm"].startswith("cannot")
    assert [s["name"] for s in found["stages"]] == [s.name for s in want.stages]


def test_training(capsys):
    training = ["plan", *SHAPE[:-2], "--tokens", "64", "--gpu", "H200", "--forward-format", "FP8Block"]
    assert cli.main(training) == 0
    assert "quantised to FP8Block in every pass" in capsys.readouterr().out
    assert cli.main([*training, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["execution"]["forward_format"] == "FP8Block" and found["stages"][0]["name"] == "weights"
    assert "; backward sm90_group_tokens, sm90_bf16" in found["kernels"]["deepgemm"]


def test_a_machine_without_a_gpu_gets_no_times(capsys):
    assert cli.main(["plan", *SHAPE, "--tokens", "64", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["seconds"] is None and found["gpu"] is None and found["memory"]["weights"] > 0


@pytest.mark.parametrize(
    "gpu, weights, note",
    [
        ("H200", "FP8Block", "MXFP4 has no kernel on sm_90a: taking weights as loaded in FP8Block"),
        ("B200", "MXFP4", None),
    ],
)
def test_a_checkpoint(capsys, gpu, weights, note):
    assert cli.main(["plan", "--checkpoint", str(DATA), "--gpu", gpu, "--tokens", "64", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["config"]["weights"] == weights and found["config"]["experts"] == 8
    assert not found["kernels"]["deepgemm"].startswith("cannot")
    assert (note is None and note not in found["notes"]) or note in found["notes"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "pass --experts, --hidden, --intermediate, --top-k, or --checkpoint DIR"),
        ([*SHAPE, "--gpu", "H999"], "invalid choice: 'H999'"),
        ([*SHAPE, "--tokens", "many"], "'many' is not a list of positive integers"),
        ([*SHAPE, "--checkpoint", "."], "leave out --experts"),
        ([*SHAPE, "--layout", "masked", "--masked-capacity", "4", "--tokens", "8"], "masked_capacity 4 is"),
        (["--checkpoint", "/nowhere"], "/nowhere/config.json"),
        (["--checkpoint", str(DATA), "--layer", "9"], "--layer 9"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, message):
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert error.splitlines()[-1].startswith("jaxmoe plan: ")


def test_help_and_a_process_of_its_own(capsys):
    assert cli.main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert "example: jaxmoe plan" in out and "--checkpoint DIR" in out
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-m", "jaxmoe.cli", "plan", *SHAPE, "--tokens", "64", "--gpu", "B200"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "at best on B200" in done.stdout, done.stderr
