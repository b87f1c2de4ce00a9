"""``jaxmoe doctor`` and ``jaxmoe warmup``: what they print, what they do, and no stack trace for a user's mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxmoe import cli
from jaxmoe.commands import doctor
from jaxmoe.config import Execution, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.cuda import arch, cubin_cache, ffi, headers, target
from jaxmoe.cuda.deepgemm import call
from jaxmoe.errors import BackendUnavailable
from jaxmoe.layer.kernels import kernels_for
from jaxmoe.layer.params import ExpertWeights, MoEParams, RouterParams, SharedParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.ops import grouped_gemm
from jaxmoe.ops.grouped_gemm import deepgemm
from jaxmoe.ops.permute import cuda as places
from jaxmoe.quant.formats import BF16, MXFP4, FP8Block
from jaxmoe.quant.tensors import GroupedWeight, scales_like

H200, B200 = arch.Arch("sm_90a", 132), arch.Arch("sm_100f", 148)
SHAPE = ["--experts", "8", "--hidden", "512", "--intermediate", "256", "--top-k", "2"]
FOR_H200 = ["--arch", "sm_90a", "--num-sms", "132"]


class Device:
    """What a JAX GPU device says of itself."""

    platform, id, device_kind = "gpu", 0, "NVIDIA Something"

    def __init__(self, capability: str, cores: int):
        self.compute_capability, self.core_count = capability, cores


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMOE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "capability, cores, expected", [("9.0", 132, H200), ("9.0", 133, H200), ("10.0", 148, B200), ("10.3", 148, B200)]
)
def test_detect(capability, cores, expected):
    assert arch.detect(Device(capability, cores)) == expected


@pytest.mark.parametrize(
    "capability, reason", [("12.0", "need wgmma .* or tcgen05"), ("8.0", "9.0, 10.0 and 10.3 only"), ("10.1", "only")]
)
def test_gpus_without_kernels_say_why(capability, reason):
    with pytest.raises(NotImplementedError, match=rf"capability {capability}: .*{reason}"):
        arch.detect(Device(capability, 100))


def test_a_cpu_is_no_target():
    with pytest.raises(BackendUnavailable, match="is of platform 'cpu'"):
        arch.detect()


@pytest.mark.parametrize("num_sms", [131, 0, -2])
def test_sms_come_in_pairs(num_sms):
    with pytest.raises(ValueError, match=f"num_sms is {num_sms}; it must be even"):
        arch.Arch("sm_90a", num_sms)


def config(**changes) -> MoEConfig:
    sizes = {"hidden": 512, "intermediate": 256, "router": RouterConfig(num_experts=8, top_k=2), "weights": FP8Block}
    return MoEConfig(**(sizes | changes))


def gemms(kernels) -> list:
    """Those among a layer's kernels that multiply; the others move rows."""
    return [kernel for kernel in kernels if "grouped" in kernel.name or "dense" in kernel.name]


def shapes(kernels) -> list[tuple[int, int, int]]:
    """(groups, n, k) of sm90_fp8_gemm_1d2d sources."""
    found = []
    for kernel in gemms(kernels):
        arguments = kernel.code.split("<")[2].split(", ")
        found.append((int(arguments[4]), int(arguments[2]), int(arguments[3])))
    return found


def test_a_layer_has_two_gemms():
    assert shapes(kernels_for(config(), H200, [128])) == [(8, 512, 512), (8, 512, 256)]


def test_shared_experts_add_a_dense_kernel_for_any_size_or_widen_the_stack():
    apart = config(shared=SharedExperts(intermediate=384))
    assert shapes(kernels_for(apart, H200, [128])) == [(8, 512, 512), (8, 512, 256), (1, 0, 0)]
    fused = config(shared=SharedExperts(intermediate=256, fused=True))
    assert shapes(kernels_for(fused, H200, [128])) == [(9, 512, 512), (9, 512, 256)]


def test_partial_blocks_are_padded_as_they_are_stored():
    odd = config(hidden=2880, intermediate=2880, partial_blocks=True)
    assert shapes(kernels_for(odd, H200, [128])) == [(8, 5888, 2944), (8, 2880, 2944)]
    (up, _) = gemms(kernels_for(config(hidden=2880, intermediate=2880, weights=BF16), H200, [128]))
    assert "0, 5760, 2880, 8," in up.code


def test_no_kernel_is_listed_twice_and_no_tokens_need_none():
    once = kernels_for(config(), H200, [4096])
    assert kernels_for(config(), H200, [4096, 4096]) == once
    assert kernels_for(config(), H200, [0]) == []


@pytest.mark.parametrize(
    "layout, name", [("psum", "PsumLayout"), ("masked", "Masked"), ("contiguous", "MGroupedContiguous,")]
)
def test_the_layout_is_compiled_in(layout, name):
    kernels = gemms(kernels_for(config(), H200, [64], Execution(layout=layout)))
    assert len(kernels) == 2 and all(name in kernel.code and kernel.arch == "sm_90a" for kernel in kernels)


def weight(fmt, e: int, n: int, k: int) -> GroupedWeight:
    """A stack of matrices without numbers."""
    stored = -(-k // fmt.k_multiple) * fmt.k_multiple
    values = jax.ShapeDtypeStruct(
        (e, n, stored * fmt.bits // 8 if fmt.bits == 4 else stored),
        {16: jnp.bfloat16, 8: jnp.float8_e4m3fn, 4: jnp.uint8}[fmt.bits],
    )
    return GroupedWeight(values, scales_like(fmt, e, n, stored), fmt, k)  # type: ignore[arg-type]


def experts(fmt, e: int, hidden: int, inter: int) -> ExpertWeights:
    stored = -(-inter // fmt.k_multiple) * fmt.k_multiple
    return ExpertWeights(weight(fmt, e, 2 * stored, hidden), weight(fmt, e, hidden, inter))


@pytest.mark.parametrize("layout", ["psum", "masked", "contiguous"])
@pytest.mark.parametrize(
    "fmt, gpu, hidden", [(BF16, H200, 2880), (FP8Block, H200, 2880), (BF16, B200, 512), (MXFP4, B200, 512)]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_list_is_what_the_layer_launches(monkeypatch, fmt, gpu, hidden, layout, deterministic):
    jax.clear_caches()  # a GEMM traced before would not be seen again
    launched = []

    def run_kernel(planned, args, results):
        launched.append(planned[0])
        return tuple(jnp.zeros(result.shape, result.dtype) for result in results)

    monkeypatch.setattr(call, "run_kernel", run_kernel)
    monkeypatch.setattr(places, "run_kernel", run_kernel)
    monkeypatch.setattr(ffi, "library", lambda: None)
    monkeypatch.setitem(grouped_gemm.BACKENDS, "deepgemm", deepgemm.grouped_gemm)
    shared = SharedExperts(intermediate=384)
    layer = config(hidden=hidden, weights=fmt, shared=shared, partial_blocks=True)
    router = RouterParams(jax.ShapeDtypeStruct((hidden, 8), jnp.float32))
    params = MoEParams(router, experts(fmt, 8, hidden, 256), SharedParams(experts(fmt, 1, hidden, 384)))
    # On a CPU the alignment must be asked for; on a GPU it is this one.
    execution = Execution(layout=layout, row_alignment=128, deterministic=deterministic)
    x = jax.ShapeDtypeStruct((200, hidden), jnp.bfloat16)
    with target.target(gpu):
        jax.eval_shape(lambda p, x: moe(p, x, layer, execution), params, x)
    assert len(gemms(set(launched))) >= (2 if deterministic else 3)
    listed = kernels_for(layer, gpu, [200], Execution(layout=layout, deterministic=deterministic))
    assert set(launched) == set(listed)


def test_a_format_without_kernels_is_refused():
    with pytest.raises(NotImplementedError, match="MXFP4"):
        kernels_for(config(weights=MXFP4), H200, [64])


def test_warmup_compiles_then_finds(cache, capsys, toolchain):
    command = ["warmup", *FOR_H200, *SHAPE, "--format", "FP8Block", "--tokens", "64", "--jobs", "2"]
    assert cli.main(command) == 0
    first = capsys.readouterr().out.splitlines()
    assert first[0] == f"4 kernels for sm_90a with 132 SMs, {cache}"
    assert [line.split()[0] for line in first[1:]] == ["compiled"] * 4
    assert cli.main(command) == 0
    second = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in second[1:]] == ["cached"] * 4
    assert [line.split()[1] for line in second[1:]] == [line.split()[1] for line in first[1:]]
    for line in first[1:]:
        assert cubin_cache.lookup(line.split()[1]) is not None
    assert cli.main(["doctor"]) == 0
    assert "4 kernels for sm_90a" in capsys.readouterr().out


@pytest.mark.parametrize(
    "quantization, target, note, names",
    [
        ({}, "sm_90a", "", ["sm90_bf16_m_grouped_masked"]),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "sm_90a", "", ["sm90_fp8_1d2d_m_grouped_masked"]),
        ({"quant_method": "fp8"}, "sm_100f", "FP8Block has no kernel on sm_100f", ["sm100_fp8_1d1d_m_grouped_masked"]),
        ({"quant_method": "mxfp4"}, "sm_90a", "MXFP4 has no kernel on sm_90a", ["sm90_fp8_1d2d_m_grouped_masked"]),
        ({"quant_method": "mxfp4"}, "sm_100f", "", ["sm100_fp8_fp4_1d1d_m_grouped_masked"]),
    ],
)
def test_warmup_reads_a_checkpoint(cache, tmp_path, capsys, quantization, target, note, names):
    release = {
        "model_type": "mixtral",
        "hidden_size": 512,
        "intermediate_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
    }
    text = json.dumps(release | ({"quantization_config": quantization} if quantization else {}))
    (tmp_path / "config.json").write_text(text)
    sms = {"sm_90a": "132", "sm_100f": "148"}[target]
    command = [
        "warmup",
        "--checkpoint",
        str(tmp_path),
        "--arch",
        target,
        "--num-sms",
        sms,
        "--tokens",
        "64",
        "--dry-run",
    ]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert note in out and ("has no kernel" in out) == bool(note)
    listed = {line.strip() for line in out.splitlines() if re.fullmatch(r"  sm\d+_\w+", line)}
    assert {name for name in listed if "grouped" in name} == set(names)
    assert any("group_tokens" in name for name in listed)
    assert not cache.exists()
    assert cli.main([*command, "--layer", "2"]) == 2
    assert "--layer 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "pass --arch and --num-sms"),
        (FOR_H200, "pass --experts, --hidden, --intermediate, --top-k, or --checkpoint DIR"),
        ([*FOR_H200, *SHAPE[:4]], "pass --intermediate, --top-k"),
        ([*FOR_H200, *SHAPE[:-1], "9"], "top_k is 9 but there are only 8 experts"),
        ([*FOR_H200, *SHAPE, "--tokens", "1,x"], "'1,x' is not a list of positive integers"),
        ([*FOR_H200, *SHAPE, "--tokens", "0"], "'0' is not a list of positive integers"),
        ([*FOR_H200, *SHAPE, "--jobs", "0"], "--jobs is 0; it must be at least 1"),
        ([*FOR_H200, *SHAPE, "--format", "INT3"], "invalid choice: 'INT3'"),
        ([*FOR_H200, *SHAPE, "--format", "MXFP8"], "sm_90a has no DeepGEMM kernel for MXFP8 weights"),
        ([*FOR_H200, *SHAPE, "--layer", "1"], "--layer goes with --checkpoint"),
        ([*FOR_H200, *SHAPE, "--checkpoint", "."], "leave out --experts"),
        ([*FOR_H200, "--checkpoint", "/nowhere"], "/nowhere/config.json"),
        (["--arch", "sm_90a", *SHAPE], "--arch sm_90a needs --num-sms"),
        (["--arch", "sm_90a", "--num-sms", "131", *SHAPE], "num_sms is 131"),
        (["--arch", "sm_120a", "--num-sms", "100", *SHAPE], "architecture 'sm_120a'"),
        ([*FOR_H200, *SHAPE, "--layout", "masked", "--masked-capacity", "4", "--tokens", "8"], "masked_capacity 4 is"),
    ],
)
def test_mistakes_are_one_line(cache, capsys, arguments, message):
    assert cli.main(["warmup", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert error.splitlines()[-1].startswith("jaxmoe warmup: ")


def test_a_cache_that_cannot_be_written_is_exit_code_1(tmp_path, monkeypatch, capsys, toolchain):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXMOE_CACHE_DIR", str(tmp_path / "file"))
    assert cli.main(["warmup", *FOR_H200, *SHAPE, "--tokens", "64"]) == 1
    assert "set JAXMOE_CACHE_DIR" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, code", [([], 2), (["nonsense"], 2), (["--help"], 0), (["warmup", "--help"], 0)])
def test_usage(capsys, arguments, code):
    assert cli.main(arguments) == code


def test_doctor_on_a_machine_without_a_gpu(cache, capsys, toolchain, monkeypatch):
    monkeypatch.setattr(doctor, "_driver", lambda: None)
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"][0]["platform"] == "cpu"
    assert report["toolchain"]["kernel headers"]["digest"] == headers.WHEEL_TREE
    assert all(part["found"] for name, part in report["toolchain"].items() if name != "DeepEP headers")
    empty = {"directory": str(cache), "writable": True, "kernels": 0, "bytes": 0, "architectures": []}
    assert report["cache"] == empty
    assert report["cpu"]["usable"] and not report["gpu"]["usable"]
    assert "no NVIDIA driver" in report["gpu"]["problems"][0]
    assert cli.main(["doctor", "--require-gpu"]) == 1


@pytest.fixture
def gpu_machine(monkeypatch, tmp_path):
    """An H200 with everything in place, as far as doctor can see."""
    library = tmp_path / "libjaxmoe_ffi.so"
    library.write_text("")
    monkeypatch.setattr(jax, "local_devices", lambda: [Device("9.0", 132)])
    monkeypatch.setattr(doctor, "_driver", lambda: "13.0")
    monkeypatch.setattr(ffi, "library_path", lambda: library)
    return library


def test_doctor_on_a_gpu(cache, gpu_machine, capsys, toolchain):
    assert cli.main(["doctor", "--require-gpu"]) == 0
    out = capsys.readouterr().out
    assert "arch sm_90a, num_sms 132" in out and out.endswith("gpu        works\n")


def test_doctor_names_each_missing_part(cache, gpu_machine, monkeypatch, toolchain):
    def missing(memo_dir=None):
        raise BackendUnavailable("headers are missing; run: pip install x")

    monkeypatch.setattr(headers, "find_deep_gemm", missing)
    monkeypatch.setattr(doctor, "_driver", lambda: "12.8")
    gpu_machine.unlink()
    problems = doctor.examine()["gpu"]["problems"]
    assert len(problems) == 3
    assert "driver is for CUDA 12.8" in problems[0]
    assert problems[1] == "headers are missing; run: pip install x"
    assert "is not built; run: pip install ." in problems[2]


def test_doctor_on_a_gpu_without_kernels(cache, gpu_machine, monkeypatch, toolchain):
    monkeypatch.setattr(jax, "local_devices", lambda: [Device("12.0", 170)])
    (problem,) = doctor.examine()["gpu"]["problems"]
    assert "compute capability 12.0" in problem


def test_a_prepared_cache_replaces_the_compiler(cache, gpu_machine, monkeypatch, toolchain):
    cubin_cache._store("0" * 40, kernels_for(config(), H200, [8])[0], b"cubin", toolchain)

    def missing(memo_dir=None):
        raise BackendUnavailable("headers are missing")

    monkeypatch.setattr(headers, "find_deep_gemm", missing)
    assert doctor.examine()["gpu"]["usable"]


def test_the_command_starts_without_loading_jax():
    code = "import sys; from jaxmoe import cli; cli.main(['--help']); assert 'jax' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
