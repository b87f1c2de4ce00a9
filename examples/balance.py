"""Measures the load of every expert on some text, copies the hottest ones, and shows what that does to the ranks.

  python examples/balance.py --ranks 4 --redundant 4

The load of an expert-parallel layer is that of its fullest rank. Experts are counted on one half of the held-out text,
placed by those counts, and counted again on the other half: the placed model gives the same losses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from corpus import corpus
from flax import nnx
from generate import SHIPPED
from model import Decoder, load, loss_of

import jaxmoe
from jaxmoe.balance import Placement, load_bars, place_experts, plan_placements, plot_load

LENGTH = 256


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="expert-parallel ranks to balance for")
    parser.add_argument("--redundant", type=int, default=4, help="places beyond the experts, for copies")
    parser.add_argument("--sequences", type=int, default=32, help="of 256 bytes, half of them to measure")
    parser.add_argument("--checkpoint", type=Path, default=SHIPPED, help="directory that train.py wrote")
    parser.add_argument(
        "--png", type=Path, help="draw the load before and after, to NAME.before.png and NAME.after.png"
    )
    args = parser.parse_args(argv)
    try:
        model = load(args.checkpoint)
        text = corpus()[1][: args.sequences * LENGTH].reshape(-1, 2, LENGTH).swapaxes(0, 1)
        loss, counts = run(model, jnp.asarray(text[0]))
        before = [Placement.identity(counts.shape[1], args.ranks) for _ in counts]
        after = plan_placements(counts, args.ranks, args.redundant)
    except (ValueError, OSError) as e:
        print(f"balance.py: {e}", file=sys.stderr)
        return 1
    loss, counts = run(model, jnp.asarray(text[1]))
    place(model, after)
    placed_loss, places = run(model, jnp.asarray(text[1]))

    print(f"loss {loss:.4f} before, {placed_loss:.4f} after {args.redundant} copies on {args.ranks} ranks")
    for n, (old, new) in enumerate(zip(before, after, strict=True)):
        ranks = places[n].reshape(args.ranks, -1).sum(axis=1)
        print(
            f"\nlayer {n}: the fullest rank has {old.imbalance(counts[n]):.2f} of the mean before, "
            f"{ranks.max() / ranks.mean():.2f} after; experts have {new.copies.tolist()} copies\n"
            f"{load_bars(counts[n], ranks=args.ranks)}\n\nand after, by place\n{load_bars(places[n], ranks=args.ranks)}"
        )
    if args.png is not None:
        for name, load_ in (("before", counts), ("after", places)):
            print(plot_load(load_, args.png.with_suffix(f".{name}.png"), ranks=args.ranks, title=f"choices, {name}"))
    return 0


@nnx.jit
def _run(model: Decoder, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits, _, routed = model(tokens[:, :-1])
    return loss_of(logits, tokens[:, 1:]), routed.load


def run(model: Decoder, tokens: jax.Array) -> tuple[float, np.ndarray]:
    """Loss in nats per byte, and choices of every layer's experts."""
    loss, counts = _run(model, tokens)
    return float(loss), np.asarray(counts)


def place(model: Decoder, placements: tuple[Placement, ...]) -> None:
    """Puts every MoE layer's experts at their places."""
    for block, placement in zip(model.blocks, placements, strict=True):
        layer = block.ffn
        params, config = place_experts(layer.params, layer.config, placement)
        block.ffn = jaxmoe.nn.MoE.from_params(config, params, layer.execution, dtype=layer.dtype)


if __name__ == "__main__":
    sys.exit(main())
