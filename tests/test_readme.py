"""The README's Python runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_python_blocks() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "layout" in done.stdout  # the printed plan


def test_named_files_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"(?:examples|benchmarks|tests)/[\w/.]+\w", text):
        assert (ROOT / name).exists(), name
