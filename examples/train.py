"""Trains the decoder of ``model.py`` on Python's own language reference and saves it in three formats.

  python examples/train.py --out build/tiny_pydoc

Router loads are balanced without an auxiliary loss: after each step the correction bias of an expert that got more
than its share goes down a little, that of one which got less goes up.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from corpus import corpus
from flax import nnx
from model import FORMATS, Decoder, ModelConfig, loss_of, save

Array = jax.Array


def main(argv: list[str] | None = None) -> float:
    """Trains, saves, and returns the loss on held-out text."""
    args = parse(argv)
    train, held_out = corpus()
    if args.length >= len(held_out):
        sys.exit(f"train.py: --length is {args.length}; it must be below the {len(held_out)} bytes held out")
    config = ModelConfig(layers=args.layers)
    model = Decoder(config, nnx.Rngs(args.seed))
    warmup = min(100, args.steps // 10 + 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, args.rate, warmup, args.steps, args.rate / 20)
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)
    count = sum(a.size for a in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"{count:,} parameters, {len(train):,} bytes to train on, {len(held_out):,} held out")
    print(f"{args.steps} steps of {args.batch} x {args.length} bytes on {jax.devices()[0].device_kind}", flush=True)

    numbers = np.random.default_rng(args.seed)
    losses, began, reported = [], time.perf_counter(), 0
    for step in range(1, args.steps + 1):
        loss, load = train_step(model, optimizer, batch(train, args.batch, args.length, numbers), args.balance)
        losses.append(loss)
        if step == 1:  # the first step compiles
            jax.block_until_ready(loss)
            print(f"step 1: loss {loss:.3f}, compiled in {time.perf_counter() - began:.0f} s", flush=True)
            began, reported = time.perf_counter(), 1
        elif step % args.report == 0 or step == args.steps:
            mean = float(jnp.stack(losses[reported:step]).mean())
            speed = (step - reported) * args.batch * args.length / (time.perf_counter() - began)
            print(
                f"step {step}: loss {mean:.3f}, {speed:,.0f} tokens/s, share of experts (%) {shares(load)}", flush=True
            )
            began, reported = time.perf_counter(), step
    held = evaluate(model, held_out, args.length)
    print(f"held out: {held:.3f} nats/byte")
    if args.out:
        for name in FORMATS:
            path = save(model, Path(args.out) / name.lower(), name)
            size = sum(p.stat().st_size for p in path.iterdir())
            print(f"{path}: {size / 1e6:.2f} MB")
    return held


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="directory for bf16/, fp8block/ and mxfp4/; nothing is saved without it")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--length", type=int, default=256, help="bytes a sequence")
    parser.add_argument("--layers", type=int, default=ModelConfig.layers)
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate at its peak")
    parser.add_argument("--balance", type=float, default=3e-3, help="step of the correction bias")
    parser.add_argument("--report", type=int, default=50, help="steps between two lines")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "length", "layers", "report"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; it must be at least 1")
    return args


def batch(tokens: np.ndarray, size: int, length: int, numbers: np.random.Generator) -> Array:
    """Random stretches, int32 [size, length + 1]."""
    starts = numbers.integers(0, len(tokens) - length, size)
    return jnp.asarray(tokens[starts[:, None] + np.arange(length + 1)])


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def train_step(model: Decoder, optimizer: Any, tokens: Array, balance: float) -> tuple[Array, Array]:
    """One step; returns the loss and the tokens each expert got, [layers, E]."""

    def loss(model: Decoder) -> tuple[Array, Array]:
        logits, _, load = model(tokens[:, :-1])
        return loss_of(logits, tokens[:, 1:]), load

    (value, load), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, gradients)
    for block, counts in zip(model.blocks, load, strict=True):
        bias = block.ffn.router.correction_bias
        if bias is not None:
            bias[...] += balance * jnp.sign(counts.mean() - counts)
    return value, load


@nnx.jit
def _loss(model: Decoder, tokens: Array) -> Array:
    return loss_of(model(tokens[:, :-1])[0], tokens[:, 1:])


def evaluate(model: Decoder, tokens: np.ndarray, length: int, limit: int | None = None) -> float:
    """Mean loss over consecutive stretches, at most ``limit`` of them, in nats per byte."""
    count = (len(tokens) - 1) // length
    count = count if limit is None else min(count, limit)
    parts = np.stack([tokens[n * length : (n + 1) * length + 1] for n in range(count)])
    return float(np.mean([_loss(model, jnp.asarray(part[None])) for part in parts]))


def shares(load: Array) -> str:
    percent = 100 * np.asarray(load) / np.asarray(load).sum(axis=1, keepdims=True)
    return " | ".join(" ".join(f"{p:.0f}" for p in layer) for layer in percent)


if __name__ == "__main__":
    main(sys.argv[1:])
