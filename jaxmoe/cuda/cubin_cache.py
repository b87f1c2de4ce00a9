"""The directory of compiled kernels: ``$JAXMOE_CACHE_DIR``, else ``$XDG_CACHE_HOME/jaxmoe``, else ``~/.cache/jaxmoe``.

A kernel is ``<key>.cubin`` beside ``<key>.<hash>.json``, which says what it is; ``hash`` is the SHA-256 of the cubin.
The record is written first and both by renaming, so that a reader meets a cubin only with its record. Two compilations
of one source differ in a few bytes of symbol names; when processes race, either cubin is right and has its record.

A machine without compiler or headers runs from a cache prepared elsewhere: the records also name their source.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxmoe.cuda import jit
from jaxmoe.cuda.source import KernelSource, Package
from jaxmoe.errors import BackendUnavailable, CacheError

_LAYOUT = "1"  # change it when cubins of an older jaxmoe must not be used
_LOCK_WAIT = 900.0  # seconds; after that, compiling twice is better than waiting on
_log = logging.getLogger(__name__)


def directory() -> Path:
    """The cache directory, which need not exist yet."""
    own = os.environ.get("JAXMOE_CACHE_DIR")
    if own:
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache").absolute() / "jaxmoe"


def key_of(source: KernelSource, toolchain: jit.Toolchain) -> str:
    """The key under which ``source`` compiled by ``toolchain`` is kept: 40 hex digits."""
    return _hash(_LAYOUT, toolchain.digest, source.arch, source.code)[:40]


def lookup(key: str) -> Path | None:
    """Returns the path of an intact cubin, None if there is none.

    Warns:
      RuntimeWarning: the file is there but its bytes match no record; it will be compiled again.
    """
    path = _cubin(key)
    intact = _intact(key)
    if intact is False:
        warnings.warn(f"{path} is damaged: its bytes match no record; it is not used", RuntimeWarning, stacklevel=2)
    return path if intact else None


def ensure(
    sources: Sequence[KernelSource], *, workers: int | None = None, progress: bool = False
) -> dict[KernelSource, str]:
    """Returns the key of every source, after compiling those that are not in the cache.

    Processes that ask at the same time wait for the one that compiles. Without compiler or headers, cubins of the same
    sources compiled elsewhere are used.

    Args:
      sources: kernels.
      workers: compiling processes; None takes one per CPU.
      progress: show a bar.

    Raises:
      BackendUnavailable: something to compile, and no compiler or headers; says what to install.
      KernelCompileError: the compiler refuses a source; the others are in the cache.
      CacheError: the directory cannot be read or written.
    """
    packages: list[Package] = [source.package for source in sources]
    keys: dict[KernelSource, str] = {}
    for package in dict.fromkeys(packages):
        own = list(dict.fromkeys(source for source in sources if source.package == package))
        keys |= _ensure(own, package, workers, progress)
    return keys


def records() -> list[dict[str, Any]]:
    """What the cache holds, oldest first: ``key``, ``name``, ``arch``, ``sha256``, ``bytes`` and versions."""
    found = []
    for path in directory().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_text())
            if hashlib.sha256(_cubin(record["key"]).read_bytes()).hexdigest() == record["sha256"]:
                found.append(record)
    return sorted(found, key=lambda record: record["compiled"])


def _ensure(
    sources: Sequence[KernelSource], package: Package, workers: int | None, progress: bool
) -> dict[KernelSource, str]:
    """:func:`ensure` for sources of one package."""
    try:
        toolchain = jit.find_toolchain(directory(), package)
    except BackendUnavailable as reason:
        return _prepared(sources, reason)
    keys = {source: key_of(source, toolchain) for source in sources}
    wanted = {key: source for source, key in keys.items() if lookup(key) is None}
    if wanted:
        with _lock():
            missing = [source for key, source in wanted.items() if not _intact(key)]
            _log.info("compiling %d kernels into %s", len(missing), directory())
            bar = tqdm(total=len(missing), desc="compiling", unit="kernel", disable=not progress)
            with bar, contextlib.closing(jit.compile_many(missing, workers=workers, toolchain=toolchain)) as compiled:
                for source, cubin in compiled:
                    _store(keys[source], source, cubin, toolchain)
                    bar.set_postfix_str(source.name)
                    bar.update()
    return keys


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _cubin(key: str) -> Path:
    return directory() / f"{key}.cubin"


def _record(key: str, cubin: bytes) -> Path:
    return directory() / f"{key}.{hashlib.sha256(cubin).hexdigest()}.json"


def _intact(key: str) -> bool | None:
    """Whether the cubin is what was written; None if there is none."""
    try:
        return _record(key, _cubin(key).read_bytes()).exists()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(error) from error


def _prepared(sources: Sequence[KernelSource], reason: BackendUnavailable) -> dict[KernelSource, str]:
    known = {record["source"]: record["key"] for record in records()}
    keys = {}
    for source in sources:
        key = known.get(_hash(source.arch, source.code))
        if key is None:
            raise BackendUnavailable(
                f"kernel {source.name} for {source.arch} is not in {directory()} and cannot be compiled here: {reason}"
            ) from reason
        keys[source] = key
    return keys


def _store(key: str, source: KernelSource, cubin: bytes, toolchain: jit.Toolchain) -> None:
    path = _record(key, cubin)
    record = {
        "key": key,
        "name": source.name,
        "arch": source.arch,
        "source": _hash(source.arch, source.code),
        "sha256": path.name.split(".")[1],
        "bytes": len(cubin),
        "nvrtc": toolchain.nvrtc.version,
        "toolchain": toolchain.digest,
        "compiled": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    _write(path, json.dumps(record, indent=1).encode())
    _write(_cubin(key), cubin)
    for other in directory().glob(f"{key}.*.json"):
        if other != path and time.time() - other.stat().st_mtime > _LOCK_WAIT:
            other.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise _unusable(error) from error


def _unusable(error: OSError) -> CacheError:
    out = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it readable and writable"
    return CacheError(
        f"the kernel cache {directory()} cannot be used ({error}); {out}, or set JAXMOE_CACHE_DIR to another one"
    )


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Lets one process compile at a time. Only saves work: where locks do not work, the cache is still right."""
    import fcntl

    path = directory() / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise _unusable(error) from error
    with file:
        give_up = time.monotonic() + _LOCK_WAIT
        while time.monotonic() < give_up:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.2)
            except OSError:
                break
        yield
