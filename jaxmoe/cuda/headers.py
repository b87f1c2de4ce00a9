"""Finds the device headers that kernels are compiled from: those of the DeepGEMM and DeepEP wheels, CUDA's and CCCL's.

The wheels are located through their metadata and never imported: importing them would import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterable
from pathlib import Path

from jaxmoe.cuda.source import Package
from jaxmoe.errors import BackendUnavailable

WHEEL = "sgl-deep-gemm"
WHEEL_VERSION = "0.1.4.post1"
# Hash of its include tree, the same in the x86_64 and aarch64 wheels. Another version has other kernel arguments.
WHEEL_TREE = "8083cd4c81013807c94eb199da693d96abed3f367fd9a59a6a1b25137ea143fd"
EP_WHEEL = "sgl-deep-ep"
EP_WHEEL_VERSION = "0.1.2.post1"
EP_WHEEL_TREE = "4558f646cb6037e45dc810c346dc0ce7a10dca95e82b81f47fc3a4877de96af0"
SHIMS = Path(__file__).parent / "shims"
PRELUDE = "jaxmoe_prelude.h"
INSTALL = 'pip install "jaxmoe[cuda13]"'
# Without its dependencies: they are torch, which the headers do not need.
EP_INSTALL = f"pip install --no-deps {EP_WHEEL}=={EP_WHEEL_VERSION}"


@dataclasses.dataclass(frozen=True)
class Found:
    """One part of the toolchain.

    Attributes:
      path: include directory or library file.
      version: as people write it.
      digest: what the cache key takes for this part.
    """

    path: Path
    version: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Headers:
    """All headers, ready for a compiler.

    Attributes:
      include: directories in search order.
      overrides: (include name, text) of headers handed over in memory instead of the file of that name.
      digest: changes whenever a cubin might.
    """

    include: tuple[Path, ...]
    overrides: tuple[tuple[str, str], ...]
    digest: str


def find_deep_gemm(memo_dir: Path | None = None) -> Found:
    """Finds the wheel's include directory and checks that it is the pinned one.

    Args:
      memo_dir: where the tree's hash is remembered, so that 28 MB need not be read at every start.

    Raises:
      BackendUnavailable: absent, of another version, or overwritten by another package of the same import name.
    """
    repair = f'pip install --force-reinstall --no-deps "{WHEEL}=={WHEEL_VERSION}"'
    return _find_wheel(WHEEL, WHEEL_VERSION, WHEEL_TREE, "deep_gemm", INSTALL, repair, memo_dir)


def find_deep_ep(memo_dir: Path | None = None) -> Found:
    """Finds the include directory of DeepEP's wheel and checks that it is the pinned one.

    Args:
      memo_dir: where the tree's hash is remembered.

    Raises:
      BackendUnavailable: as :func:`find_deep_gemm`.
    """
    repair = EP_INSTALL.replace("install", "install --force-reinstall")
    return _find_wheel(EP_WHEEL, EP_WHEEL_VERSION, EP_WHEEL_TREE, "deep_ep", EP_INSTALL, repair, memo_dir)


def _find_wheel(
    name: str, version: str, tree: str, package: Package, install: str, repair: str, memo_dir: Path | None
) -> Found:
    pin = f"{name}=={version}"
    try:
        wheel = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise BackendUnavailable(f"the kernel headers of {pin} are not installed; run: {install}") from None
    if wheel.version != version:
        command = f'pip install "{pin}"' if install == INSTALL else install
        raise BackendUnavailable(
            f"{name} is {wheel.version}, whose kernels take other arguments than {version}; run: {command}"
        )
    include = Path(str(wheel.locate_file(f"{package}/include")))
    if not include.is_dir():
        raise BackendUnavailable(f"{pin} is installed but {include} is not there; run: {repair}")
    digest = tree_hash(include, memo_dir)
    if digest != tree:
        raise BackendUnavailable(
            f"the headers in {include} are not those of {pin} (hash {digest[:12]}, expected {tree[:12]}): "
            f"another package that provides {package} has overwritten them; run: {repair}"
        )
    return Found(include, wheel.version, digest)


def find_cuda() -> Found:
    """Finds the CUDA runtime headers in the wheels, then in CUDA_HOME, CUDA_PATH and /usr/local/cuda.

    Raises:
      BackendUnavailable: absent or older than CUDA 13.
    """
    path = _first("cuda_runtime_api.h", "the CUDA runtime headers (nvidia-cuda-runtime)")
    number = _macro(path / "cuda_runtime_api.h", "CUDART_VERSION")
    version = f"{number // 1000}.{number % 1000 // 10}"
    if number < 13000:
        raise BackendUnavailable(
            f"the CUDA headers in {path} are {version}; 13.0 or newer is needed; "
            'run: pip install "nvidia-cuda-runtime>=13.0"'
        )
    return Found(path, version, f"cuda {number}")


def find_cccl() -> Found:
    """Finds CCCL (libcu++) in the same places; the path is the directory that holds ``cccl/``.

    Raises:
      BackendUnavailable: absent.
    """
    header = "cccl/cuda/std/__cccl/version.h"
    path = _first(header, "the CCCL headers (nvidia-cuda-cccl)")
    number = _macro(path / header, "CCCL_VERSION")
    # CCCL 3.x is what CUDA 13.x ships.
    return Found(path, f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}", f"cccl {number}")


def find_headers(memo_dir: Path | None = None, package: Package = "deep_gemm") -> Headers:
    """Finds everything that a package's kernels include and puts it in search order.

    Raises:
      BackendUnavailable: a part is missing or wrong; the message holds the command that repairs it.
    """
    find = find_deep_gemm if package == "deep_gemm" else find_deep_ep
    wheel, cuda, cccl = find(memo_dir), find_cuda(), find_cccl()
    shims = SHIMS / package
    # The directory of cccl/ comes before CUDA's, which may hold another one: the two must not mix.
    include = (shims, wheel.path, cccl.path, cccl.path / "cccl", cuda.path)
    if package == "deep_ep":
        overrides = combine_overrides(wheel.path)
    else:
        overrides = cute_overrides(wheel.path) if needs_overrides(cccl) else ()
    parts = (tree_hash(shims), wheel.digest, cuda.digest, cccl.digest, *(text for _, text in overrides))
    return Headers(tuple(dict.fromkeys(include)), overrides, hashlib.sha256("\0".join(parts).encode()).hexdigest())


def needs_overrides(cccl: Found) -> bool:
    """Whether this CCCL clashes with CuTe's own declarations (CCCL 3.2 and newer, shipped as 13.2)."""
    return tuple(map(int, cccl.version.split("."))) >= (3, 2)


_VARIADIC = re.compile(r"(template\s*<[^<>]*\bclass)\s*\.\.\.(\s*\w+\s*>\s*struct\s+tuple_(?:size|element)\s*;)")


def cute_overrides(include: Path) -> tuple[tuple[str, str], ...]:
    """Returns the CuTe headers that declare ``tuple_size`` and ``tuple_element``, with one type parameter each.

    For NVRTC alone, CuTe declares both as variadic templates in ``std``. CCCL from 3.2 on declares them there with a
    single type parameter, and the compiler rejects the pair.
    """
    changed = []
    for path in sorted((include / "cute").rglob("*.hpp")):
        text, count = _VARIADIC.subn(r"\1\2", path.read_text(encoding="utf-8"))
        if count:
            changed.append((path.relative_to(include).as_posix(), text))
    return tuple(changed)


_LOAD_FIRST = re.compile(
    r"^( *ptx::tma_load_1d\(.*\);\n)( *ptx::mbarrier_arrive_and_set_tx\(mbarrier_ptr, kNumHiddenBytes\);\n)",
    re.MULTILINE,
)


def combine_overrides(include: Path) -> tuple[tuple[str, str], ...]:
    """Returns DeepEP's combine header with each barrier told what is to come before the copy that brings it starts.

    As shipped it is told after, which is allowed. But in the last, unpaired iteration of the loop ptxas 13.0.88 gives
    both instructions one scoreboard and polls the barrier without waiting for it: as soon as more than four warps of
    an SM got there, an H200 raised "out-of-range address" at the copy. This order compiles to other code.
    """
    name = "deep_ep/impls/combine.cuh"
    text, count = _LOAD_FIRST.subn(r"\2\1", (include / name).read_text(encoding="utf-8"))
    assert count == 2, count  # the tree is the pinned one
    return ((name, text),)


def tree_hash(root: Path, memo_dir: Path | None = None) -> str:
    """Returns the SHA-256 over a file, or over the names and contents of all files below a directory.

    Args:
      root: file or directory.
      memo_dir: where the result is remembered under the files' names, times and sizes. Not being able to write there
        is no error.
    """
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    stats = [(path, path.stat()) for path in files]
    stamp = _digest(f"{path} {stat.st_mtime_ns} {stat.st_size}" for path, stat in stats)
    memo = None if memo_dir is None else memo_dir / f"tree-{stamp[:32]}"
    if memo is not None:
        try:
            known = memo.read_text()
            if re.fullmatch("[0-9a-f]{64}", known):
                return known
        except (OSError, UnicodeDecodeError):
            pass
    lines = []
    for path in files:
        with path.open("rb") as file:
            lines.append(f"{path.relative_to(root).as_posix()} {hashlib.file_digest(file, 'sha256').hexdigest()}")
    result = _digest(lines)
    if memo is not None:
        part = memo.with_name(f"{memo.name}.{os.getpid()}.part")
        try:
            memo.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(result)
            part.replace(memo)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
    return result


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _roots() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place) / "cu13" / "include" for place in (spec and spec.submodule_search_locations) or ()]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return roots + [Path(home) / "include" for home in homes if home]


def _first(header: str, what: str) -> Path:
    roots = _roots()
    for root in roots:
        if (root / header).is_file():
            return root
    raise BackendUnavailable(f"{what} are not in {', '.join(map(str, roots))}; run: {INSTALL}")


def _macro(path: Path, name: str) -> int:
    found = re.search(
        rf"^\s*#\s*define\s+{name}\s+(\d+)", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
    )
    if found is None:
        raise BackendUnavailable(f"{path} does not define {name}; the headers are damaged; run: {INSTALL}")
    return int(found[1])
