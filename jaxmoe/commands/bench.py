"""``jaxmoe bench``: run a layer of random weights on the device at hand: time, floor, memory, where the time goes."""

from __future__ import annotations

import argparse
import json
import sys

import jax

from jaxmoe.bench import report, timing
from jaxmoe.bench.layer import measure
from jaxmoe.commands.layer_arguments import add_layer_arguments, add_run_arguments, layer_config
from jaxmoe.config import Execution
from jaxmoe.cuda import target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "example: jaxmoe bench --experts 32 --hidden 7168 --intermediate 2048 --top-k 8 --format FP8Block "
        "--tokens 128,4096 --png layer.png"
    )
    add_layer_arguments(parser, "experts on this device")
    add_run_arguments(parser)
    parser.add_argument("--deterministic", action="store_true", help="bits of a token do not depend on the others")
    parser.add_argument("--kernels", action="store_true", help="list every kernel that ran")
    parser.add_argument("--json", action="store_true", help="print a list of figures as JSON, one per token count")
    parser.add_argument("--png", metavar="FILE", help="draw where the time goes into this file")


def run(arguments: argparse.Namespace) -> int:
    """Prints the figures for each token count; 0."""
    gpu = jax.default_backend() == "gpu"
    config, notes = layer_config(arguments, target.current() if gpu else None)
    execution = Execution(
        layout=arguments.layout, masked_capacity=arguments.masked_capacity, deterministic=arguments.deterministic
    )
    if not gpu:
        notes = [*notes, "no GPU here: these are times of plain JAX on this machine's CPU, without a trace"]
    out = sys.stderr if arguments.json else sys.stdout
    print("\n".join([timing.machine(), f"copy rate {timing.copy_rate() / 1e9:.1f} GB/s", *notes]), file=out)
    figures = []
    for tokens in arguments.tokens:
        figures.append(measure(config, tokens, execution))
        if not arguments.json:
            print("\n" + report.text(figures[-1], kernels=arguments.kernels), flush=True)
    if arguments.json:
        print(json.dumps([report.as_json(f) for f in figures], indent=2))
    if arguments.png:
        report.picture(figures, arguments.png)
    return 0
