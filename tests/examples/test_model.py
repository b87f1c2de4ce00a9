"""The decoder: its cache, its attention window, and the shipped checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmoe

HELD_OUT_LIMIT = 1.2
"""Nats per byte that the shipped checkpoint must stay below on text that it was not trained on."""


ENTIRE = np.ones((2, 16), bool)
forward = jax.jit(lambda model, tokens, valid: model(tokens, valid=valid))
step = jax.jit(lambda model, tokens, cache, start: model(tokens, cache=cache, start=start))


@pytest.fixture
def tiny(example):
    """A model whose window is shorter than its text, and text."""
    model = example("model")
    config = model.ModelConfig(vocab=19, hidden=32, intermediate=32, layers=2, heads=2, window=5, experts=4)
    tokens = np.random.default_rng(0).integers(0, 19, (2, 16)).astype(np.int32)
    return model.Decoder(config, nnx.Rngs(0)), jnp.asarray(tokens)


def test_decoding_with_the_cache_is_the_forward_pass(tiny):
    """A token at a time gives the logits of the whole text, past the window's end too."""
    model, tokens = tiny
    whole, _, routed = forward(model, tokens, ENTIRE)
    load = routed.load
    cache, found, loads = model.empty_cache(2, 16), [], []
    for n in range(16):
        logits, cache, new = step(model, tokens[:, n : n + 1], cache, jnp.int32(n))
        found.append(logits)
        loads.append(new.load)
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(np.sum(loads, axis=0), load)
    assert load.sum(axis=1).tolist() == [2 * 16 * 2] * 2


def test_a_token_sees_only_what_is_before_it_and_within_the_window(tiny):
    model, tokens = tiny
    changed = tokens.at[0, 3].set((tokens[0, 3] + 1) % 19)
    differs = np.asarray(forward(model, tokens, ENTIRE)[0] != forward(model, changed, ENTIRE)[0]).any(axis=2)
    # Two layers look back 4 positions each.
    reach = 3 + model.config.layers * (model.config.window - 1)
    assert differs[0].tolist() == [3 <= t <= reach for t in range(16)]
    assert not differs[1].any()


def test_padding_goes_to_no_expert(tiny):
    model, tokens = tiny
    whole, _, _ = forward(model, tokens, ENTIRE)
    valid = ENTIRE & (np.arange(16) < 9)
    logits, _, routed = forward(model, tokens.at[:, 9:].set(0), valid)
    np.testing.assert_allclose(logits[:, :9], whole[:, :9], rtol=0, atol=1e-5)
    assert routed.load.sum(axis=1).tolist() == [2 * 9 * 2] * 2


def test_in_bf16_as_on_a_gpu_it_knows_as_much(example, monkeypatch):
    model, train, generate = example("model"), example("train"), example("generate")
    _, held_out = example("corpus").corpus()
    monkeypatch.setattr(model, "compute_dtype", lambda: jnp.bfloat16)
    decoder = model.load(generate.SHIPPED)
    assert {variable.dtype for _, variable, _ in model.tensors(decoder)} == {jnp.dtype(jnp.bfloat16)}
    with jax.numpy_dtype_promotion("standard"):  # flax's norms mix dtypes
        assert 0.5 < train.evaluate(decoder, held_out, 256, limit=24) < HELD_OUT_LIMIT
        text, count, _ = generate.generate(
            decoder, *generate.encode("The with"), jnp.float32(0), jax.random.key(0), count=8
        )
    assert count == 8 and len(generate.decode(text)) == 8


def test_the_corpus_repeats_nothing_that_is_held_out(example):
    train, held_out = example("corpus").corpus()
    assert len(train) > 200_000 and 10_000 < len(held_out) < len(train) / 10
    assert train.min() >= 0 and train.max() == example("model").END
    texts = [bytes(t for t in tokens.tolist() if t < 256).decode(errors="replace") for tokens in (train, held_out)]
    # The first paragraph may have begun in the training text.
    paragraphs = [set(text.split("\n\n")) for text in texts]
    assert not {p for p in paragraphs[0] & paragraphs[1] if len(p) > 80}


def test_the_shipped_checkpoint(example):
    """It is small, packed, and knows text that it has not seen; guessing would cost log 257 = 5.55."""
    model, generate = example("model"), example("generate")
    size = sum(p.stat().st_size for p in generate.SHIPPED.iterdir())
    assert size <= 4_000_000
    decoder = model.load(generate.SHIPPED)
    assert {block.ffn.config.weights for block in decoder.blocks} == {jaxmoe.MXFP4}
    assert [block.ffn.config.router.hash_routing for block in decoder.blocks] == [True, False, False, False]
    _, held_out = example("corpus").corpus()
    loss = example("train").evaluate(decoder, held_out, 256, limit=24)
    assert 0.5 < loss < HELD_OUT_LIMIT
