"""Generates text with a checkpoint that ``train.py`` wrote; without arguments, with the one that is in ``data/``.

  python examples/generate.py --prompt "The with statement" --tokens 200
  python examples/generate.py --mesh dp=2,ep=2

The prompt and all new tokens are one compiled program: a loop on the device whose cache of keys and values has a fixed
size. The experts' weights stay in the checkpoint's format.
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
from model import END, FORMATS, Decoder, load

from jaxmoe.balance import load_bars, plot_load

Array = jax.Array
SHIPPED = Path(__file__).parent / "data" / "tiny_pydoc_mxfp4"
PAD = 64


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default='The "with" statement is used to', help="text to continue")
    parser.add_argument("--tokens", type=int, default=256, help="bytes to generate at most")
    parser.add_argument("--temperature", type=float, default=0.5, help="0 takes the likeliest byte")
    parser.add_argument("--checkpoint", type=Path, default=SHIPPED, help="directory that train.py wrote")
    parser.add_argument(
        "--format", choices=FORMATS, help="convert the experts at load; they are kept as they are without"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--mesh", type=meshes.parse, help="spread the model over devices, for example dp=2,ep=2 or tp=2"
    )
    parser.add_argument("--png", type=Path, help="draw the load of the experts to this file")
    args = parser.parse_args(argv)
    if args.tokens < 1:
        parser.error(f"--tokens is {args.tokens}; it must be at least 1")
    if not args.temperature >= 0:
        parser.error(f"--temperature is {args.temperature}; it must be 0 or more")
    try:
        mesh = meshes.make(args.mesh)
        model = load(args.checkpoint, args.format, mesh)
    except (ValueError, OSError) as e:
        print(f"generate.py: {e}", file=sys.stderr)
        return 1
    formats = {str(block.ffn.config.weights) for block in model.blocks}
    device = jax.devices()[0]
    where = device.device_kind if mesh is None else f"{mesh.size} × {device.device_kind}"
    print(f"{args.checkpoint.name}: {', '.join(formats)} experts on {where}, JAX {jax.__version__}")

    prompt, length = encode(args.prompt)
    inputs = model, prompt, length, np.float32(args.temperature), jax.random.key(args.seed)
    began = time.perf_counter()
    program = generate.lower(*inputs, count=args.tokens).compile()
    compiled = time.perf_counter() - began
    began = time.perf_counter()
    text, count, load_ = jax.block_until_ready(program(*inputs))
    seconds = time.perf_counter() - began
    print(
        f"\n{args.prompt}\033[1m{decode(text)}\033[0m\n" if sys.stdout.isatty() else f"\n{args.prompt}{decode(text)}\n"
    )
    print(f"{int(count)} tokens in {seconds:.2f} s: {int(count) / seconds:.0f} tokens/s, compiled in {compiled:.1f} s")
    ranks = 1 if args.mesh is None else args.mesh.get("ep", 1)
    show(np.asarray(load_), ranks)
    if args.png is not None:
        print(f"\n{plot_load(load_, args.png, ranks=ranks, title='choices of each expert')}")
    return 0


def encode(prompt: str) -> tuple[Array, Array]:
    """Tokens int32 [1, P], padded to a multiple of ``PAD``, and how many of them count."""
    tokens = [END, *prompt.encode()]
    padded = np.full((1, -(-len(tokens) // PAD) * PAD), END, np.int32)
    padded[0, : len(tokens)] = tokens
    return jnp.asarray(padded), jnp.int32(len(tokens))


def decode(tokens: Array) -> str:
    return bytes(t for t in np.asarray(tokens).tolist() if t < END).decode(errors="replace")


@functools.partial(jax.jit, static_argnames="count")
def generate(
    model: Decoder, prompt: Array, length: Array, temperature: Array, key: Array, *, count: int
) -> tuple[Array, Array, Array]:
    """Continues a prompt until ``END`` or ``count`` tokens.

    Args:
      model: the decoder.
      prompt, length: of :func:`encode`. Whatever has the same padded width runs in the same program.
      temperature: f32; 0 takes the likeliest token.
      key: for sampling.
      count: the most tokens to generate.

    Returns:
      tokens int32 [count], ``END`` after the last; how many there are; tokens per expert int32 [layers, E].
    """

    def pick(logits: Array, n: Array | int) -> Array:
        noise = jax.random.gumbel(jax.random.fold_in(key, n), logits.shape)
        return jnp.argmax(logits + temperature * noise).astype(jnp.int32)

    def unfinished(state: tuple[Any, ...]) -> Array:
        n, text = state[:2]
        return (n < count) & (text[n - 1] != END)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        n, text, load, cache = state
        logits, cache, routed = model(text[n - 1][None, None], cache=cache, start=length + n - 1)
        return n + 1, text.at[n].set(pick(logits[0, 0], n)), load + routed.load, cache

    # Keys of the padding lie after the prompt's, where nothing looks before new ones have replaced them.
    width = prompt.shape[1]
    cache = model.empty_cache(1, width + count)
    logits, cache, routed = model(prompt, valid=jnp.arange(width)[None] < length, cache=cache)
    text = jnp.full(count, END, jnp.int32).at[0].set(pick(logits[0, length - 1], 0))
    n, text, load, _ = jax.lax.while_loop(unfinished, step, (jnp.int32(1), text, routed.load, cache))
    return text, n, load


def show(load: np.ndarray, ranks: int) -> None:
    """Every layer's load of every expert as a bar, by rank where experts are spread."""
    for layer, counts in enumerate(load):
        print(f"\nlayer {layer}: {counts.sum()} choices of an expert\n{load_bars(counts, ranks=ranks)}")


if __name__ == "__main__":
    sys.exit(main())
