"""NVRTC, and the worker process around it.

NVRTC holds one lock for a whole compilation, so compiling in parallel takes processes. This file is run by path as a
worker (``python nvrtc.py``) and must import nothing but the standard library and ``cuda.bindings``. A worker reads
JSON lines: first a :class:`Setup`, then jobs, each the arguments of :func:`compile_source`. It answers each job with
one line ``{"cubin": base64 or null, "log": text}``.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OPTIONS = (
    "--std=c++20",
    "--device-int128",
    "--device-as-default-execution-space",
    "--ptxas-options=--register-usage-level=10",
    "--diag-suppress=39,161,174,177,186,940",
)
# The default of 256 MB is just too small for the headers: a precompiled header then costs time and is thrown away.
_PCH_HEAP = 512 << 20


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all jobs of a worker share.

    Attributes:
      library: path of libnvrtc.
      include: directories in search order.
      overrides: (include name, text) of headers in memory.
      prelude: include name of a header to put ahead of the source.
    """

    library: str
    include: Sequence[str]
    overrides: Sequence[Sequence[str]]
    prelude: str


def load(library: str) -> Any:
    """Loads exactly this libnvrtc and returns the ``cuda.bindings.nvrtc`` module, which uses what is loaded."""
    # NVRTC opens its builtins by bare name, which finds them only if they are loaded already.
    for path in [*sorted(Path(library).parent.glob("libnvrtc-builtins.so.*")), library]:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return importlib.import_module("cuda.bindings.nvrtc")


def compile_source(
    setup: Setup, name: str, arch: str, code: str, pch_dir: str | None = None
) -> tuple[bytes | None, str]:
    """Compiles one source.

    Args:
      setup: library and headers.
      name: file name in messages.
      arch: e.g. ``sm_90a``.
      code: the translation unit.
      pch_dir: where to keep the headers precompiled, for the next source with the same headers; 225 MB each.
        No other process can use them.

    Returns:
      The cubin, None when the compiler refuses; and its log.
    """
    nvrtc = load(setup.library)
    options = [*OPTIONS, f"--gpu-architecture={arch}", f"--pre-include={setup.prelude}"]
    options += [f"--include-path={directory}" for directory in setup.include]
    if pch_dir is not None:
        _call(nvrtc, nvrtc.nvrtcSetPCHHeapSize(_PCH_HEAP))
        options += ["--pch", f"--pch-dir={pch_dir}"]
    texts = [text.encode() for _, text in setup.overrides]
    names = [header.encode() for header, _ in setup.overrides]
    program = _call(nvrtc, nvrtc.nvrtcCreateProgram(code.encode(), f"{name}.cu".encode(), len(names), texts, names))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(_call(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
        _call(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0").decode(errors="replace")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return None, f"{text}\n{result.name}".strip()
        cubin = bytearray(_call(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _call(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _call(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    result, *values = answer
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC answered {result.name}")
    return values[0] if values else None


def main() -> None:
    """Serves jobs from standard input until it ends."""
    # Whatever a library prints goes to standard error, so that answers stay whole.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setup = Setup(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        job = json.loads(line)
        try:
            cubin, log = compile_source(setup, **job)
        except Exception as error:
            cubin, log = None, f"{type(error).__name__}: {error}"
        answer = {"cubin": None if cubin is None else base64.b64encode(cubin).decode(), "log": log}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
