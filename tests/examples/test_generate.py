"""Generation from the shipped checkpoint."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx


def test_one_program_serves_prompts_temperatures_and_seeds(example):
    model, generate = example("model"), example("generate")
    config = model.ModelConfig(hidden=32, intermediate=32, layers=1, heads=2, experts=4)
    decoder = model.Decoder(config, nnx.Rngs(3))

    def run(prompt, temperature, seed):
        tokens, length = generate.encode(prompt)
        text, count, load = generate.generate(
            decoder, tokens, length, jnp.float32(temperature), jax.random.key(seed), count=24
        )
        assert load.sum(axis=1).tolist() == [2 * (int(length) + int(count) - 1)]
        np.testing.assert_array_equal(text[count:], model.END)
        return text[:count].tolist()

    before = generate.generate._cache_size()
    assert run("with", 0.8, 1) == run("with", 0.8, 1) != run("with", 0.8, 2)
    greedy = run("with", 0.0, 1)
    assert greedy == run("with", 0.0, 2) != run("A longer prompt", 0.0, 2)
    # An embedding so large that END follows END: the text ends at once.
    decoder.embed.embedding[...] = decoder.embed.embedding[...].at[model.END].multiply(100.0)
    assert run("", 0.0, 1) == [model.END]
    assert generate.generate._cache_size() == before + 1


def test_prompts_are_padded_to_few_widths(example):
    generate, end = example("generate"), example("model").END
    for prompt, width in (("", 64), ("a" * 63, 64), ("a" * 64, 128), ("é" * 32, 128)):
        tokens, length = generate.encode(prompt)
        assert tokens.shape == (1, width) and int(length) == len(prompt.encode()) + 1
        assert generate.decode(tokens[0]) == prompt
        assert tokens[0, 0] == end


def test_the_script_prints_text_speed_and_load_and_the_same_again(script):
    def run(*args):
        done = script("generate.py", "--tokens", "32", "--prompt", "The import statement", *args)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("tiny_pydoc_mxfp4: jaxmoe.MXFP4 experts on ")
        continued = re.search(r"\n\nThe import statement(.*)\n\n\d+ tokens in ", done.stdout, re.DOTALL)
        assert continued
        return continued[1], done.stdout

    text, out = run()
    # Words, mostly.
    assert len(re.findall(r"[a-z]{2,}", text)) >= 3
    assert re.search(r"\n\d+ tokens in [\d.]+ s: \d+ tokens/s, compiled in [\d.]+ s\n", out)
    layers = re.findall(r"layer \d: (\d+) choices of an expert\n((?:expert \d .* \d+ \([\d.]+ %\)\n){8})", out + "\n")
    assert len(layers) == 4
    for choices, bars in layers:
        counts = [int(n) for n in re.findall(r" (\d+) \(", bars)]
        assert sum(counts) == int(choices) and int(choices) % 2 == 0 and "█" in bars
    assert run()[0] == text


def test_on_a_mesh_it_is_the_same_text(script, tmp_path):
    """Tokens and experts cut: sums over devices round otherwise, which greedy text is stable against."""

    def run(*args):
        done = script("generate.py", "--tokens", "32", "--prompt", "The import statement", "--temperature", "0", *args)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n\n")[1], done.stdout

    text, _ = run()
    found, out = run("--mesh", "dp=2,ep=2", "--png", str(tmp_path / "load.png"))
    assert (tmp_path / "load.png").read_bytes()[:4] == b"\x89PNG"
    assert found == text and "experts on 4 × cpu" in out
    assert len(re.findall(r"^rank [01]: \d+ rows, [\d.]+ of the mean$", out, re.MULTILINE)) == 2 * 4


def test_mistakes_are_told_in_a_line(example, capsys, tmp_path):
    generate = example("generate")
    assert generate.main(["--checkpoint", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
    assert generate.main(["--mesh", "dp=64"]) == 1
    assert "--mesh needs 64 devices; there are 8 of platform cpu" in capsys.readouterr().err
    for wrong in ("dp", "dp=0", "pp=2", "dp=2,dp=2"):
        with pytest.raises(SystemExit):
            generate.main(["--mesh", wrong])
        assert "is not a list of axes among dp, ep, tp, as in dp=2,ep=2" in capsys.readouterr().err
    other = generate.SHIPPED.parent / "deepseek_v4_fp4"
    (tmp_path / "config.json").write_text("{}")
    assert generate.main(["--checkpoint", str(tmp_path)]) == 1
    assert "lacks 'vocab_size'; is it a checkpoint of examples/train.py?" in capsys.readouterr().err
    assert generate.main(["--checkpoint", str(other)]) == 1
    assert "lacks 'num_hash_layers'; is it" in capsys.readouterr().err
