"""What ran on the device while a program ran: every kernel, whose it was, and how long nothing ran."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterable
from typing import Any

import jax

_METADATA = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{[^}]*op_name="([^"]*)"', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill of a program, in order of its start.

    Attributes:
      name: the kernel's own. op: the HLO instruction that launched it, "" where the profiler does not say.
      scope: ``jax.named_scope`` path and primitive it came from, "" where unknown.
      start, seconds: since the program's first kernel began, and its own time.
    """

    name: str
    op: str
    scope: str
    start: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """One call of a program: the one of median length among those traced.

    Attributes:
      kernels: all that ran on the device.
      span: seconds from the first kernel's start to the last one's end.
    """

    kernels: tuple[Kernel, ...]
    span: float

    @property
    def busy(self) -> float:
        """Seconds in which something ran."""
        busy, end = 0.0, 0.0
        for kernel in self.kernels:
            stop = kernel.start + kernel.seconds
            busy += max(0.0, stop - max(end, kernel.start))
            end = max(end, stop)
        return busy

    @property
    def idle(self) -> float:
        """Seconds between the first start and the last end in which nothing ran."""
        return self.span - self.busy

    def by_room(self, rooms: Iterable[str]) -> dict[str, float]:
        """Seconds by the first of ``rooms`` that is a component of a kernel's scope; "other" holds the rest."""
        wanted = tuple(rooms)
        total: dict[str, float] = dict.fromkeys((*wanted, "other"), 0.0)
        for kernel in self.kernels:
            parts = kernel.scope.split("/")
            total[next((part for part in parts if part in wanted), "other")] += kernel.seconds
        return total


SEPARATE = {"xla_gpu_enable_command_buffer": ""}
"""Compiler options for a program whose kernels are launched one by one, in no command buffer."""


def trace(f: Any, *args: Any, calls: int = 3) -> Trace:
    """:func:`trace_compiled` of jitted ``f``, compiled with :data:`SEPARATE`."""
    return trace_compiled(f.lower(*args).compile(SEPARATE), *args, calls=calls)


def trace_compiled(compiled: Any, *args: Any, calls: int = 3) -> Trace:
    """Traces ``calls`` calls of a compiled program on the first GPU, each by itself.

    Compiled as XLA does by default, kernels run in command buffers, and the profiler does not say which instruction one
    belongs to: scopes are unknown. Compiled with :data:`SEPARATE` they are known, but launches by a host that is being
    traced leave gaps that the program does not have otherwise.

    Args:
      compiled, args: the program. calls: how many; the one of median length is returned.

    Raises:
      RuntimeError: the profiler saw no kernel: this is not a GPU, or it has no right to trace.
    """
    scopes = dict(_METADATA.findall(compiled.as_text()))
    jax.block_until_ready(compiled(*args))
    runs = sorted((_one(compiled, args, scopes) for _ in range(calls)), key=lambda run: run.span)
    return runs[calls // 2]


def device_seconds(f: Any, *args: Any) -> float:
    """Seconds in which the first GPU works on a call of ``f``: of short kernels, that the host would bound.

    Raises:
      RuntimeError: see :func:`trace`.
    """
    return trace(jax.jit(f), *args).busy


def _one(compiled: Any, args: tuple[Any, ...], scopes: dict[str, str]) -> Trace:
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready(compiled(*args))
        (file,) = pathlib.Path(directory).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    events = [
        event
        for plane in data.planes
        if plane.name == "/device:GPU:0"
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    if not events:
        raise RuntimeError("the profiler saw no kernel; it needs a GPU and the right to trace it (CUPTI)")
    first = min(event.start_ns for event in events)
    kernels = []
    for event in sorted(events, key=lambda event: event.start_ns):
        op = str(_stats(event).get("hlo_op", ""))
        start, seconds = (event.start_ns - first) * 1e-9, event.duration_ns * 1e-9
        kernels.append(Kernel(event.name, op, scopes.get(op, ""), start, seconds))
    return Trace(tuple(kernels), max(kernel.start + kernel.seconds for kernel in kernels))


def _stats(event: Any) -> dict[str, Any]:
    with warnings.catch_warnings():  # jaxlib's binding of this type lacks a __module__
        warnings.simplefilter("ignore", DeprecationWarning)
        return dict(event.stats)
