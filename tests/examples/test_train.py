"""Training: a few steps, and what is saved in each format."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmoe


def test_a_few_steps_lower_the_loss_and_all_formats_load(example, script, tmp_path):
    steps, rate = 16, 0.003
    sizes = ("--steps", str(steps), "--layers", "2", "--batch", "2", "--length", "64", "--report", "5")
    done = script("train.py", *sizes, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", done.stdout, re.MULTILINE)]
    assert len(losses) == 5 and losses[-1] < losses[0] - 1.5
    assert re.search(r"[\d,]+ tokens/s, share of experts \(%\) \d+", done.stdout)
    found = re.search(r"^held out: ([\d.]+) nats/byte$", done.stdout, re.MULTILINE)
    assert found
    model, train = example("model"), example("train")
    _, held_out = example("corpus").corpus()
    formats = {"bf16": jaxmoe.BF16, "fp8block": jaxmoe.FP8Block, "mxfp4": jaxmoe.MXFP4}
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(formats)
    for name, fmt in formats.items():
        decoder = model.load(tmp_path / name)
        assert {block.ffn.config.weights for block in decoder.blocks} == {fmt}
        if name == "fp8block":
            loss = train.evaluate(decoder, held_out, 64)
            assert loss == pytest.approx(float(found[1]), abs=0.05), name
    # Balancing has moved the selection bias, by at most a step each time.
    bias = np.asarray(decoder.blocks[1].ffn.params.router.correction_bias)
    assert 0 < np.abs(bias).max() <= steps * rate * 1.001 and len(set(bias.tolist())) > 1
    assert decoder.blocks[0].ffn.params.router.correction_bias is None
    converted = model.load(tmp_path / "mxfp4", "FP8Block")
    assert {block.ffn.config.weights for block in converted.blocks} == {jaxmoe.FP8Block}


def test_on_a_mesh_it_is_the_same_run(example):
    """Batches and experts over devices: losses, loads and bias of one device, with all balancing."""
    train, meshes = example("train"), example("meshes")
    text, _ = example("corpus").corpus()
    flags = ["--layers", "2", "--steps", "3", "--batch", "4", "--length", "16"]
    args = train.parse(flags)

    def run(sizes):
        mesh = meshes.make(sizes)
        model, optimizer = train.setup(args, mesh)
        numbers = np.random.default_rng(0)
        steps = [
            train.train_step(model, optimizer, train.batch(text, 4, 16, numbers, mesh), 0.003, 0.01, 0.001)
            for _ in range(args.steps)
        ]
        bias = model.blocks[1].ffn.params.router.correction_bias
        return [float(loss) for loss, _ in steps], np.stack([load for _, load in steps]), np.asarray(bias)

    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        losses, loads, bias = run(None)
        found, found_loads, found_bias = run({"dp": 2, "ep": 2})
    assert losses[-1] < losses[0] and np.abs(bias).max() > 0
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    # A close choice may turn with the last bit of a logit.
    assert np.abs(found_loads - loads).max() <= 2
    np.testing.assert_allclose(found_bias, bias, rtol=0, atol=2 * 0.003)


def test_in_bf16_as_on_a_gpu_master_weights_are_f32(example, monkeypatch):
    train, meshes, model = example("train"), example("meshes"), example("model")
    monkeypatch.setattr(model, "compute_dtype", lambda: jnp.bfloat16)
    args = train.parse(["--layers", "1", "--steps", "4", "--batch", "4", "--mesh", "dp=1,ep=2"])
    mesh = meshes.make(args.mesh)
    tokens = train.batch(np.arange(64, dtype=np.int32), 4, 16, np.random.default_rng(0), mesh)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        decoder, optimizer = train.setup(args, mesh)
        losses = [float(train.train_step(decoder, optimizer, tokens, 0.003, 0.01, 0.001)[0]) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert {a.dtype for a in jax.tree.leaves(nnx.state(decoder, nnx.Param))} == {jnp.dtype(jnp.float32)}


def test_experts_run_quantised_forward_when_asked(example):
    train = example("train")
    model, _ = train.setup(train.parse(["--layers", "1", "--forward", "FP8Block"]), None)
    assert [block.ffn.execution.forward_format for block in model.blocks] == [jaxmoe.FP8Block]


def test_sizes_that_cannot_be_are_refused(example, capsys):
    train = example("train")
    with pytest.raises(SystemExit, match="2"):
        train.main(["--steps", "0"])
    assert "--steps is 0; it must be at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"--length is 1000000; it must be below the \d+ bytes held out"):
        train.main(["--length", "1000000"])
    for flags, message in (
        (["--mesh", "tp=2"], "checkpoints are written of whole experts; use dp and ep"),
        (["--mesh", "dp=3"], "--batch is 4; dp · ep = 3 must divide it"),
    ):
        with pytest.raises(SystemExit, match="2"):
            train.main(flags)
        assert message in capsys.readouterr().err
