"""``pytest --pyargs jaxmoe.testing`` as a user runs it: outside of the repository, with the table at the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from jaxmoe.testing.conftest import table

ROOT = Path(__file__).parents[2]


def test_it_runs_here_and_prints_what_works(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "COLUMNS": "200"}
    command = [sys.executable, "-m", "pytest", "--pyargs", "jaxmoe.testing", "-p", "no:cacheprovider", "-q"]
    command += ["-k", "(BF16 and psum) or processes", "-W", "error"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    _, _, summary = done.stdout.partition("jaxmoe on cpu, JAX ")
    lines = summary.splitlines()
    assert re.match(r"one device +reference psum +deepgemm psum$", lines[1])
    assert re.match(r"BF16 +ok +– \[1\]$", lines[2])
    assert re.match(r"\[1\] .*platform 'cpu'; CUDA kernels need an NVIDIA GPU", lines[3])
    assert re.match(r"many devices +2 cpu processes$", lines[4])
    assert re.match(r"tokens × experts +ok$", lines[5])


def test_the_table():
    rows = {"A": {"x": "ok", "y": "–: too old"}, "B": {"y": "–: too old", "z": "FAILED"}}
    assert table("T", rows) == ["T  x   y      z", "A  ok  – [1]", "B      – [1]  FAILED", "[1] too old"]
