"""The arguments that say which layer a command is about: sizes, or a checkpoint's config.json."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxmoe.config import MoEConfig, RouterConfig, SharedExperts
from jaxmoe.cuda.arch import Arch
from jaxmoe.errors import CheckpointError
from jaxmoe.ops import kernel_format
from jaxmoe.quant.formats import BF16, FORMATS, MXFP4, FP8Block, FP8BlockUE8M0, WeightFormat

_SHAPE = ("experts", "hidden", "intermediate", "top_k")


def add_layer_arguments(parser: argparse.ArgumentParser, experts: str) -> None:
    """Adds the options of a layer's sizes, or of a checkpoint.

    Args:
      parser: of the command.
      experts: what ``--experts`` means to it.
    """
    shape = parser.add_argument_group("the layer, by its sizes")
    shape.add_argument("--experts", type=int, metavar="E", help=experts)
    shape.add_argument("--hidden", type=int, metavar="H", help="width of a token")
    shape.add_argument("--intermediate", type=int, metavar="I", help="width of a routed expert")
    shape.add_argument("--top-k", type=int, metavar="K", help="experts per token")
    shape.add_argument("--shared-intermediate", type=int, metavar="I", help="width of all shared experts together")
    checkpoint = parser.add_argument_group("or by a checkpoint")
    checkpoint.add_argument("--checkpoint", type=Path, metavar="DIR", help="directory with a Hugging Face config.json")
    checkpoint.add_argument("--layer", type=int, metavar="N", help="the layer; by default the first with experts")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of how it runs: format, layout and numbers of tokens."""
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


def add_forward_format(parser: argparse.ArgumentParser) -> None:
    """Adds the option of training with a quantised forward pass."""
    formats = sorted(name for name, fmt in FORMATS.items() if fmt.quantized)
    text = "train: quantise unquantised experts to this in every forward pass, and run backward unquantised"
    parser.add_argument("--forward-format", choices=formats, help=text)


def forward_format(arguments: argparse.Namespace) -> WeightFormat | None:
    """What :func:`add_forward_format`'s option says, for ``Execution``."""
    return None if arguments.forward_format is None else FORMATS[arguments.forward_format]


def _tokens(text: str) -> tuple[int, ...]:
    try:
        tokens = tuple(int(part) for part in text.split(","))
    except ValueError:
        tokens = (0,)
    if min(tokens) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers such as 1,128,4096")
    return tokens


def layer_config(arguments: argparse.Namespace, arch: Arch | None) -> tuple[MoEConfig, list[str]]:
    """The layer that the arguments say, and notes about formats that are converted at load to run on ``arch``.

    Without ``arch`` every format stays what it is.

    Raises:
      CheckpointError, ValueError: they say too little, too much or what cannot be.
    """
    given = [f"--{name.replace('_', '-')}" for name in _SHAPE if getattr(arguments, name) is not None]
    if arguments.checkpoint is not None:
        if given:
            raise ValueError(f"--checkpoint says the sizes; leave out {', '.join(given)}")
        notes: list[str] = []
        return _checkpoint_config(arguments, arch, notes), notes
    if len(given) < len(_SHAPE):
        missing = [f"--{name.replace('_', '-')}" for name in _SHAPE if getattr(arguments, name) is None]
        raise ValueError(f"the layer's sizes are missing: pass {', '.join(missing)}, or --checkpoint DIR")
    if arguments.layer is not None:
        raise ValueError("--layer goes with --checkpoint")
    shared = arguments.shared_intermediate
    config = MoEConfig(
        hidden=arguments.hidden,
        intermediate=arguments.intermediate,
        router=RouterConfig(num_experts=arguments.experts, top_k=arguments.top_k),
        weights=FORMATS[arguments.format or "BF16"],
        shared=None if shared is None else SharedExperts(intermediate=shared),
        partial_blocks=True,
    )
    return config, []


def _checkpoint_config(arguments: argparse.Namespace, arch: Arch | None, notes: list[str]) -> MoEConfig:
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
        weights=experts if arguments.format else _loaded_as(experts, arch, notes),
        shared=SharedExperts(intermediate=shared, weights=_loaded_as(shared_format, arch, notes)) if shared else None,
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


def _loaded_as(fmt: WeightFormat, arch: Arch | None, notes: list[str]) -> WeightFormat:
    """What weights of a format must be loaded as to have a kernel; a note is added when that is another format."""
    kept = fmt if arch is None else kernel_format(fmt, arch)
    if arch is not None and kept != fmt:
        notes.append(f"{fmt.name} has no kernel on {arch.name}: taking weights as loaded in {kept.name}")
    return kept
