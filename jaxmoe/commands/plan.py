"""``jaxmoe plan``: what a layer will do on a GPU: layout, kernels, memory, time at best. Needs no GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from jaxmoe.commands.layer_arguments import (
    add_forward_format,
    add_layer_arguments,
    add_run_arguments,
    forward_format,
    layer_config,
)
from jaxmoe.config import Execution
from jaxmoe.cuda.arch import Arch
from jaxmoe.layer.plan import Plan, plan
from jaxmoe.layer.roofline import GPUS, find_gpu


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "example: jaxmoe plan --experts 256 --hidden 7168 --intermediate 2048 --top-k 8 --format FP8Block "
        "--tokens 4096 --gpu H200"
    )
    add_layer_arguments(parser, "routed experts")
    add_run_arguments(parser)
    add_forward_format(parser)
    parser.add_argument("--gpu", choices=GPUS, help="by default the one at hand; without one there are no times")
    parser.add_argument("--json", action="store_true", help="print a list of plans as JSON, one for each token count")


def run(arguments: argparse.Namespace) -> int:
    """Prints a plan for each token count; 0."""
    gpu = find_gpu(arguments.gpu)
    config, notes = layer_config(arguments, None if gpu is None else Arch(gpu.arch, gpu.num_sms))
    execution = Execution(
        layout=arguments.layout,
        masked_capacity=arguments.masked_capacity,
        forward_format=forward_format(arguments),
    )
    plans = [plan(config, tokens, execution, device=arguments.gpu) for tokens in arguments.tokens]
    if arguments.json:
        print(json.dumps([_values(p, notes) for p in plans], indent=2))
    else:
        print("\n\n".join([*notes, *map(str, plans)]))
    return 0


def _values(p: Plan, notes: list[str]) -> dict[str, Any]:
    """A plan as plain values. Times are seconds, sizes bytes; null without a GPU."""
    values = {field.name: getattr(p, field.name) for field in dataclasses.fields(p)}
    config, router = p.config, p.config.router
    return values | {
        "config": {
            "hidden": config.hidden,
            "intermediate": config.intermediate,
            "experts": router.num_experts,
            "top_k": router.top_k,
            "shared_intermediate": None if config.shared is None else config.shared.intermediate,
            "weights": config.weights.name,
        },
        "execution": {
            "layout": p.execution.layout,
            "masked_capacity": p.execution.masked_capacity,
            "forward_format": None if p.execution.forward_format is None else p.execution.forward_format.name,
        },
        "kernels": dict(p.kernels),
        "memory": dataclasses.asdict(p.memory),
        "stages": [dataclasses.asdict(stage) for stage in p.stages],
        "gpu": None if p.gpu is None else dataclasses.asdict(p.gpu),
        "flops": p.flops,
        "bytes": p.bytes,
        "seconds": p.seconds,
        "bound": p.bound,
        "notes": notes,
    }
