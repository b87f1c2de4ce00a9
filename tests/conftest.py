"""One strict session: 8 virtual CPU devices, strict dtype promotion, x64 off, warnings are errors."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_x64", False)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Numbers that depend on the test's name only."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture
def write_checkpoint(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """Writes a checkpoint directory, with the safetensors library, and gives its path."""

    def write(config: dict[str, Any], tensors: dict[str, np.ndarray], name: str = "checkpoint") -> pathlib.Path:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        save_file({k: np.ascontiguousarray(v).reshape(v.shape) for k, v in tensors.items()}, path / "model.safetensors")
        return path

    return write
