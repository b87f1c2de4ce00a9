"""Two processes of two devices each find each other's buffers through the store of jax.distributed."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).with_name("deepep_handshake.py")


def run(standin, tokens: tuple[int, int]) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(SCRIPT.parents[2]),
        "JAXMOE_LIBCUDA": standin.driver._name,
        "JAXMOE_FFI_LIBRARY": str(standin.library.path),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(port), str(rank), str(tokens[rank])],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], [err[-2000:] for _, err in said]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_tables_hold_each_others_buffers(standin):
    said = run(standin, (16, 16))
    assert said[0]["error"] is said[1]["error"] is None and said[0]["context"] == said[1]["context"] == 2
    addresses = [{int(i): a for i, a in s["own"].items()} for s in said]
    order = [*addresses[0].items(), *addresses[1].items()]
    for rank, process in enumerate(said):
        for table in process["tables"].values():
            # the driver opens a handle 4096 bytes behind what it was made of
            assert table == [a + (0 if i in addresses[rank] else 4096) for i, a in order]


def test_processes_that_make_different_contexts_say_so(standin):
    for rank, process in enumerate(run(standin, (16, 24))):
        assert "makes another context than process" in process["error"], (rank, process)
        assert "every process must make the same ones in the same order" in process["error"]
