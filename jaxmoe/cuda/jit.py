"""Compiles kernel sources to cubins with NVRTC, without a GPU, a CUDA toolkit or a host compiler."""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import queue
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from jaxmoe.cuda import headers, nvrtc
from jaxmoe.cuda.source import KernelSource, Package
from jaxmoe.errors import BackendUnavailable, KernelCompileError

# Measured per process and header: 3 kernels 4.1 s of CPU instead of 5.8, 12 kernels 9.5 instead of 22.
_PCH_FROM = 3
# Beyond this, memory (0.4 GB a worker) costs more than the time won.
_MAX_WORKERS = 16
_LOG_TAIL = 4000
_Jobs = queue.SimpleQueue[tuple[KernelSource, bool]]
_Done = queue.SimpleQueue[tuple[KernelSource, bytes | KernelCompileError]]


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """A compiler with its headers.

    Attributes:
      nvrtc: the library. headers: what it compiles against.
    """

    nvrtc: headers.Found
    headers: headers.Headers

    @property
    def digest(self) -> str:
        """Changes whenever a cubin might."""
        parts = (self.nvrtc.digest, self.headers.digest, *nvrtc.OPTIONS)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def setup(self) -> nvrtc.Setup:
        """The part a compiling process needs."""
        include = tuple(map(str, self.headers.include))
        return nvrtc.Setup(str(self.nvrtc.path), include, self.headers.overrides, headers.PRELUDE)


def find_nvrtc(memo_dir: Path | None = None) -> headers.Found:
    """Finds libnvrtc, CUDA 13 or newer; loading it needs no GPU.

    Args:
      memo_dir: where the library's hash is remembered.

    Raises:
      BackendUnavailable: the library or its Python bindings are missing or too old.
    """
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

        importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise BackendUnavailable(f"cuda-bindings cannot be imported ({error}); run: {headers.INSTALL}") from error
    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except (DynamicLibNotFoundError, RuntimeError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BackendUnavailable(f"libnvrtc cannot be loaded ({reason}); run: {headers.INSTALL}") from error
    if path is None:
        raise BackendUnavailable(f"libnvrtc is loaded but has no path; run: {headers.INSTALL}")
    _, major, minor = nvrtc.load(path).nvrtcVersion()
    if major < 13:
        raise BackendUnavailable(
            f'{path} is NVRTC {major}.{minor}; 13.0 or newer is needed; run: pip install "nvidia-cuda-nvrtc>=13.0"'
        )
    library = Path(path).resolve()
    return headers.Found(library, _build(library) or f"{major}.{minor}", headers.tree_hash(library, memo_dir))


def find_toolchain(memo_dir: Path | None = None, package: Package = "deep_gemm") -> Toolchain:
    """Finds compiler and the headers of a package's kernels, once per process.

    Raises:
      BackendUnavailable: a part is missing; the message holds the command that installs it.
    """
    return _find_toolchain(memo_dir, package)


@functools.lru_cache(maxsize=2)
def _find_toolchain(memo_dir: Path | None, package: Package) -> Toolchain:
    return Toolchain(find_nvrtc(memo_dir), headers.find_headers(memo_dir, package))


def compile(source: KernelSource, toolchain: Toolchain | None = None) -> bytes:
    """Compiles one source in this process.

    Raises:
      BackendUnavailable: no compiler or headers.
      KernelCompileError: the compiler refuses, or the cubin does not hold exactly one kernel.
    """
    toolchain = toolchain or find_toolchain(package=source.package)
    cubin, log = nvrtc.compile_source(toolchain.setup, **_job(source, None))
    return _checked(source, cubin, log, toolchain)


def compile_many(
    sources: Sequence[KernelSource], *, workers: int | None = None, toolchain: Toolchain | None = None
) -> Generator[tuple[KernelSource, bytes]]:
    """Compiles sources in parallel processes and yields each as it is done.

    Args:
      sources: what to compile, all of one package.
      workers: processes; None takes one per CPU, at most 16.
      toolchain: None finds it.

    Yields:
      (source, cubin) in the order of completion.

    Raises:
      BackendUnavailable: no compiler or headers.
      KernelCompileError: after all others are done, if the compiler refused some.
    """
    toolchain = toolchain or find_toolchain(package=sources[0].package if sources else "deep_gemm")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1")
    workers = min(workers or min(len(os.sched_getaffinity(0)), _MAX_WORKERS), len(sources))
    # Sources with the same headers side by side, so that a worker meets few precompiled headers (225 MB each on disk).
    ordered = sorted(sources, key=_headers_of)
    groups = collections.Counter(map(_headers_of, ordered))
    jobs, done = _Jobs(), _Done()
    for source in ordered:
        jobs.put((source, groups[_headers_of(source)] >= _PCH_FROM * workers))
    failures: list[KernelCompileError] = []
    with contextlib.ExitStack() as stack:
        for _ in range(workers):
            stack.enter_context(_Worker(toolchain, jobs, done))
        for _ in ordered:
            source, result = done.get()
            if isinstance(result, KernelCompileError):
                failures.append(result)
            else:
                yield source, result
    if failures:
        if len(failures) > 1:
            failures[0].add_note(f"{len(failures)} of {len(ordered)} kernels failed; this is the first")
        raise failures[0]


def kernel_names(cubin: bytes) -> list[str]:
    """Returns the mangled names of the kernels in a cubin: the symbols its ELF header marks as entries.

    Raises:
      ValueError: not a 64-bit ELF file for CUDA.
    """
    if cubin[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", cubin, 18)[0] != _EM_CUDA:
        raise ValueError("not a CUDA ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + size * i) for i in range(count)]
    names = []
    for _, kind, _, _, offset, length, link, _, _, entry in sections:
        if kind != _SHT_SYMTAB:
            continue
        strings = sections[link][4]
        for at in range(offset, offset + length, entry):
            name, info, other = struct.unpack_from("<IBB", cubin, at)
            if info & 0xF == _STT_FUNC and other & _STO_CUDA_ENTRY:
                start = strings + name
                names.append(cubin[start : cubin.index(b"\0", start)].decode())
    return names


_EM_CUDA, _SHT_SYMTAB, _STT_FUNC, _STO_CUDA_ENTRY = 190, 2, 2, 0x10


class _Worker:
    """A thread with one compiling process, which it starts again should it die."""

    def __init__(self, toolchain: Toolchain, jobs: _Jobs, done: _Done) -> None:
        self._toolchain, self._jobs, self._done = toolchain, jobs, done
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._pch = tempfile.TemporaryDirectory(prefix="jaxmoe-pch-", ignore_cleanup_errors=True)

    def __enter__(self) -> _Worker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # An idle process ends with its input; a busy one is stopped.
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
            self._thread.join()
            process.stdout.close()
        self._pch.cleanup()

    def _serve(self) -> None:
        while not self._closed:
            try:
                source, pch = self._jobs.get_nowait()
            except queue.Empty:
                return
            try:
                self._done.put((source, self._compile(source, pch)))
            except KernelCompileError as error:
                self._done.put((source, error))

    def _compile(self, source: KernelSource, pch: bool) -> bytes:
        process, line = self._start(), ""
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError, ValueError):
                print(json.dumps(_job(source, self._pch.name if pch else None)), file=process.stdin, flush=True)
                line = process.stdout.readline()
        if not line:
            code = None if process is None else process.wait()
            log = f"the compiling process ended with code {code}; if memory ran out, use fewer workers"
            return _checked(source, None, log, self._toolchain)
        answer = json.loads(line)
        cubin = None if answer["cubin"] is None else base64.b64decode(answer["cubin"])
        return _checked(source, cubin, answer["log"], self._toolchain)

    def _start(self) -> subprocess.Popen[str] | None:
        """The running process; None once the worker is closed."""
        with self._lock:
            process = self._process
            if self._closed or (process is not None and process.poll() is None):
                return process
            if process is not None and process.stdin is not None and process.stdout is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
                process.stdout.close()
            # By path and with -P, so that it imports neither JAX nor our modules in place of others of the same name.
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", nvrtc.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                print(json.dumps(dataclasses.asdict(self._toolchain.setup)), file=process.stdin, flush=True)
            return process


def _job(source: KernelSource, pch_dir: str | None) -> dict[str, Any]:
    return {"name": source.name, "arch": source.arch, "code": source.code, "pch_dir": pch_dir}


def _headers_of(source: KernelSource) -> tuple[str, tuple[str, ...]]:
    return source.arch, tuple(line for line in source.code.splitlines() if line.startswith("#"))


def _checked(source: KernelSource, cubin: bytes | None, log: str, toolchain: Toolchain) -> bytes:
    if cubin is not None:
        kernels = kernel_names(cubin)
        if len(kernels) == 1:
            return cubin
        log = f"the cubin holds {len(kernels)} kernels, not one: {kernels}"
    include = "\n  ".join(map(str, toolchain.headers.include))
    tail = log if len(log) <= _LOG_TAIL else f"[…]{log[-_LOG_TAIL:]}"
    raise KernelCompileError(
        f"NVRTC {toolchain.nvrtc.version} cannot compile {source.name} for {source.arch}:\n{tail}\n"
        f"source:\n{source.code}\ninclude paths:\n  {include}"
    )


def _build(library: Path) -> str | None:
    """The full version of the wheel that holds the library, None for a library from elsewhere."""
    try:
        wheel = importlib.metadata.distribution("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        return None
    place = Path(str(wheel.locate_file("nvidia"))).resolve()
    return wheel.version if library.is_relative_to(place) else None
