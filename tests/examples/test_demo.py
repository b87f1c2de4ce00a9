from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jaxmoe
from jaxmoe.testing.files import load_file

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo.py"


def run(demo: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, "-W", "error", str(demo)],
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )


def test_demo_agrees_and_says_so():
    done = run(DEMO)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    for part in (
        "Layer 0: 2 of 8 experts by a table of token ids",
        "Layer 1",
        "█",
        "largest error",
        "backend   reference",
    ):
        assert part in out
    assert out.rstrip().endswith("Both layers agree with the recorded outputs.")
    assert len(out.splitlines()) < 60
    # 48 tokens, 2 experts each, 2 layers.
    assert out.count("█") == 2 * 2 * 48


def test_demo_agrees_with_weights_that_a_gpu_had_converted(monkeypatch, capsys):
    demo = load_file(DEMO)
    monkeypatch.setattr("jaxmoe.checkpoint.load.kernel_format", lambda fmt: jaxmoe.FP8Block)
    monkeypatch.setattr(demo, "show_cost", lambda *args: None)
    assert demo.main() == 0
    assert "MXFP4 weights, converted to FP8Block" in capsys.readouterr().out


def test_demo_fails_on_disagreement(monkeypatch, capsys):
    demo = load_file(DEMO)
    recorded = np.load(demo.DATA / "moe_io.npz")
    # A layer that is wrong by 1 in 10000: within the format's tolerance, outside of the exact one.
    outputs = {n: jnp.asarray(recorded[f"model.layers.{n}.mlp|y"] * np.float32(1.0001)) for n in (0, 1)}
    monkeypatch.setattr(demo, "forward", lambda layer, x, token_ids: outputs[0 if token_ids is not None else 1])
    assert demo.main() == 1
    assert "DISAGREEMENT" in capsys.readouterr().out
