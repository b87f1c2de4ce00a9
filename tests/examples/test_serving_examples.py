"""Putting the layer into a model, and running an exported one in a fresh process."""

from __future__ import annotations

import re
import sys

import numpy as np

from jaxmoe.cuda import ffi
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.target import target


def test_integrate_trains_dense_and_moe_blocks(script):
    done = script("integrate.py")
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^(NNX|Linen), (dense|MoE) +loss ([\d.]+) -> ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [(a, b) for a, b, *_ in losses] == [(a, b) for a in ("NNX", "Linen") for b in ("dense", "MoE")]
    for *_, first, last in losses:
        assert float(last) < 0.5 * float(first)


def test_an_exported_layer_runs_in_a_fresh_process(script, tmp_path):
    file = tmp_path / "layer.npz"
    done = script("serve_layer.py", "--export", str(file), "--tokens", "17")
    assert done.returncode == 0, done.stderr
    assert re.search(r"layer.npz: [\d,]+ bytes of program for cpu\n", done.stdout)
    done = script("serve_layer.py", "--run", str(file))
    assert done.returncode == 0, done.stderr
    assert "ms for 17 tokens" in done.stdout and "output: the same bits as at export" in done.stdout
    # An output that is not what it was is noticed.
    saved = dict(np.load(file))
    saved["y"] = saved["y"] * np.float32(1.5)
    np.savez(file, **saved)
    done = script("serve_layer.py", "--run", str(file))
    assert done.returncode == 1
    assert "output: differs by 3.3e-01 of the largest" in done.stdout


def test_mistakes_of_serving_are_told_in_a_line(example, capsys, tmp_path):
    serve = example("serve_layer")
    assert serve.main(["--run", str(tmp_path / "none.npz")]) == 1
    assert "none.npz" in capsys.readouterr().err
    assert serve.main(["--export", str(tmp_path / "a.npz"), "--layer", "0"]) == 1
    assert "hash routing takes expert ids" in capsys.readouterr().err


def test_a_program_for_a_gpu_names_its_custom_calls(example, kernels, monkeypatch, capsys, tmp_path):
    """Weights have a format that its kernels take; whoever runs the program makes every call known to XLA first."""
    serve, file, known = example("serve_layer"), tmp_path / "layer.npz", []
    with target(Arch("sm_90a", 132)):
        assert serve.main(["--export", str(file), "--tokens", "17"]) == 0, capsys.readouterr().err
    names = ("fp8_1d2d_dense", "fp8_1d2d_m_grouped_masked", "group_tokens", "permute_rows")
    calls = np.load(file)["calls"].tolist()
    assert calls == [f"jaxmoe_sm90_{name}" for name in names]
    monkeypatch.setattr(ffi, "register", known.append)
    serve.register([*calls, "jaxmoe_apart_no_graph", "mosaic_gpu_v2"])
    assert known == [*calls, "jaxmoe_apart"] and "jax.experimental.pallas.mosaic_gpu" in sys.modules
