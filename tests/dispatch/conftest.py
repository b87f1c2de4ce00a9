"""The model of DeepEP's kernels in place of a context."""

from __future__ import annotations

import pathlib
from types import ModuleType

import numpy as np
import pytest
from jax.sharding import Mesh

from jaxmoe.testing.files import load_file


@pytest.fixture(scope="session")
def model() -> ModuleType:
    """The module ``model.py`` beside this file."""
    return load_file(pathlib.Path(__file__).with_name("model.py"))


@pytest.fixture
def mesh_of():
    """``mesh_of(4)``: the first 4 virtual devices along axis ``"d"``."""
    import jax

    return lambda ranks: Mesh(np.array(jax.devices()[:ranks]), "d")
