"""One strict session: 8 virtual CPU devices, strict dtype promotion, x64 off, warnings are errors.

In one of several processes (:mod:`jaxmoe.testing.ranks`), one device for each.

For whoever launches kernels: the FFI library of these sources and a CUDA driver that records, both built once per
state of the sources.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    f" --xla_force_host_platform_device_count={1 if 'JAXMOE_RANK' in os.environ else 8}"
)

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several test processes may share a GPU

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxmoe.cuda import cubin_cache, ffi, jit, launch
from jaxmoe.cuda.source import KernelSource
from jaxmoe.errors import BackendUnavailable
from jaxmoe.testing.program import Program
from jaxmoe.testing.ranks import join

join()
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_x64", False)


ROOT = pathlib.Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases that kernels decline, such as float32 experts, are to be right on a GPU all the same."""
    fall_back = pytest.mark.filterwarnings("ignore:.*runs the slow reference on this GPU:RuntimeWarning")
    for item in items:
        if item.get_closest_marker("gpu") is None:
            item.add_marker(fall_back)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of GPUs run where there are enough. Of the others, only field cases and tests of ``devices`` run there.

    In several processes, what takes as many devices as there are runs, because all take part in it or none.
    """
    need = max([mark.args[0] for mark in item.iter_markers("multigpu")], default=0)
    need = need or int(item.get_closest_marker("gpu") is not None)
    have = jax.device_count() if jax.default_backend() == "gpu" else 0
    want = max([mark.args[0] for mark in item.iter_markers("devices")], default=0)
    if have < need:
        pytest.skip(f"needs {need} CUDA GPUs, this machine has {have}")
    if have and not need:
        wanted = want or "field_cases" in item.path.parts
        if not wanted or "standin" in getattr(item, "fixturenames", ()):
            pytest.skip("a test of the CPU path; JAX_PLATFORMS=cpu runs it here, too")
    if jax.process_count() > 1 and jax.device_count() not in (want, need):
        pytest.skip(f"does not take the {jax.device_count()} devices of all processes")
    if jax.device_count() < want:
        pytest.skip(f"needs {want} devices, there are {jax.device_count()}; JAX_PLATFORMS=cpu has 8 in one process")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Compiled programs go with their module: kept, they use up the memory maps that a process may have."""
    yield
    jax.clear_caches()


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


@pytest.fixture(scope="session")
def toolchain() -> jit.Toolchain:
    """NVRTC with all headers. Where they are not installed, tests that need them skip; in CI they fail."""
    try:
        return jit.find_toolchain()
    except BackendUnavailable as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def deep_ep_toolchain(toolchain: jit.Toolchain) -> jit.Toolchain:
    """The same with DeepEP's headers, which no extra installs."""
    del toolchain
    try:
        return jit.find_toolchain(package="deep_ep")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


def build(target: str, sources: list[pathlib.Path], *flags: str) -> pathlib.Path:
    """Compiles and links with the C++ compiler at hand, unless these very sources were built before."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "the tests of ffi/ need g++ or clang++"
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Wno-unused-parameter", f"-I{ROOT}", *flags]
    inputs = [*sources, *sorted([*ROOT.glob("ffi/*.h"), *ROOT.glob("jaxmoe/cuda/kernels/*.cuh")])]
    digest = hashlib.sha256("\0".join([*command, jax.__version__, *(p.read_text() for p in inputs)]).encode())
    path = ROOT / "build" / "test-ffi" / digest.hexdigest()[:16] / target
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{target}.{os.getpid()}")
        done = subprocess.run([*command, *map(str, sources), "-o", str(fresh), "-ldl"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        fresh.rename(path)
    return path


class StandIn:
    """The library on the CPU platform with the recording driver, and what the driver saw."""

    def __init__(self):
        shared = ("-O2", "-fPIC", "-shared")
        driver = build("driver.so", [ROOT / "tests/cuda/standin/driver.cc"], *shared)
        sources = sorted(ROOT.glob("ffi/*.cc"))
        path = build(
            ffi.LIBRARY_NAME,
            sources,
            *shared,
            f"-Wl,--version-script={ROOT}/ffi/exports.map",
            f"-isystem{jax.ffi.include_dir()}",
        )
        self.driver = ctypes.CDLL(str(driver))
        self.driver.standin_log.restype = ctypes.c_size_t
        self.driver.standin_log.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self.library = ffi.Library(path, platform="cpu")
        os.environ["JAXMOE_LIBCUDA"] = str(driver)
        self.library.load_driver()
        del os.environ["JAXMOE_LIBCUDA"]
        self.directory = pathlib.Path()
        self._keys = (f"kernel_{n}" for n in itertools.count())

    def cubin(
        self, *params: int, kernels: int = 1, store: tuple[int, int, int] | None = None, key: str | None = None
    ) -> str:
        """Writes an image of a kernel with these parameter sizes; gives its key, by default one never used before."""
        key = key or next(self._keys)
        text = f"kernels {kernels}\nparams {' '.join(map(str, params))}\n"
        if store:
            text += "store {} {} {}\n".format(*store)
        (self.directory / f"{key}.cubin").write_bytes(text.encode() + b"\0")
        return key

    def calls(self, call: str | None = None) -> list[dict]:
        """What the driver recorded, in order; of one function only if named."""
        text = ctypes.create_string_buffer(self.driver.standin_log(None, 0))
        self.driver.standin_log(text, len(text))
        records = [json.loads(line) for line in text.value.decode().splitlines()]
        return [r for r in records if call in (None, r["call"])]

    def program(self, specs: list[launch.LaunchSpec] | bytes, target: str = "jaxmoe_test") -> Program:
        """Instantiates as XLA would."""
        return Program(self.library, specs, target)


@pytest.fixture
def build_cpp():
    """Builds a program from sources named relative to the repository."""
    return lambda target, sources, *flags: build(target, [ROOT / source for source in sources], *flags)


@pytest.fixture(scope="session")
def standin_session() -> StandIn:
    return StandIn()


@pytest.fixture
def standin(standin_session: StandIn, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A clean record, an empty cubin directory, and :func:`jaxmoe.cuda.ffi.launch` going to the recording driver."""
    standin_session.driver.standin_reset()
    standin_session.directory = tmp_path
    standin_session.library.set_cubin_directory(tmp_path)
    monkeypatch.setenv("JAXMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ffi, "library", lambda: standin_session.library)
    return standin_session


PARAMETER_BYTES = {
    "sm90_fp8_1d2d": (8, 8, 4, 4, 4, 128, 128, 128, 128),
    "sm90_bf16": (8, 4, 4, 4, 128, 128, 128),
    "sm100_fp8_1d1d": (8, 4, 4, 4, 128, 128, 128, 128, 128),
    "sm100_fp8_fp4_1d1d": (8, 4, 4, 4, 128, 128, 128, 128, 128),
    "sm100_bf16": (8, 4, 4, 4, 128, 128, 128),
    "sm100_tf32_hc_prenorm": (4, 128, 128, 128, 8),
    "sm90_zero_rows": (8, 8, 4, 4, 4, 4),
    "sm100_zero_rows": (8, 8, 4, 4, 4, 4),
    "sm90_group_tokens": (8, 8, 8, 8, *[4] * 7),
    "sm100_group_tokens": (8, 8, 8, 8, *[4] * 7),
    "sm90_permute_rows": (*[8] * 6, *[4] * 15),
    "sm100_permute_rows": (*[8] * 6, *[4] * 15),
}
"""Sizes of the parameters of the kernels, by family."""


@pytest.fixture
def kernels(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The recording driver, for which every kernel compiles, to an image with that kernel's parameters.

    The images' keys are always the same, and all are there, because JAX keeps traced programs from test to test.
    """
    keys = {family: standin.cubin(*sizes, key=f"deepgemm_{family}") for family, sizes in PARAMETER_BYTES.items()}

    def ensure(sources: list[KernelSource]) -> dict[KernelSource, str]:
        return {s: keys[max((f for f in PARAMETER_BYTES if s.name.startswith(f)), key=len)] for s in sources}

    monkeypatch.setattr(cubin_cache, "ensure", ensure)
    return standin


TENSOR_MAP_TYPES = {0: "UINT8", 3: "INT32", 7: "FLOAT32", 9: "BFLOAT16", 11: "TFLOAT32", 14: "16U4_ALIGN16B"}
CLUSTER, PDL = "4", "6"


@pytest.fixture
def launches(kernels: StandIn) -> Callable[[], list[dict[str, Any]]]:
    """What was launched, in the terms of ``tests/cuda/data``; ``addresses`` are those of the tensor maps."""

    def described() -> list[dict[str, Any]]:
        maps = {m["map"]: m for m in kernels.calls("cuTensorMapEncodeTiled")}
        found = []
        for record in kernels.calls("cuLaunchKernelEx"):
            addresses, params = [], []
            for param in record["params"]:
                if param.startswith("map "):
                    m = maps[int(param[4:])]
                    assert (m["element_strides"], m["interleave"], m["promotion"], m["fill"]) == ([1, 1], 0, 3, 0)
                    swizzle = (0, 32, 64, 128)[m["swizzle"]]
                    params.append({"map": [TENSOR_MAP_TYPES[m["type"]], m["dims"], m["strides"], m["box"], swizzle]})
                    addresses.append(m["address"])
                else:
                    value = int.from_bytes(bytes.fromhex(param), "little")
                    params.append({"u32": value} if len(param) == 8 else {"ptr": "device" if value else "null"})
            found.append(
                {
                    "grid": record["grid"],
                    "block": record["block"],
                    "dynamic_smem": record["smem"],
                    "cluster": record["attributes"].get(CLUSTER, [1])[0],
                    "pdl": PDL in record["attributes"],
                    "params": params,
                    "addresses": addresses,
                }
            )
        return found

    return described
