"""Devices for the tests of an installation, and the tables of what they found."""

from __future__ import annotations

import os

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes of the tests share the GPUs

from collections.abc import Callable
from typing import Any

import jax
import pytest

Record = Callable[[str, str, str, str], None]
_PROPERTY = "jaxmoe"


def pytest_configure(config: pytest.Config) -> None:
    """Names the marks, which the repository's own configuration knows too."""
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.addinivalue_line("markers", "multigpu(n): needs n CUDA GPUs")


def gpus() -> int:
    """How many GPUs JAX sees here."""
    return jax.local_device_count() if jax.default_backend() == "gpu" else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs more GPUs than there are."""
    need = max([mark.args[0] for mark in item.iter_markers("multigpu")], default=0)
    need = need or int(item.get_closest_marker("gpu") is not None)
    if gpus() < need:
        pytest.skip(f"needs {need} CUDA GPUs, this machine has {gpus()}")


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Record:
    """``record(table, row, column, outcome)`` fills a cell."""
    return lambda *cell: record_property(_PROPERTY, list(cell))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the tables."""
    tables: dict[str, dict[str, dict[str, str]]] = {}
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == _PROPERTY:
                    name_of_table, row, column, cell = value
                    cells = tables.setdefault(name_of_table, {}).setdefault(row, {})
                    cells[column] = "FAILED" if outcome == "failed" else cell
    if not tables:
        return
    device = jax.devices()[0]
    count = f"{gpus()} × " if gpus() else ""
    terminalreporter.section(f"jaxmoe on {count}{device.device_kind}, JAX {jax.__version__}")
    for name, rows in sorted(tables.items(), reverse=True):
        for line in table(name, rows):
            terminalreporter.write_line(line)


def table(name: str, rows: dict[str, dict[str, str]]) -> list[str]:
    """Rows and columns in the order they came, and below them the reasons of refusals, each once."""
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    reasons: list[str] = []

    def cell(text: str) -> str:
        short, _, reason = text.partition(": ")
        if not reason:
            return short
        if reason not in reasons:
            reasons.append(reason)
        return f"{short} [{reasons.index(reason) + 1}]"

    body = [[row, *(cell(cells.get(column, "")) for column in columns)] for row, cells in rows.items()]
    widths = [max(len(line[i]) for line in [[name, *columns], *body]) for i in range(len(columns) + 1)]
    lines = ["  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip() for line in body]
    head = "  ".join(text.ljust(w) for text, w in zip([name, *columns], widths, strict=True)).rstrip()
    return [head, *lines, *(f"[{n}] {reason}" for n, reason in enumerate(reasons, 1))]
