"""``jaxmoe warmup``: compile a layer's kernels into the cache. Needs no GPU."""

from __future__ import annotations

import argparse
import sys

from jaxmoe.commands.layer_arguments import (
    add_forward_format,
    add_layer_arguments,
    add_run_arguments,
    forward_format,
    layer_config,
)
from jaxmoe.config import Execution
from jaxmoe.cuda import arch as arches
from jaxmoe.cuda import cubin_cache
from jaxmoe.layer.kernels import kernels_for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "DeepEP's kernels, and the GEMMs of rows that other ranks send, are compiled where an EpContext is made and "
        "its programs are traced: they depend on the ranks and on the clock of their GPUs."
    )
    add_layer_arguments(parser, "experts on one device")
    add_run_arguments(parser)
    add_forward_format(parser)
    parser.add_argument(
        "--gradients", action="store_true", help="also what the backward pass of unquantised experts runs"
    )
    target = parser.add_argument_group("what to compile for, by default the GPU at hand")
    target.add_argument("--arch", help="for example sm_90a (H100, H200) or sm_100f (B200, B300)")
    target.add_argument("--num-sms", type=int, metavar="N", help="SMs to use: 132 on H100 SXM and H200, 148 on B200")
    parser.add_argument("--jobs", type=int, metavar="N", help="compiling processes; by default one per CPU, at most 16")
    parser.add_argument("--dry-run", action="store_true", help="list the kernels and compile nothing")


def run(arguments: argparse.Namespace) -> int:
    """Compiles what is missing and prints each kernel with its key; 0 when all are there."""
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"--jobs is {arguments.jobs}; it must be at least 1")
    arch = _arch(arguments)
    execution = Execution(
        layout=arguments.layout,
        masked_capacity=arguments.masked_capacity,
        backend="deepgemm",
        forward_format=forward_format(arguments),
    )
    config, notes = layer_config(arguments, arch)
    sources = kernels_for(config, arch, arguments.tokens, execution, gradients=arguments.gradients or None)
    for note in notes:
        print(note)
    print(f"{len(sources)} kernels for {arch.name} with {arch.num_sms} SMs, {cubin_cache.directory()}")
    if arguments.dry_run:
        for source in sources:
            print(f"  {source.name}\n{source.code}")
        return 0
    before = {(record["key"], record["sha256"]) for record in cubin_cache.records()}
    keys = cubin_cache.ensure(sources, workers=arguments.jobs, progress=sys.stderr.isatty())
    new = {record["key"] for record in cubin_cache.records() if (record["key"], record["sha256"]) not in before}
    for source, key in keys.items():
        print(f"  {'compiled' if key in new else 'cached  '}  {key}  {source.name}")
    return 0


def _arch(arguments: argparse.Namespace) -> arches.Arch:
    if arguments.arch is None:
        try:
            here = arches.detect()
        except NotImplementedError as reason:
            raise ValueError(f"{reason}: pass --arch and --num-sms") from None
        num_sms = here.num_sms if arguments.num_sms is None else arguments.num_sms
        return arches.Arch(here.name, num_sms)
    if arguments.num_sms is None:
        raise ValueError(
            f"--arch {arguments.arch} needs --num-sms, which is compiled in: 132 for H100 SXM and H200, 148 for B200"
        )
    return arches.Arch(arguments.arch, arguments.num_sms)
