from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script of examples/ by name, as its neighbours do."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.fixture
def script(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script of examples/ in a process of its own, where warnings are errors; a program is compiled once."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "XLA_FLAGS": ""}
    cache = tmp_path_factory.getbasetemp() / "compiled"
    env |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", str(EXAMPLES / name), *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, encoding="utf-8", timeout=300)

    return run
