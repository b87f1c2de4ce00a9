"""The compiler, for tests that compile kernels."""

from __future__ import annotations

import os

import pytest

from jaxmoe.cuda import jit
from jaxmoe.errors import BackendUnavailable


@pytest.fixture(scope="session")
def toolchain():
    """NVRTC with all headers. Where they are not installed, tests that need them skip; in CI they fail."""
    try:
        return jit.find_toolchain()
    except BackendUnavailable as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
