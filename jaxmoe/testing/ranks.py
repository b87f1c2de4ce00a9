"""Programs of several processes, run as what they are."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str


def run_ranks(
    arguments: Callable[[int, int], Sequence[object]], count: int, *, env: Mapping[str, str], seconds: float
) -> list[Ended]:
    """Runs ``count`` Python processes side by side and ends them all, whatever happens.

    Args:
      arguments: of ``python``, from a free port on this machine and the rank.
      env: added to this process's environment.
      seconds: how long each may take.

    Raises:
      subprocess.TimeoutExpired: one took longer.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments(port, rank))],
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [rank.communicate(timeout=seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [Ended(rank.returncode, *text) for rank, text in zip(ranks, said, strict=True)]
