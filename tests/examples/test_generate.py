"""Generation from the shipped checkpoint."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
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
    lines = re.findall(r"layer \d: (\d+) rows, share of experts \(%\)((?: +\d+){8})\n", out)
    assert len(lines) == 4
    for rows, shares in lines:
        assert int(rows) % 2 == 0 and abs(sum(map(int, shares.split())) - 100) <= 4
    assert run()[0] == text


def test_mistakes_are_told_in_a_line(example, capsys, tmp_path):
    generate = example("generate")
    assert generate.main(["--checkpoint", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
    other = generate.SHIPPED.parent / "deepseek_v4_fp4"
    (tmp_path / "config.json").write_text("{}")
    assert generate.main(["--checkpoint", str(tmp_path)]) == 1
    assert "lacks 'vocab_size'; is it a checkpoint of examples/train.py?" in capsys.readouterr().err
    assert generate.main(["--checkpoint", str(other)]) == 1
    assert "lacks 'num_hash_layers'; is it" in capsys.readouterr().err
