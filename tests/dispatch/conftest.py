"""The model of DeepEP's kernels in place of a context."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from types import ModuleType

import numpy as np
import pytest
from jax.sharding import Mesh


@pytest.fixture(scope="session")
def model() -> ModuleType:
    """The module ``model.py`` beside this file."""
    name = "jaxmoe_test_deepep_model"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, pathlib.Path(__file__).with_name("model.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def mesh_of():
    """``mesh_of(4)``: the first 4 virtual devices along axis ``"d"``."""
    import jax

    return lambda ranks: Mesh(np.array(jax.devices()[:ranks]), "d")
