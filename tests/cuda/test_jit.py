"""NVRTC on a machine without a GPU: real kernels become cubins whose machine code uses the tensor cores."""

from __future__ import annotations

import base64
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jaxmoe.cuda import jit, nvrtc
from jaxmoe.cuda.deepgemm.gemm import Gemm
from jaxmoe.cuda.deepgemm.specs import plan_launch
from jaxmoe.cuda.deepgemm.template import TARGETS, instantiate
from jaxmoe.cuda.source import KernelSource
from jaxmoe.errors import BackendUnavailable, KernelCompileError

SIZES = {"m": 1024, "n": 1536, "k": 2048, "groups": 8}
E4M3 = {"a": "e4m3", "b": "e4m3"}
GEMMS = {
    "QGMMA": Gemm(arch="sm_90", layout="masked", expected_m=4, **E4M3, **SIZES),
    "HGMMA": Gemm(arch="sm_90", layout="psum", **SIZES),
    "UTCQMMA": Gemm(arch="sm_100", layout="psum", a="e4m3", b="e2m1", gran_b=32, **SIZES),
    "UTCHMMA": Gemm(arch="sm_100", layout="masked", **SIZES),
}
NUM_SMS = {"sm_90": 132, "sm_100": 148}
TINY = KernelSource("tiny", "sm_90a", "__global__ void tiny(int* p) { *p = 1; }\n")


@pytest.fixture(scope="module")
def sass(tmp_path_factory):
    """A function from a cubin to its machine code, by the disassembler of its own wheel."""
    try:
        wheel = importlib.metadata.distribution("nvidia-cuda-nvdisasm")
    except importlib.metadata.PackageNotFoundError:
        if os.environ.get("CI"):
            raise
        pytest.skip("nvidia-cuda-nvdisasm is not installed")
    path = tmp_path_factory.mktemp("sass") / "kernel.cubin"

    def disassemble(cubin: bytes) -> str:
        path.write_bytes(cubin)
        tool = str(wheel.locate_file("nvidia/cu13/bin/nvdisasm"))
        return subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout

    return disassemble


@pytest.fixture(scope="module")
def compiled(toolchain):
    sources = {}
    for instruction, gemm in GEMMS.items():
        planned = plan_launch(gemm, num_sms=NUM_SMS[gemm.arch])
        assert planned is not None
        sources[planned[0]] = instruction
    return {sources[source]: cubin for source, cubin in jit.compile_many([*sources], workers=2)}


@pytest.mark.parametrize("instruction", GEMMS)
def test_real_kernels_use_the_tensor_cores(compiled, instruction, sass):
    assert len(jit.kernel_names(compiled[instruction])) == 1
    code = sass(compiled[instruction])
    assert set(re.findall(r"\b(QGMMA|HGMMA|UTCQMMA|UTCHMMA)\b", code)) == {instruction}
    assert "UTMALDG" in code  # loads by tensor map
    assert "ACQBULK" in code  # waits for the predecessor: the prelude's function was inlined


def test_one_source_in_this_process(toolchain):
    assert [name.count("tiny") for name in jit.kernel_names(jit.compile(TINY))] == [1]


def test_a_refused_source_says_everything(toolchain):
    source = KernelSource("broken", "sm_90a", "#include <deep_gemm/nowhere.cuh>\n__global__ void k() {}\n")
    with pytest.raises(KernelCompileError) as error:
        jit.compile(source)
    for part in ("broken", "sm_90a", "cannot open source file", source.code, str(toolchain.headers.include[1]), "13."):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "code, count", [("__global__ void a() {}\n__global__ void b() {}\n", 2), ("__device__ int x;\n", 0)]
)
def test_a_cubin_holds_exactly_one_kernel(toolchain, code, count):
    with pytest.raises(KernelCompileError, match=f"the cubin holds {count} kernels, not one"):
        jit.compile(KernelSource("several", "sm_90a", code))


def test_an_unknown_architecture_is_a_compile_error(toolchain):
    with pytest.raises(KernelCompileError, match="invalid value for --gpu-architecture"):
        jit.compile(dataclasses.replace(TINY, arch="sm_1"))


def test_failures_do_not_stop_the_others(toolchain):
    bad = [KernelSource(f"bad{i}", "sm_90a", f"int bad{i}() {{ return {i} }}\n") for i in range(2)]
    good = [KernelSource(f"good{i}", "sm_100f", f"__global__ void good{i}(int* p) {{ *p = {i}; }}\n") for i in range(3)]
    done = {}
    with pytest.raises(KernelCompileError, match=r"bad[01] for sm_90a") as error:
        for source, cubin in jit.compile_many([*bad, *good], workers=2):
            done[source] = cubin
    assert set(done) == set(good)
    assert error.value.__notes__ == ["2 of 5 kernels failed; this is the first"]


def test_a_dead_worker_is_an_error_and_no_hang(toolchain, tmp_path):
    gone = dataclasses.replace(toolchain, nvrtc=dataclasses.replace(toolchain.nvrtc, path=tmp_path / "libnvrtc.so"))
    with pytest.raises(KernelCompileError, match="cannot open shared object file"):
        list(jit.compile_many([TINY], toolchain=gone))


def test_a_worker_that_dies_is_started_again(toolchain, tmp_path, monkeypatch):
    answer = json.dumps({"cubin": base64.b64encode(jit.compile(TINY)).decode(), "log": ""})
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\nsys.stdin.readline()\nfor line in sys.stdin:\n"
        f"    os._exit(9) if json.loads(line)['name'] == 'die' else print({answer!r}, flush=True)\n"
    )
    monkeypatch.setattr(nvrtc, "__file__", str(script))
    die, live = dataclasses.replace(TINY, name="die"), [dataclasses.replace(TINY, name=f"live{i}") for i in range(3)]
    done = set()
    with pytest.raises(KernelCompileError, match="ended with code 9; if memory ran out, use fewer workers"):
        for source, _ in jit.compile_many([live[0], die, *live[1:]], workers=1):
            done.add(source)
    assert done == set(live)


def test_leaving_early_ends_the_workers(toolchain, tmp_path, monkeypatch):
    sources = [dataclasses.replace(TINY, code=f"__global__ void k{i}() {{}}\n") for i in range(6)]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running = jit.compile_many(sources, workers=2)
    next(running)
    assert len([*tmp_path.iterdir()]) == 2
    running.close()
    assert not [*tmp_path.iterdir()]
    with pytest.raises(StopIteration):
        next(running)


def test_no_sources_need_no_worker(toolchain):
    assert list(jit.compile_many([])) == []


def test_workers_must_be_positive(toolchain):
    with pytest.raises(ValueError, match="workers is 0; it must be at least 1"):
        list(jit.compile_many([TINY], workers=0))


def test_precompiled_headers_are_used_from_the_second_source_on(toolchain, tmp_path):
    code = "#include <cuda/std/utility>\n__global__ void k(int* p) {{ *p = {}; }}\n"
    sources = [KernelSource(f"k{i}", "sm_90a", code.format(i)) for i in range(4)]
    assert len({cubin for _, cubin in jit.compile_many(sources, workers=1)}) == 4
    logs = [nvrtc.compile_source(toolchain.setup, s.name, s.arch, s.code, str(tmp_path))[1] for s in sources[:2]]
    assert "creating precompiled header" in logs[0] and "using precompiled header" in logs[1]


def test_headers_in_memory_win_over_files(toolchain):
    setup = dataclasses.replace(toolchain.setup, overrides=(("deep_gemm/impls/sm90_bf16_gemm.cuh", TINY.code),))
    cubin, log = nvrtc.compile_source(setup, "k", "sm_90a", "#include <deep_gemm/impls/sm90_bf16_gemm.cuh>\n")
    assert cubin is not None, log
    assert len(jit.kernel_names(cubin)) == 1


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02" + bytes(60), b"not an elf" * 10])
def test_only_cuda_elf_files_have_kernels(data):
    with pytest.raises(ValueError, match="not a CUDA ELF file"):
        jit.kernel_names(data)


def test_missing_bindings_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(BackendUnavailable, match=r'cuda-bindings cannot be imported.*pip install "jaxmoe\[cuda13\]"'):
        jit.find_nvrtc()


def _recorded() -> list[KernelSource]:
    records = json.loads((Path(__file__).parent / "data" / "deepgemm_configs.json").read_text())["records"]
    found = {}
    for record in records:
        name = record["kernel"].removesuffix("_impl")
        found[instantiate(name, record["gemm"]["arch"], name, record["template_args"])] = None
    return list(found)


@pytest.mark.slow
def test_every_recorded_instantiation_compiles(toolchain):
    sources = _recorded()
    assert len(sources) == 182
    assert {source for source, _ in jit.compile_many(sources)} == set(sources)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_blackwell_kernels_compile_for_each_chip_alone(toolchain, arch):
    sources = [dataclasses.replace(source, arch=arch) for source in _recorded() if source.arch == TARGETS["sm_100"]][:8]
    assert len(list(jit.compile_many(sources))) == 8
