"""Compiles a layer ahead of time and exports it to a file, which a fresh process runs without tracing anything.

  python examples/serve_layer.py --export layer.npz
  python examples/serve_layer.py --run layer.npz

The file holds the program for one number of tokens, not the weights: these are read from the checkpoint and passed in.
On a GPU tracing compiles the kernels into the cubin cache (``jaxmoe warmup`` does so without one), where the fresh
process finds them, and weights in a format that it has no kernels for are converted as they are loaded.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import jaxmoe
from jaxmoe.checkpoint import load_moe

Array = jax.Array
CHECKPOINT = Path(__file__).parent / "data" / "deepseek_v4_fp4"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--export", type=Path, metavar="FILE", help="write the program")
    what.add_argument("--run", type=Path, metavar="FILE", help="run a program that was written")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="a Hugging Face directory")
    parser.add_argument("--layer", type=int, default=1, help="one that routes by score; for --export")
    parser.add_argument("--tokens", type=int, default=64, help="of one call; for --export")
    args = parser.parse_args(argv)
    try:
        if args.export:
            return export_to(args.export, args.checkpoint, args.layer, args.tokens)
        return run_from(args.run, args.checkpoint)
    except (ValueError, OSError, ImportError) as e:
        print(f"serve_layer.py: {e}", file=sys.stderr)
        return 1


def inputs(tokens: int, hidden: int) -> Array:
    return jax.random.normal(jax.random.key(0), (tokens, hidden), jnp.bfloat16)


def export_to(path: Path, checkpoint: Path, number: int, tokens: int) -> int:
    """Compiles, exports, and keeps the output for inputs that the fresh process can make again."""
    layer = load_moe(checkpoint, number, weights="auto", progress=False)
    # Plain arrays in and out: an exported program does not know the package's classes.
    leaves, tree = jax.tree.flatten(layer.params)
    x = inputs(tokens, layer.config.hidden)

    @jax.jit
    def program(leaves: list[Array], x: Array) -> Array:
        return jaxmoe.moe(jax.tree.unflatten(tree, leaves), x, layer.config, layer.execution)

    began = time.perf_counter()
    lowered = program.lower(leaves, x)
    compiled = lowered.compile()
    print(f"compiled for {tokens} tokens in {time.perf_counter() - began:.1f} s")
    y = compiled(leaves, x)
    calls = sorted(set(re.findall(r"custom_call @((?:jaxmoe|mosaic_gpu)_\w+)", lowered.as_text())))
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in calls]
    exported = export.export(program, disabled_checks=checks)(leaves, x)
    code = np.frombuffer(bytes(exported.serialize()), np.uint8)
    rest = {"calls": np.array(calls, np.str_), "layer": number, "tokens": tokens, "y": np.asarray(y, np.float32)}
    with path.open("wb") as file:
        np.savez(file, code=code, **rest)
    print(f"{path}: {len(code):,} bytes of program for {', '.join(exported.platforms)}")
    return 0


def run_from(path: Path, checkpoint: Path) -> int:
    """Runs the program of a file; 1 if its output is not what it was where it was exported."""
    saved = np.load(path)
    layer = load_moe(checkpoint, int(saved["layer"]), weights="auto", progress=False)
    began = time.perf_counter()
    register(saved["calls"].tolist())
    program = jax.jit(export.deserialize(bytearray(saved["code"].tobytes())).call)
    leaves, x = jax.tree.leaves(layer.params), inputs(int(saved["tokens"]), layer.config.hidden)
    y = jax.block_until_ready(program(leaves, x))
    print(f"read, compiled and run in {time.perf_counter() - began:.1f} s")
    began = time.perf_counter()
    jax.block_until_ready(program(leaves, x))
    print(f"again: {1e3 * (time.perf_counter() - began):.2f} ms for {len(x)} tokens")
    error = np.abs(np.asarray(y, np.float32) - saved["y"]).max() / np.abs(saved["y"]).max()
    print("output: the same bits as at export" if error == 0 else f"output: differs by {error:.1e} of the largest")
    return 0 if error < 0.01 else 1


def register(calls: list[str]) -> None:
    """Does for a program's custom calls what tracing them does."""
    for call in calls:
        if call.startswith("jaxmoe_"):
            from jaxmoe.cuda import ffi

            ffi.register(call.removesuffix(ffi.NO_GRAPH))
        else:  # Pallas kernels: importing it tells XLA where their runtime lies
            import jax.experimental.pallas.mosaic_gpu  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
