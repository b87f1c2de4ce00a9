"""The public face: names, docstrings, and an import that touches no device."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxmoe
import jaxmoe.balance
import jaxmoe.nn.linen
import jaxmoe.nn.moe
import jaxmoe.parallel

ROOT = Path(__file__).parents[1]
PUBLIC = {
    "jaxmoe": """BF16 MXFP4 MXFP8 Activation Execution FP8Block FP8BlockUE8M0 MoEConfig MoEParams RouterConfig Routing
        SharedExperts __version__ balance checkpoint debug errors moe nn parallel plan route""",
    "jaxmoe.balance": """Placement expert_load load_balancing_loss load_bars moe_with_load place_experts plan_placements
        plot_load router_z_loss update_correction_bias""",
    "jaxmoe.parallel": "AllToAll DeepEP EpContext ParallelLayout moe_parallel param_specs shard_params",
    "jaxmoe.nn": "SHARDING Buffer MoE QuantizedParam linen",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module):
    names = sys.modules[module].__all__
    assert set(names) == set(PUBLIC[module].split())
    assert len(names) == len(set(names))
    for name in names:
        assert getattr(sys.modules[module], name) is not None


def test_dir_and_unknown_names():
    assert set(dir(jaxmoe)) >= set(jaxmoe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'moo'"):
        _ = jaxmoe.moo


def test_version_is_the_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert jaxmoe.__version__ == project["version"]


def public_objects() -> list[tuple[str, object]]:
    names = [(module, name) for module in PUBLIC for name in PUBLIC[module].split()]
    found = [(f"{module}.{name}", getattr(sys.modules[module], name)) for module, name in names]
    return [(n, v) for n, v in found if inspect.isclass(v) or inspect.isfunction(v) or inspect.ismodule(v)]


@pytest.mark.parametrize(("name", "value"), public_objects(), ids=lambda v: v if isinstance(v, str) else "")
def test_docstrings(name, value):
    doc = value.__doc__ or ""
    assert len(doc.strip()) > 20 and not doc.startswith(f"{getattr(value, '__name__', '')}("), name
    members = vars(value).items() if inspect.isclass(value) else ()
    for member, attribute in members:
        function = attribute.__func__ if isinstance(attribute, classmethod) else attribute
        function = function.fget if isinstance(function, property) else function
        if inspect.isfunction(function) and function.__module__.startswith("jaxmoe") and not member.startswith("_"):
            assert function.__doc__, f"{name}.{member} has no docstring"


@pytest.mark.parametrize("module", [jaxmoe.nn.moe, jaxmoe.nn.linen], ids=lambda m: m.__name__)
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted > 3 and result.failed == 0


def test_import_creates_no_backend():
    code = """
import sys
import jaxmoe
assert "jax" not in sys.modules, "importing the package imports jax"
for name in jaxmoe.__all__:
    getattr(jaxmoe, name)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "using the names creates a backend"
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
