"""A wheel and a source archive build, install into a clean environment, and import without a GPU."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = """
import importlib.metadata as metadata, pathlib, sys
import jaxmoe
assert "jax" not in sys.modules
assert pathlib.Path(jaxmoe.__file__).is_relative_to(sys.prefix), jaxmoe.__file__
assert metadata.version("jaxmoe") == jaxmoe.__version__
import jax.numpy as jnp
from jaxmoe.cuda import ffi
from jaxmoe.testing import marker, marker_layer
config, params = marker_layer(4, 1)
y = jaxmoe.moe(params, jnp.ones((3, 128), jnp.bfloat16), config)
assert y.shape == (3, 128) and bool(jnp.isfinite(y.astype(jnp.float32)).all())
assert ffi.library_path().is_file(), "the launcher is missing"
ffi.library()
"""


def run(*command: object, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS", "JAXMOE_FFI_LIBRARY")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source archive of this tree, and a wheel made of that archive alone."""
    out = tmp_path_factory.mktemp("dist")
    tool = tmp_path_factory.mktemp("tool") / "env"
    run(sys.executable, "-m", "venv", tool, cwd=out)
    run(tool / "bin/python", "-m", "pip", "install", "-q", "build", cwd=out)
    run(tool / "bin/python", "-m", "build", "--outdir", out, ROOT, cwd=out)
    (archive,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return archive, wheel


@pytest.mark.slow
def test_what_is_in_them(built):
    archive, wheel = built
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"pyproject.toml", "CMakeLists.txt", "README.md", "ffi/context.cc", "jaxmoe/py.typed"} <= names
    tops = {name.partition("/")[0] for name in names if name}
    assert tops <= {
        *(
            "BUILD",
            "CHANGELOG.md",
            "CMakeLists.txt",
            "Makefile",
            "PKG-INFO",
            "README.md",
            "WORKSPACE",
            "constraints.txt",
        ),
        *("docs", "examples", "ffi", "jaxlib.bzl", "jaxmoe", "pyproject.toml"),
    }
    assert not any(name.endswith((".pyc", ".so")) for name in names)
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        (path,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(z.read(path))
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "jaxmoe").rglob("*.py")}
    assert sources <= set(names)
    assert "jaxmoe/py.typed" in names and any(name.endswith("libjaxmoe_ffi.so") for name in names)
    assert {name for name in names if name.endswith((".h", ".cuh"))} >= {
        str(p.relative_to(ROOT)) for p in (ROOT / "jaxmoe/cuda").rglob("*") if p.suffix in (".h", ".cuh")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (
        set(metadata.get_all("Provides-Extra"))
        == set(project["optional-dependencies"])
        >= {
            "cuda13",
            "examples",
            "test",
        }
    )


@pytest.mark.slow
def test_a_clean_environment(built, tmp_path):
    _, wheel = built
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env/bin/python"
    run(python, "-m", "pip", "install", "-q", "--constraint", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    run(python, "-W", "error", "-c", CHECK, cwd=tmp_path)
    assert "cpu        works" in run(tmp_path / "env/bin/jaxmoe", "doctor", cwd=tmp_path)
    plan = ["--experts", "8", "--hidden", "512", "--intermediate", "256", "--top-k", "2", "--gpu", "B200"]
    assert "at best on B200" in run(tmp_path / "env/bin/jaxmoe", "plan", *plan, cwd=tmp_path)
