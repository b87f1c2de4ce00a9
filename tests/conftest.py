"""One strict session: 8 virtual CPU devices, strict dtype promotion, x64 off, warnings are errors."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_x64", False)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Numbers that depend on the test's name only."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
