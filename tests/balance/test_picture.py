"""The picture of the load, as text and as a file that is a PNG."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest

from jaxmoe.balance import load_bars, plot_load
from jaxmoe.errors import ShapeError


def test_bars_by_hand():
    assert load_bars([4, 0, 2, 2], width=8).splitlines() == [
        "expert 0 ████████ 4 (50.0 %)",
        "expert 1          0 (0.0 %)",
        "expert 2 ████     2 (25.0 %)",
        "expert 3 ████     2 (25.0 %)",
    ]
    lines = load_bars(np.array([30, 0, 5, 5]), ranks=2).splitlines()
    assert [line for line in lines if line.startswith("rank")] == [
        "rank 0: 30 rows, 1.50 of the mean",
        "rank 1: 10 rows, 0.50 of the mean",
    ]
    assert lines[1].startswith("expert 0 ") and lines[4].startswith("expert 2 ")
    # A little is not nothing, and nothing at all is no division by zero.
    assert "▏" in load_bars([1000, 1]).splitlines()[1]
    assert load_bars([0, 0]).endswith("0 (0.0 %)")


def test_a_png(tmp_path):
    path = plot_load(np.arange(24).reshape(3, 8), tmp_path / "load.png", ranks=4, title="three layers")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width == 960 and height > 500


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(ShapeError, match=r"the load is \[2, 2\]; it must be \[E\]"):
        load_bars([[1, 2], [3, 4]])
    with pytest.raises(ShapeError, match="3 experts do not divide over 2 ranks"):
        plot_load([1, 2, 3], tmp_path / "a.png", ranks=2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "jaxmoe\[examples\]"'):
        plot_load([1, 2, 3], tmp_path / "a.png")
