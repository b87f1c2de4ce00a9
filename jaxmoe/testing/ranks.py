"""Programs of several processes, run as what they are.

    python -m jaxmoe.testing.ranks COUNT PROGRAM ...

runs ``python PROGRAM ...`` in COUNT processes side by side, which become one ``jax.distributed`` program when each
calls :func:`join`: a GPU for each process, in turn where there are fewer, or CPUs. The tests of this repository call
it, so that ``python -m jaxmoe.testing.ranks 2 -m pytest tests/gpu/test_deepep_gpu.py`` runs them over two processes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.cuda.driver import driver
from jaxmoe.errors import BackendUnavailable

VARIABLE = "JAXMOE_RANK"
"""Port, rank and number of processes, by which :func:`join` knows who this process is."""


_PATIENCE_SECONDS = 20  # with the others, after one has failed


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code, -9 if it was killed, and what it wrote."""

    code: int
    out: str
    err: str


def run_ranks(
    arguments: Sequence[object], count: int, *, env: Mapping[str, str] | None = None, seconds: float
) -> list[Ended]:
    """Runs ``count`` Python processes side by side and ends them all, whatever happens.

    Args:
      arguments: of ``python``; what it runs calls :func:`join`.
      env: added to this process's environment.
      seconds: how long they may take; then, or a while after one has failed, those that still run are killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with contextlib.ExitStack() as stack:
        ranks, files = [], []
        for rank in range(count):
            files.append([stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)])
            own = os.environ | (env or {}) | {VARIABLE: f"{port} {rank} {count}"}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, *map(str, arguments)], env=own, stdout=files[-1][0], stderr=files[-1][1]
                )
            )
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        deadline = time.monotonic() + seconds
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.poll() for rank in ranks):
                deadline = min(deadline, time.monotonic() + _PATIENCE_SECONDS)
            time.sleep(0.05)
        for rank in ranks:
            rank.kill()
        return [Ended(rank.wait(), *map(_text, pair)) for rank, pair in zip(ranks, files, strict=True)]


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def join() -> None:
    """Makes this process one of those that :func:`run_ranks` started together; nothing, if it started none.

    To be called before JAX looks for devices. Processes that share a GPU talk through sockets, as if of other hosts,
    because NCCL refuses them otherwise.
    """
    if VARIABLE not in os.environ:
        return
    port, rank, count = map(int, os.environ[VARIABLE].split())
    gpus = _gpus()
    if not gpus:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    elif gpus < count:
        os.environ |= {"NCCL_HOSTID": f"processes {rank // gpus}", "NCCL_SOCKET_IFNAME": "lo"}
    own = [rank % gpus] if gpus else None
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, local_device_ids=own, initialization_timeout=120)


def spread(array: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """An array that every process has whole, cut over a mesh of all processes."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), array.__getitem__)


def whole(tree: Any) -> Any:
    """Arrays cut over all processes as NumPy arrays, whole on each."""
    return multihost_utils.process_allgather(tree, tiled=True)


def _gpus() -> int:
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    try:
        return driver().device_count()
    except (BackendUnavailable, RuntimeError):
        return 0


def main() -> int:
    """Prints what the first process wrote, and what the others did that failed; the worst exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="number of processes")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, help="what each runs: FILE or -m MODULE, and its arguments"
    )
    parser.add_argument("--seconds", type=float, default=3600, help="how long it may take")
    options = parser.parse_args()
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ranks = run_ranks(options.program, options.count, env=env, seconds=options.seconds)
    for rank, ended in enumerate(ranks):
        if rank == 0 or ended.code:
            print(f"-- process {rank}: exit code {ended.code}\n{ended.out}{ended.err if ended.code else ''}")
    return max(abs(ended.code) for ended in ranks)


if __name__ == "__main__":
    sys.exit(main())
