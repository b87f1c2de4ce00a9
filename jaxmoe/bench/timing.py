"""Honest timing, the machine's own ceilings, and tables."""

from __future__ import annotations

import datetime
import functools
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

_MIN_SECONDS = 0.05


def seconds(f: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """Median time of one call of jitted or compiled ``f``: batches of about 50 ms of back-to-back calls, warmed up.

    Calls are asynchronous, so this is the device's time as long as it is above what the host needs to dispatch one
    (about 50 µs).
    """
    jax.block_until_ready(f(*args))
    start = time.perf_counter()
    jax.block_until_ready(f(*args))
    calls = min(max(1, int(_MIN_SECONDS / max(time.perf_counter() - start, 1e-6))), 2000)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        out = f(*args)
        for _ in range(calls - 1):
            out = f(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def kernel_seconds(f: Callable[..., Any], first: Any, *rest: Any, inner: int = 4, repeats: int = 5) -> float:
    """Median device time of ``f(first, *rest)`` inside one program, where the host's share of a call vanishes.

    The program runs ``f`` on ``inner`` equal copies of ``first``, one after the other, and returns every result, so
    that nothing can be merged or left out.
    """
    firsts = [jax.tree.map(jnp.copy, first) for _ in range(inner)]
    return seconds(repeated(f), firsts, *rest, repeats=repeats) / inner


@functools.lru_cache(maxsize=64)
def repeated(f: Callable[..., Any]) -> Callable[..., Any]:
    """The program of :func:`kernel_seconds`: ``f`` of each of a list of ``firsts`` and the ``rest``, in turn."""

    @jax.jit
    def run(firsts: list[Any], *rest: Any) -> list[Any]:
        outs: list[Any] = []
        for first in firsts:
            first, outs = jax.lax.optimization_barrier((first, outs))
            outs.append(f(first, *rest))
        return outs

    return run


@functools.cache
def machine() -> str:
    """One line: device, driver, versions, date."""
    device = jax.devices()[0]
    driver = "no NVIDIA driver"
    if device.platform == "gpu":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = "driver " + subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    count = len(jax.devices())
    return f"{count} x {device.device_kind}, {driver}, jax {jax.__version__}, {datetime.date.today().isoformat()}"


@functools.cache
def copy_rate() -> float:
    """Bytes per second, read plus written, of a large device-to-device copy."""
    x = jnp.zeros(1 << (30 if jax.default_backend() == "gpu" else 25), jnp.uint32).at[::4097].set(7)
    moved = jax.jit(lambda x: x ^ jnp.uint32(1))
    return 2 * x.nbytes / seconds(moved, x)


@functools.cache
def matmul_rate() -> float:
    """FLOP per second of XLA's dense bf16 8192³ product on random data."""
    a, b = (jax.random.normal(jax.random.key(i), (8192, 8192), jnp.bfloat16) for i in range(2))
    return 2 * 8192**3 / seconds(jax.jit(jnp.dot), a, b)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as aligned text; numbers to three figures."""
    cells = [list(header)] + [[_show(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "–" if value is None else str(value)
