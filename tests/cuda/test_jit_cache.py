"""The cubin cache: nothing is compiled twice, nothing damaged is used, processes may race, errors say the way out."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmoe.cuda import cubin_cache, jit
from jaxmoe.cuda.source import KernelSource
from jaxmoe.errors import BackendUnavailable, CacheError, KernelCompileError


def tiny(i: int) -> KernelSource:
    return KernelSource(f"tiny{i}", "sm_90a", f"__global__ void tiny(int* p) {{ *p = {i}; }}\n")


@pytest.fixture
def cache(tmp_path, monkeypatch, toolchain) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("JAXMOE_CACHE_DIR", str(directory))
    monkeypatch.setattr(jit, "find_toolchain", lambda memo_dir=None, package="deep_gemm": toolchain)
    return directory


def forbid_compiling(monkeypatch) -> None:
    def compile_many(sources, **_):
        raise AssertionError(f"compiles {[source.name for source in sources]}")

    monkeypatch.setattr(jit, "compile_many", compile_many)


def test_a_second_request_compiles_nothing(cache, monkeypatch):
    keys = cubin_cache.ensure([tiny(0), tiny(1), tiny(0)])
    assert [*keys] == [tiny(0), tiny(1)] and len(set(keys.values())) == 2
    for key in keys.values():
        path = cubin_cache.lookup(key)
        assert path == cache / f"{key}.cubin" and len(jit.kernel_names(path.read_bytes())) == 1
    forbid_compiling(monkeypatch)
    assert cubin_cache.ensure([tiny(1), tiny(0)]) == keys
    assert cubin_cache.ensure([]) == {}


def test_the_record_says_what_a_cubin_is(cache, toolchain):
    (key,) = cubin_cache.ensure([tiny(0)]).values()
    (record,) = cubin_cache.records()
    assert {name: record[name] for name in ("key", "name", "arch", "nvrtc")} == {
        "key": key,
        "name": "tiny0",
        "arch": "sm_90a",
        "nvrtc": toolchain.nvrtc.version,
    }
    assert [path.name.split(".")[1] for path in cache.glob("*.json")] == [record["sha256"]]
    assert record["bytes"] == (cache / f"{key}.cubin").stat().st_size


def test_only_what_changes_a_cubin_changes_its_key(toolchain):
    other = dataclasses.replace(toolchain, nvrtc=dataclasses.replace(toolchain.nvrtc, digest="other"))
    keys = {
        cubin_cache.key_of(tiny(0), toolchain),
        cubin_cache.key_of(tiny(1), toolchain),
        cubin_cache.key_of(dataclasses.replace(tiny(0), arch="sm_100f"), toolchain),
        cubin_cache.key_of(tiny(0), other),
    }
    assert len(keys) == 4
    assert cubin_cache.key_of(dataclasses.replace(tiny(0), name="renamed"), toolchain) in keys


def test_equal_code_under_two_names_is_one_cubin(cache):
    renamed = dataclasses.replace(tiny(0), name="renamed")
    keys = cubin_cache.ensure([tiny(0), renamed])
    assert keys[tiny(0)] == keys[renamed] and len([*cache.glob("*.cubin")]) == 1


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "no record"])
def test_damage_is_said_once_and_repaired(cache, damage):
    (key,) = cubin_cache.ensure([tiny(0)]).values()
    path = cache / f"{key}.cubin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "no record":
        (record,) = cache.glob(f"{key}.*.json")
        record.unlink()
    else:
        path.write_bytes({"flip": data, "truncate": data[:-1], "empty": b""}[damage])
    with pytest.warns(RuntimeWarning, match=f"{key}.cubin is damaged") as warned:
        cubin_cache.ensure([tiny(0)])
    assert len(warned) == 1
    assert cubin_cache.lookup(key) == path and len(jit.kernel_names(path.read_bytes())) == 1


def test_an_unknown_key_is_absent(cache):
    assert cubin_cache.lookup("0" * 40) is None
    assert cubin_cache.records() == []


def test_foreign_files_are_no_records(cache):
    cubin_cache.ensure([tiny(0)])
    for name, text in (("a.json", "{"), ("b.json", "[]"), ("c.json", '{"key": "x"}'), ("d.json", '{"key": 1}')):
        (cache / name).write_text(text)
    assert [record["name"] for record in cubin_cache.records()] == ["tiny0"]


def test_processes_that_race_end_with_one_intact_set(tmp_path, toolchain):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_jit_cache import tiny\nfrom jaxmoe.cuda import cubin_cache\n"
        "print(*sorted(cubin_cache.ensure([tiny(i) for i in range(3)], workers=1).values()))"
    )
    environment = os.environ | {
        "JAXMOE_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONWARNINGS": "error",
    }
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    answers = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * 4, answers
    assert len({out for out, _ in answers}) == 1
    assert len([*tmp_path.glob("*.cubin")]) == 3
    assert len([*tmp_path.glob("*.json")]) == 3  # each was compiled once: the others waited
    assert not [*tmp_path.glob(".*.part")]


def test_two_writers_without_a_lock_leave_an_intact_cubin(cache, toolchain):
    key = cubin_cache.key_of(tiny(0), toolchain)
    for cubin in (b"first", b"second", b"first"):
        cubin_cache._store(key, tiny(0), cubin, toolchain)
        assert cubin_cache.lookup(key) is not None
    assert len([*cache.glob(f"{key}.*.json")]) == 2


def test_what_compiled_is_kept_when_another_fails(cache):
    broken = KernelSource("broken", "sm_90a", "int broken() { return }\n")
    with pytest.raises(KernelCompileError, match="broken"):
        cubin_cache.ensure([broken, tiny(0)])
    assert [record["name"] for record in cubin_cache.records()] == ["tiny0"]


def test_a_cache_from_elsewhere_runs_without_a_compiler(cache, monkeypatch):
    keys = cubin_cache.ensure([tiny(0)])

    def missing(memo_dir=None, package="deep_gemm"):
        raise BackendUnavailable("NVRTC is missing; run: pip install x")

    monkeypatch.setattr(jit, "find_toolchain", missing)
    forbid_compiling(monkeypatch)
    assert cubin_cache.ensure([tiny(0)]) == keys
    with pytest.raises(
        BackendUnavailable, match=r"tiny1 for sm_90a is not in .*cache.*NVRTC is missing; run: pip install x"
    ):
        cubin_cache.ensure([tiny(0), tiny(1)])
    (cache / f"{keys[tiny(0)]}.cubin").write_bytes(b"damaged")
    with pytest.raises(BackendUnavailable, match="tiny0"):
        cubin_cache.ensure([tiny(0)])


def test_a_read_only_cache_serves_what_it_holds(cache):
    keys = cubin_cache.ensure([tiny(0)])
    cache.chmod(0o555)
    user = os.geteuid()
    if user == 0:  # who may write everywhere
        for parent in cache.parents[:4]:
            parent.chmod(parent.stat().st_mode | 0o011)
        os.seteuid(65534)
    try:
        assert cubin_cache.ensure([tiny(0)]) == keys
        with pytest.raises(
            CacheError, match=r"Permission denied.*make it readable and writable, or set JAXMOE_CACHE_DIR"
        ):
            cubin_cache.ensure([tiny(1)])
    finally:
        os.seteuid(user)
        cache.chmod(0o755)


def test_a_file_in_place_of_the_directory(cache):
    cache.write_text("")
    with pytest.raises(CacheError, match="cannot be used"):
        cubin_cache.ensure([tiny(0)])


def test_a_full_disk_leaves_nothing_half_written(cache, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match=r"No space left on device.*free some space, or set JAXMOE_CACHE_DIR"):
        cubin_cache.ensure([tiny(0)])
    assert not [*cache.glob("*.cubin"), *cache.glob("*.json"), *cache.glob(".*.part")]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JAXMOE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cubin_cache.directory() == tmp_path / ".cache/jaxmoe"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cubin_cache.directory() == tmp_path / "xdg/jaxmoe"
    monkeypatch.setenv("JAXMOE_CACHE_DIR", "~/own")
    assert cubin_cache.directory() == tmp_path / "own"
