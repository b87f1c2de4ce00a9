from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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


@pytest.mark.slow
def test_demo_fails_on_disagreement(tmp_path):
    shutil.copytree(DEMO.parent, tmp_path / "examples")
    path = tmp_path / "examples" / "data" / "deepseek_v4_fp4" / "moe_io.npz"
    recorded = dict(np.load(path))
    recorded["model.layers.1.mlp|y"] = recorded["model.layers.1.mlp|y"] * 1.001
    np.savez(path, **recorded)
    done = run(tmp_path / "examples" / "demo.py")
    assert done.returncode == 1
    assert "DISAGREEMENT" in done.stdout
