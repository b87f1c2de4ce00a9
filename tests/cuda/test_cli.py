"""``jaxmoe doctor`` and ``jaxmoe warmup``: what they print, what they do, and no stack trace for a user's mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import jax
import pytest

from jaxmoe import cli
from jaxmoe.commands import doctor
from jaxmoe.config import MoEConfig, RouterConfig
from jaxmoe.cuda import arch, cubin_cache, ffi, headers
from jaxmoe.errors import BackendUnavailable
from jaxmoe.layer.kernels import kernels_for
from jaxmoe.quant.formats import FP8Block

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
    "arguments, counts",
    [
        (["--gradients"], {"sm90_bf16_m_grouped_masked": 4}),
        (["--forward-format", "FP8Block"], {"sm90_bf16_m_grouped_masked": 4, "sm90_fp8_1d2d_m_grouped_masked": 2}),
    ],
)
def test_warmup_for_training_lists_the_backward_pass(cache, capsys, arguments, counts):
    assert cli.main(["warmup", *FOR_H200, *SHAPE, "--tokens", "64", "--dry-run", *arguments]) == 0
    names = re.findall(r"^  (sm90_\w+grouped_\w+)$", capsys.readouterr().out, re.MULTILINE)
    assert {name: names.count(name) for name in names} == counts


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
        ([*FOR_H200, *SHAPE, "--format", "FP8Block", "--gradients"], "FP8Block have no gradient"),
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
    layer = MoEConfig(hidden=512, intermediate=256, router=RouterConfig(num_experts=8, top_k=2), weights=FP8Block)
    cubin_cache._store("0" * 40, kernels_for(layer, H200, [8])[0], b"cubin", toolchain)

    def missing(memo_dir=None):
        raise BackendUnavailable("headers are missing")

    monkeypatch.setattr(headers, "find_deep_gemm", missing)
    assert doctor.examine()["gpu"]["usable"]


def test_the_command_starts_without_loading_jax():
    code = "import sys; from jaxmoe import cli; cli.main(['--help']); assert 'jax' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
