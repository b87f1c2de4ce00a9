"""Copies of hot experts in the shipped model: the same losses, fuller ranks relieved."""

from __future__ import annotations

import re

import numpy as np


def test_before_and_after_are_shown(example, capsys, tmp_path):
    balance = example("balance")
    assert balance.main(["--sequences", "8", "--redundant", "8", "--png", str(tmp_path / "load.png")]) == 0
    out = capsys.readouterr().out
    before, after = re.search(r"^loss ([\d.]+) before, ([\d.]+) after 8 copies on 4 ranks$", out, re.MULTILINE).groups()
    assert abs(float(before) - float(after)) <= 2e-4
    layers = re.findall(
        r"^layer \d: the fullest rank has ([\d.]+) of the mean before, ([\d.]+) after", out, re.MULTILINE
    )
    assert len(layers) == 4
    assert np.mean([float(a) for _, a in layers]) < np.mean([float(b) for b, _ in layers])
    assert len(re.findall(r"^rank \d: \d+ rows", out, re.MULTILINE)) == 4 * 2 * 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["load.after.png", "load.before.png"]


def test_mistakes_are_told_in_a_line(example, capsys):
    assert example("balance").main(["--sequences", "2", "--redundant", "3"]) == 1
    assert "use 4 redundant places" in capsys.readouterr().err
