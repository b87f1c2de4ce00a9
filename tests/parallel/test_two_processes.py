"""Attention DP × EP over two processes of two devices each: jax.distributed, collectives by gloo."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).with_name("two_processes.py")
SECONDS = 240


def test_two_processes_give_what_one_gives():
    """Output and all gradients; 4 devices, 2 experts each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(SCRIPT.parents[2]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(port), str(rank)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, text in zip(ranks, said, strict=True):
        assert rank.returncode == 0 and "equal 7" in text, text
