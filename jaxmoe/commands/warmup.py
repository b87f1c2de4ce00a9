"""``jaxmoe warmup``: compile a layer's kernels into the cache. Needs no GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jaxmoe.config import Execution, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.cuda import arch as arches
from jaxmoe.cuda import cubin_cache
from jaxmoe.errors import CheckpointError
from jaxmoe.layer.kernels import kernels_for
from jaxmoe.quant.formats import BF16, FORMATS, MXFP4, FP8Block, FP8BlockUE8M0, WeightFormat

_SHAPE = ("experts", "hidden", "intermediate", "top_k")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    shape = parser.add_argument_group("the layer, by its sizes")
    shape.add_argument("--experts", type=int, metavar="E", help="experts on one device")
    shape.add_argument("--hidden", type=int, metavar="H", help="width of a token")
    shape.add_argument("--intermediate", type=int, metavar="I", help="width of a routed expert")
    shape.add_argument("--top-k", type=int, metavar="K", help="experts per token")
    shape.add_argument("--shared-intermediate", type=int, metavar="I", help="width of all shared experts together")
    checkpoint = parser.add_argument_group("or by a checkpoint")
    checkpoint.add_argument("--checkpoint", type=Path, metavar="DIR", help="directory with a Hugging Face config.json")
    checkpoint.add_argument("--layer", type=int, metavar="N", help="the layer; by default the first with experts")
    run = parser.add_argument_group("how it will run")
    run.add_argument("--format", choices=sorted(FORMATS), help="expert weights; by default the checkpoint's, or BF16")
    run.add_argument("--layout", choices=("auto", "psum", "masked", "contiguous"), default="auto")
    run.add_argument("--masked-capacity", type=int, metavar="C", help="rows per expert; by default the tokens")
    run.add_argument(
        "--tokens",
        type=_tokens,
        default=(1, 128, 4096),
        metavar="T,T,…",
        help="token counts the layer will be called with (default 1,128,4096)",
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
    execution = Execution(layout=arguments.layout, masked_capacity=arguments.masked_capacity, backend="deepgemm")
    sources = kernels_for(_config(arguments, arch), arch, arguments.tokens, execution)
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


def _tokens(text: str) -> tuple[int, ...]:
    try:
        tokens = tuple(int(part) for part in text.split(","))
    except ValueError:
        tokens = (0,)
    if min(tokens) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers such as 1,128,4096")
    return tokens


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


def _config(arguments: argparse.Namespace, arch: arches.Arch) -> MoEConfig:
    given = [f"--{name.replace('_', '-')}" for name in _SHAPE if getattr(arguments, name) is not None]
    if arguments.checkpoint is not None:
        if given:
            raise ValueError(f"--checkpoint says the sizes; leave out {', '.join(given)}")
        return _checkpoint_config(arguments, arch)
    if len(given) < len(_SHAPE):
        missing = [f"--{name.replace('_', '-')}" for name in _SHAPE if getattr(arguments, name) is None]
        raise ValueError(f"the layer's sizes are missing: pass {', '.join(missing)}, or --checkpoint DIR")
    if arguments.layer is not None:
        raise ValueError("--layer goes with --checkpoint")
    shared = arguments.shared_intermediate
    return MoEConfig(
        hidden=arguments.hidden,
        intermediate=arguments.intermediate,
        router=RouterConfig(num_experts=arguments.experts, top_k=arguments.top_k),
        weights=FORMATS[arguments.format or "BF16"],
        shared=None if shared is None else SharedExperts(intermediate=shared),
        partial_blocks=True,
    )


def _checkpoint_config(arguments: argparse.Namespace, arch: arches.Arch) -> MoEConfig:
    from jaxmoe.checkpoint import families
    from jaxmoe.checkpoint.reader import read_json

    config = read_json(arguments.checkpoint / "config.json")
    family = families.family_of(config)
    layers = families.size(config, "num_hidden_layers")
    layer = arguments.layer
    if layer is None:
        layer = next((i for i in range(layers) if families.is_moe_layer(config, i)), None)
        if layer is None:
            raise CheckpointError(f"{arguments.checkpoint}: config.json has no layer with experts")
    if not 0 <= layer < layers or not families.is_moe_layer(config, layer):
        raise CheckpointError(
            f"--layer {layer}: {arguments.checkpoint} has {layers} layers, and this one has no experts"
        )
    experts, shared_format = _formats(config)
    if arguments.format is not None:
        experts = FORMATS[arguments.format]
    shared = arguments.shared_intermediate or families.shared_intermediate(config)
    return MoEConfig(
        hidden=families.size(config, "hidden_size"),
        intermediate=families.size(config, family.intermediate),
        router=families.router_config(config, layer),
        weights=experts if arguments.format else _loaded_as(experts, arch),
        shared=SharedExperts(intermediate=shared, weights=_loaded_as(shared_format, arch)) if shared else None,
        partial_blocks=True,
    )


def _formats(config: dict[str, object]) -> tuple[WeightFormat, WeightFormat]:
    """The formats of routed and of shared experts in a release."""
    quant = config.get("quantization_config")
    quant = quant if isinstance(quant, dict) else {}
    fp8 = FP8BlockUE8M0 if quant.get("scale_fmt") == "ue8m0" else FP8Block
    others = fp8 if quant.get("quant_method") == "fp8" else BF16
    fp4 = quant.get("quant_method") == "mxfp4" or config.get("expert_dtype") == "fp4"
    return MXFP4 if fp4 else others, others


def _loaded_as(fmt: WeightFormat, arch: arches.Arch) -> WeightFormat:
    """What weights of a format must be loaded as to have a kernel, with a note when that is another format."""
    if not fmt.quantized:
        return fmt
    if arch.family == "sm90":
        kept = FP8Block
    else:
        kept = FP8BlockUE8M0 if fmt == FP8Block else fmt
    if kept != fmt:
        print(f"{fmt.name} has no kernel on {arch.name}: compiling for weights loaded as {kept.name}")
    return kept
