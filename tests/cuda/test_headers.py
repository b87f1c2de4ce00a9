"""Finding the headers: the pinned wheel without importing it, CUDA, CCCL, and what each missing part says."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from jaxmoe.cuda import headers
from jaxmoe.errors import BackendUnavailable


def cuda_tree(root: Path, *, cuda: int = 13000, cccl: int | None = 3000001) -> Path:
    """An include directory that says these versions."""
    root.mkdir(parents=True)
    (root / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {cuda}\n")
    if cccl is not None:
        (root / "cccl/cuda/std/__cccl").mkdir(parents=True)
        (root / "cccl/cuda/std/__cccl/version.h").write_text(
            f"#define CCCL_VERSION {cccl}\n#define CCCL_MAJOR_VERSION 3\n"
        )
    return root


def fake_wheel(monkeypatch, root: Path, version: str = headers.WHEEL_VERSION) -> None:
    wheel = types.SimpleNamespace(version=version, locate_file=lambda name: root / name)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: wheel)


def test_the_wheel_is_found_and_never_imported(toolchain):
    found = headers.find_deep_gemm()
    assert found.version == "0.1.4.post1" and found.digest == headers.WHEEL_TREE
    assert (found.path / "deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh").is_file()
    code = "import sys; from jaxmoe.cuda import headers; headers.find_headers(); print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert not {"deep_gemm", "torch", "tvm_ffi"} & set(done.stdout.split())


def test_an_absent_wheel_says_what_to_install(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(BackendUnavailable, match=r'sgl-deep-gemm==0\.1\.4\.post1 .*pip install "jaxmoe\[cuda13\]"'):
        headers.find_deep_gemm()


def test_deep_ep_is_installed_without_its_dependencies(monkeypatch, tmp_path):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    command = r"pip install --no-deps sgl-deep-ep==0\.1\.2\.post1$"
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(BackendUnavailable, match=f"are not installed; run: {command}"):
        headers.find_deep_ep()
    fake_wheel(monkeypatch, tmp_path, "0.2.0")
    with pytest.raises(BackendUnavailable, match=rf"sgl-deep-ep is 0\.2\.0.*; run: {command}"):
        headers.find_deep_ep()
    (tmp_path / "deep_ep/include").mkdir(parents=True)
    fake_wheel(monkeypatch, tmp_path, headers.EP_WHEEL_VERSION)
    with pytest.raises(BackendUnavailable, match=r"are not those of sgl-deep-ep.*--force-reinstall --no-deps"):
        headers.find_deep_ep()


def test_another_version_is_refused(monkeypatch, tmp_path):
    fake_wheel(monkeypatch, tmp_path, "0.2.5")
    with pytest.raises(BackendUnavailable, match=r'is 0\.2\.5.*pip install "sgl-deep-gemm==0\.1\.4\.post1"'):
        headers.find_deep_gemm()


def test_missing_files_are_refused(monkeypatch, tmp_path):
    fake_wheel(monkeypatch, tmp_path)
    with pytest.raises(BackendUnavailable, match="is not there; run: pip install --force-reinstall --no-deps"):
        headers.find_deep_gemm()


def test_overwritten_headers_are_refused(monkeypatch, tmp_path, toolchain):
    copy = tmp_path / "deep_gemm/include"
    shutil.copytree(headers.find_deep_gemm().path, copy)
    fake_wheel(monkeypatch, tmp_path)
    assert headers.find_deep_gemm().digest == headers.WHEEL_TREE
    with (copy / "deep_gemm/impls/sm90_bf16_gemm.cuh").open("a") as file:
        file.write("\n")
    with pytest.raises(BackendUnavailable, match="another package that provides deep_gemm has overwritten them"):
        headers.find_deep_gemm()


def test_cuda_and_cccl_in_cuda_home(monkeypatch, tmp_path):
    monkeypatch.setattr(headers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    include = cuda_tree(tmp_path / "cuda/include", cuda=13020, cccl=3001004)
    assert headers.find_cuda() == headers.Found(include, "13.2", "cuda 13020")
    assert headers.find_cccl() == headers.Found(include, "3.1.4", "cccl 3001004")


def test_wheels_come_before_cuda_home(monkeypatch, tmp_path):
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(headers.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    cuda_tree(tmp_path / "cuda/include", cuda=13020)
    wheel = cuda_tree(tmp_path / "nvidia/cu13/include")
    assert headers.find_cuda().path == headers.find_cccl().path == wheel


@pytest.mark.parametrize(
    "find, package", [(headers.find_cuda, "nvidia-cuda-runtime"), (headers.find_cccl, "nvidia-cuda-cccl")]
)
def test_absent_headers_name_the_package(monkeypatch, tmp_path, find, package):
    monkeypatch.setattr(headers, "_roots", lambda: [tmp_path])
    with pytest.raises(BackendUnavailable, match=rf"{package}.*{re.escape(str(tmp_path))}; run: pip install"):
        find()


def test_cuda_12_is_refused(monkeypatch, tmp_path):
    include = cuda_tree(tmp_path / "include", cuda=12090)
    monkeypatch.setattr(headers, "_roots", lambda: [include])
    with pytest.raises(BackendUnavailable, match=r"are 12\.9; 13\.0 or newer"):
        headers.find_cuda()


def test_a_header_without_a_version_is_refused(monkeypatch, tmp_path):
    include = cuda_tree(tmp_path / "include")
    (include / "cuda_runtime_api.h").write_text("")
    monkeypatch.setattr(headers, "_roots", lambda: [include])
    with pytest.raises(BackendUnavailable, match="does not define CUDART_VERSION"):
        headers.find_cuda()


def test_cccl_shadows_the_one_beside_cuda(monkeypatch, tmp_path, toolchain):
    newer, older = cuda_tree(tmp_path / "a", cccl=3005000), cuda_tree(tmp_path / "b")
    (newer / "cuda_runtime_api.h").unlink()
    monkeypatch.setattr(headers, "_roots", lambda: [newer, older])
    found = headers.find_headers()
    assert found.include[2:] == (newer, newer / "cccl", older)
    assert found.digest != toolchain.headers.digest


@pytest.mark.parametrize(
    "version, needed", [("3.0.1", False), ("3.1.4", False), ("3.2.0", True), ("3.5.0", True), ("4.0.0", True)]
)
def test_which_cccl_needs_overrides(version, needed):
    assert headers.needs_overrides(headers.Found(Path(), version, "")) is needed


def test_overrides_change_two_declarations_of_five_headers(toolchain):
    include = headers.find_deep_gemm().path
    overrides = dict(headers.cute_overrides(include))
    assert set(overrides) == {
        "cute/container/array.hpp",
        "cute/container/array_subbyte.hpp",
        "cute/container/tuple.hpp",
        "cute/container/type_list.hpp",
        "cute/numeric/arithmetic_tuple.hpp",
    }
    for name, text in overrides.items():
        before = (include / name).read_text().splitlines()
        changed = [pair for pair in zip(before, text.splitlines(), strict=True) if pair[0] != pair[1]]
        assert len(changed) == 2
        assert all(old.replace("...", "") == new and "..." in old for old, new in changed)


def test_tree_hash_sees_names_and_contents(tmp_path):
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "sub/a.h").write_text("one")
    first = headers.tree_hash(root)
    (root / "sub/a.h").rename(root / "a.h")
    renamed = headers.tree_hash(root)
    (root / "a.h").write_text("two")
    assert len({first, renamed, headers.tree_hash(root), headers.tree_hash(root / "a.h")}) == 4


def test_tree_hash_is_remembered_until_a_file_changes(tmp_path):
    root, memo = tmp_path / "tree", tmp_path / "memo"
    root.mkdir()
    (root / "a.h").write_text("one")
    true = headers.tree_hash(root, memo)
    (kept,) = memo.iterdir()
    kept.write_text("0" * 64)
    assert headers.tree_hash(root, memo) == "0" * 64
    kept.write_text("torn")
    assert headers.tree_hash(root, memo) == true
    kept.write_text("0" * 64)
    (root / "a.h").write_text("three")
    assert headers.tree_hash(root, memo) not in ("0" * 64, true)


def test_tree_hash_lives_without_a_place_to_remember(tmp_path):
    root, memo = tmp_path / "tree", tmp_path / "file"
    root.mkdir()
    memo.write_text("not a directory")
    assert headers.tree_hash(root, memo) == headers.tree_hash(root)
