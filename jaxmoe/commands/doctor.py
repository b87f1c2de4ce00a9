"""``jaxmoe doctor``: what is installed, what works here, and the command for what is missing."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from typing import Any

from jaxmoe import __version__
from jaxmoe.cuda import arch, cubin_cache, driver, headers, jit
from jaxmoe.errors import BackendUnavailable

_EP = "DeepEP headers"  # only for the deepep transport
_PACKAGES = ("jax", "jaxlib", "flax", "ml_dtypes", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--require-gpu", action="store_true", help="exit with 1 unless GPU kernels can run here")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report. 0, or 1 if ``--require-gpu`` was given and GPU kernels cannot run."""
    report = examine()
    print(json.dumps(report, indent=2) if arguments.json else _text(report))
    return 1 if arguments.require_gpu and not report["gpu"]["usable"] else 0


def examine() -> dict[str, Any]:
    """Looks at this machine and returns the report: plain values, ready for JSON."""
    devices, problem = _devices()
    parts = {
        "kernel headers": _part(lambda: headers.find_deep_gemm(cubin_cache.directory())),
        _EP: _part(lambda: headers.find_deep_ep(cubin_cache.directory())),
        "CUDA headers": _part(headers.find_cuda),
        "CCCL headers": _part(headers.find_cccl, _cccl_verdict),
        "NVRTC": _part(lambda: jit.find_nvrtc(cubin_cache.directory())),
    }
    report: dict[str, Any] = {
        "versions": {"python": platform.python_version(), "jaxmoe": __version__}
        | {name: _version(name) for name in _PACKAGES},
        "devices": devices,
        "driver": _driver(),
        "toolchain": parts,
        "apart": _apart(),
        "ffi": _ffi(),
        "cache": _cache(),
    }
    problems = _problems(report, problem)
    return report | {"cpu": {"usable": True}, "gpu": {"usable": not problems, "problems": problems}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[list[dict[str, Any]], str | None]:
    import jax

    try:
        found = jax.local_devices()
    except RuntimeError as error:
        return [], f"JAX cannot start its backend: {str(error).splitlines()[0]}"
    devices = []
    for device in found:
        entry: dict[str, Any] = {"id": device.id, "platform": device.platform, "kind": device.device_kind}
        if device.platform == "gpu":
            entry["capability"] = str(getattr(device, "compute_capability", "unknown"))
            try:
                kernels = arch.detect(device)
                entry |= {"arch": kernels.name, "num_sms": kernels.num_sms}
            except (BackendUnavailable, ValueError) as reason:
                entry["problem"] = str(reason)
        devices.append(entry)
    return devices, None


def _driver() -> str | None:
    """The newest CUDA version the installed driver runs; asking needs no context."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"


def _apart() -> list[str]:
    """Pairs of GPUs of which one cannot reach the other's memory; those exchange tokens by XLA's collectives only."""
    import jax

    try:
        gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
        pairs = [(a, b) for a in gpus for b in gpus if a.id != b.id]
        if not pairs:
            return []
        reaches = driver.driver().reaches
        return [f"gpu:{a.id} gpu:{b.id}" for a, b in pairs if not reaches(a.local_hardware_id, b.local_hardware_id)]
    except RuntimeError:  # no backend, or a driver that refuses; said elsewhere
        return []


def _part(find: Callable[[], headers.Found], verdict: Callable[[headers.Found], str] | None = None) -> dict[str, Any]:
    try:
        found = find()
    except BackendUnavailable as missing:
        return {"found": False, "problem": str(missing)}
    entry = {"found": True, "version": found.version, "path": str(found.path), "digest": found.digest}
    return entry if verdict is None else entry | {"verdict": verdict(found)}


def _cccl_verdict(cccl: headers.Found) -> str:
    if headers.needs_overrides(cccl):
        return "3.2 or newer, clashes with CuTe under NVRTC: five CuTe headers are adapted in memory"
    return "works as it is"


def _ffi() -> dict[str, Any]:
    from jaxmoe.cuda.ffi import library_path

    path = library_path()
    entry: dict[str, Any] = {"path": str(path), "found": path.is_file()}
    if not entry["found"]:
        entry["problem"] = f"{path} is not built; run: pip install . (needs a C++17 compiler)"
    return entry


def _cache() -> dict[str, Any]:
    directory = cubin_cache.directory()
    records = cubin_cache.records()
    place = next(path for path in (directory, *directory.parents) if path.exists())
    return {
        "directory": str(directory),
        "writable": place.is_dir() and os.access(place, os.W_OK | os.X_OK),
        "kernels": len({record["key"] for record in records}),
        "bytes": sum(path.stat().st_size for path in directory.glob("*.cubin")),
        "architectures": sorted({record["arch"] for record in records}),
    }


def _problems(report: dict[str, Any], backend: str | None) -> list[str]:
    """Why GPU kernels cannot run here, with what to do; empty if they can."""
    gpus = [device for device in report["devices"] if device["platform"] == "gpu"]
    problems = [] if backend is None else [backend]
    if not gpus and report["driver"] is None:
        problems.append("no NVIDIA driver (libcuda.so.1): GPU kernels need a machine with one, for CUDA 13 or newer")
    elif not gpus:
        problems.append('JAX sees no GPU although a driver is installed; run: pip install "jax[cuda13]"')
    elif report["driver"] is not None and int(report["driver"].split(".")[0]) < 13:
        problems.append(
            f"the driver is for CUDA {report['driver']}; kernels compiled by CUDA 13 need a driver of 580 or newer"
        )
    if gpus and all("problem" in gpu for gpu in gpus):
        problems += [gpu["problem"] for gpu in gpus]
    if not report["cache"]["kernels"]:
        toolchain = report["toolchain"].items()
        problems += [part["problem"] for name, part in toolchain if not part["found"] and name != _EP]
        if not report["cache"]["writable"]:
            problems.append(
                f"{report['cache']['directory']} cannot be written; set JAXMOE_CACHE_DIR to a directory that can"
            )
    if "problem" in report["ffi"]:
        problems.append(report["ffi"]["problem"])
    return list(dict.fromkeys(problems))


def _text(report: dict[str, Any]) -> str:
    lines = [
        "versions   " + ", ".join(f"{name} {version or 'missing'}" for name, version in report["versions"].items())
    ]
    for device in report["devices"]:
        about = [
            device["kind"],
            *(f"{key} {device[key]}" for key in ("capability", "arch", "num_sms") if key in device),
        ]
        lines.append(f"device     {device['platform']}:{device['id']} {', '.join(map(str, about))}")
        if "problem" in device:
            lines.append(f"           {device['problem']}")
    lines.append(f"driver     {'none' if report['driver'] is None else 'CUDA ' + report['driver']}")
    for name, part in report["toolchain"].items():
        if part["found"]:
            verdict = f", {part['verdict']}" if "verdict" in part else ""
            lines.append(f"{name:<15}{part['version']} ({part['digest'][:12]}){verdict}\n               {part['path']}")
        else:
            lines.append(f"{name:<15}{part['problem']}")
    if sum(device["platform"] == "gpu" for device in report["devices"]) > 1:
        apart = ", ".join(report["apart"])
        lines.append(f"peers      {'no way: ' + apart if apart else 'all GPUs reach each other'}")
    ffi, cache = report["ffi"], report["cache"]
    lines.append(f"launcher   {ffi['path'] if ffi['found'] else ffi['problem']}")
    state = "writable" if cache["writable"] else "not writable"
    kinds = f" for {', '.join(cache['architectures'])}" if cache["architectures"] else ""
    lines.append(
        f"cache      {cache['directory']}, {state}: {cache['kernels']} kernels{kinds}, {cache['bytes'] / 1e6:.1f} MB"
    )
    lines.append("cpu        works")
    gpu = report["gpu"]
    lines.append("gpu        works" if gpu["usable"] else "gpu        cannot run kernels:")
    return "\n".join([*lines, *(f"  - {problem}" for problem in gpu["problems"])])
