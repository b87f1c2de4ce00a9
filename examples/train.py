"""Trains the decoder of ``model.py`` on Python's own language reference and saves it in three formats.

  python examples/train.py --out build/tiny_pydoc
  python examples/train.py --steps 100 --mesh dp=2,ep=2

Router loads are balanced as DeepSeek-V3's: after each step the correction bias of an expert that got more than its
share goes down a little, that of one which got less goes up; a loss for even load within each sequence and one for
small logits can be added. Experts compute in f32 on a CPU and in bf16 elsewhere, from f32 weights;
with ``--forward FP8Block`` they run in FP8 forward.
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
import meshes
import numpy as np
import optax
from corpus import corpus
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from model import FORMATS, Decoder, ModelConfig, loss_of, new_moe, save

import jaxmoe
from jaxmoe.balance import update_correction_bias

Array = jax.Array


def main(argv: list[str] | None = None) -> float:
    """Trains, saves, and returns the loss on held-out text."""
    args = parse(argv)
    train, held_out = corpus()
    if args.length >= len(held_out):
        sys.exit(f"train.py: --length is {args.length}; it must be below the {len(held_out)} bytes held out")
    try:
        mesh = meshes.make(args.mesh)
    except ValueError as e:
        sys.exit(f"train.py: {e}")
    model, optimizer = setup(args, mesh)
    count = sum(a.size for a in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"{count:,} parameters, {len(train):,} bytes to train on, {len(held_out):,} held out")
    where = jax.devices()[0].device_kind if mesh is None else f"{mesh.size} × {jax.devices()[0].device_kind}"
    print(f"{args.steps} steps of {args.batch} x {args.length} bytes on {where}", flush=True)

    numbers = np.random.default_rng(args.seed)
    losses, began, reported = [], time.perf_counter(), 0
    for step in range(1, args.steps + 1):
        tokens = batch(train, args.batch, args.length, numbers, mesh)
        loss, load = train_step(model, optimizer, tokens, args.balance, args.balance_loss, args.z_loss)
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
    parser.add_argument("--balance-loss", type=float, default=0.0, help="factor of the loss for even load by sequence")
    parser.add_argument("--z-loss", type=float, default=0.0, help="factor of the loss for small router logits")
    parser.add_argument("--forward", choices=("FP8Block",), help="run experts quantised forward, unquantised backward")
    parser.add_argument("--mesh", type=meshes.parse, help="spread batches and experts over devices, as dp=2,ep=2")
    parser.add_argument("--report", type=int, default=50, help="steps between two lines")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "length", "layers", "report"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.mesh is not None:
        cut = args.mesh.get("dp", 1) * args.mesh.get("ep", 1)
        if args.mesh.get("tp", 1) != 1:
            parser.error("--mesh cuts widths (tp), but checkpoints are written of whole experts; use dp and ep")
        if args.batch % cut:
            parser.error(f"--batch is {args.batch}; dp · ep = {cut} must divide it")
    return args


def setup(args: argparse.Namespace, mesh: Mesh | None) -> tuple[Decoder, Any]:
    """The model and its optimiser, on the mesh if there is one."""
    config, rngs = ModelConfig(layers=args.layers), nnx.Rngs(args.seed)
    model = Decoder(config, rngs, functools.partial(new_moe, config, rngs, mesh=mesh))
    if args.forward is not None:
        for block in model.blocks:
            block.ffn.execution = jaxmoe.Execution(forward_format=FORMATS[args.forward][0])
    if mesh is not None:
        meshes.replicate(model, mesh)
    warmup = min(100, args.steps // 10 + 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, args.rate, warmup, args.steps, args.rate / 20)
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.1))
    return model, nnx.Optimizer(model, adamw, wrt=nnx.Param)


def batch(tokens: np.ndarray, size: int, length: int, numbers: np.random.Generator, mesh: Mesh | None = None) -> Array:
    """Random stretches, int32 [size, length + 1]; on a mesh, each device has its own."""
    starts = numbers.integers(0, len(tokens) - length, size)
    drawn = jnp.asarray(tokens[starts[:, None] + np.arange(length + 1)])
    return drawn if mesh is None else jax.device_put(drawn, NamedSharding(mesh, meshes.layout(0).tokens))


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def train_step(
    model: Decoder, optimizer: Any, tokens: Array, balance: float, balance_loss: float, z_loss: float
) -> tuple[Array, Array]:
    """One step; returns the loss of the text and the choices each expert got, [layers, E]."""

    def loss(model: Decoder) -> tuple[Array, tuple[Array, Array]]:
        logits, _, routed = model(tokens[:, :-1])
        text = loss_of(logits, tokens[:, 1:])
        return text + balance_loss * routed.balance.sum() + z_loss * routed.z.sum(), (text, routed.load)

    (_, (text, load)), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, gradients)
    for block, counts in zip(model.blocks, load, strict=True):
        bias = block.ffn.router.correction_bias
        if bias is not None:
            bias[...] = update_correction_bias(bias[...], counts, balance)
    return text, load


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
