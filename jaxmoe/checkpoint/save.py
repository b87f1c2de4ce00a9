"""Writing checkpoints: the way back of :mod:`jaxmoe.checkpoint.load`, bit for bit."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jaxmoe.checkpoint import families
from jaxmoe.checkpoint.families import PREFIXES, Config, Names
from jaxmoe.checkpoint.reader import DTYPES, INDEX, SINGLE
from jaxmoe.config import MoEConfig
from jaxmoe.errors import CheckpointError, FormatError
from jaxmoe.layer.checks import check_params, stored_width
from jaxmoe.layer.params import ExpertWeights, MoEParams
from jaxmoe.quant.formats import BF16, MXFP4, FP8Block, FP8BlockUE8M0
from jaxmoe.quant.sharding import slice_n
from jaxmoe.quant.tensors import GroupedWeight
from jaxmoe.quant.weights import canonical_scales

Tensors = dict[str, np.ndarray]

# What a matrix's scale is called, by format. The last two are what DeepSeek-V4 releases hold, and no other family does.
_SCALE = {BF16: None, FP8Block: "weight_scale_inv", FP8BlockUE8M0: "scale", MXFP4: "scale"}
_ONLY_V4 = (FP8BlockUE8M0, MXFP4)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Layer(Protocol):
    """A layer to save: what :func:`jaxmoe.checkpoint.load_moe` gives, or a :class:`jaxmoe.nn.MoE`."""

    @property
    def config(self) -> MoEConfig:
        """What the layer is."""
        ...

    @property
    def params(self) -> MoEParams:
        """Its parameters, all experts of them."""
        ...


def save_moe(
    path: str | Path, config: Config, layers: Mapping[int, Layer], tensors: Mapping[str, np.ndarray] | None = None
) -> Path:
    """Writes a checkpoint in the Hugging Face manner: config.json and one model.safetensors.

    Every layer keeps its format, and loading it gives the same bits: BF16 stacks as bf16 or f32, FP8Block with f32
    ``weight_scale_inv``; for DeepSeek-V4 also MXFP4 (two codes a byte, as int8) and FP8BlockUE8M0, with e8m0 ``scale``.
    Router and biases are written in f32. Existing files are replaced once the new ones are complete.

    Args:
      path: the directory; made if it is not there.
      config: what config.json is to say; ``quantization_config`` and ``expert_dtype`` follow from the formats, whatever
        it says of them.
      layers: every MoE layer of the model by its index: objects with ``config`` and ``params``, such as
        :class:`jaxmoe.nn.MoE` or what :func:`load_moe` gives.
      tensors: everything that is not in a MoE block, by full name.

    Returns:
      The directory.

    Raises:
      CheckpointError: ``config`` does not describe ``layers``, a layer is missing, a tensor has a MoE block's name or a
        dtype that safetensors has no name for, or the directory holds a checkpoint of several files.
      FormatError: the family cannot hold a layer's format; it stores experts in a way that is not written (gpt-oss).
      ShapeError: parameters do not fit their config.
    """
    path, family = Path(path), families.family_of(config)
    count = families.size(config, "num_hidden_layers")
    expected = [n for n in range(count) if families.is_moe_layer(config, n)]
    if sorted(layers) != expected:
        raise CheckpointError(f"layers to save are {sorted(layers)}; by config.json the MoE layers are {expected}")
    if (path / INDEX).exists():
        raise CheckpointError(f"{path}: holds {INDEX}, a checkpoint of several files; save to another directory")
    for layer in layers.values():
        _check_writable(layer.config, config["model_type"])
    config = {k: v for k, v in config.items() if k not in ("quantization_config", "expert_dtype")}
    config |= _formats(config, layers)
    found: Tensors = dict(tensors or {})
    for n, layer in layers.items():
        _check_described(config, n, layer.config)
        prefix = PREFIXES[0].format(n) + family.names[0].block + "."
        taken = next((name for name in found if name.startswith(prefix)), None)
        if taken is not None:
            raise CheckpointError(f"tensor {taken} has a name of layer {n}'s MoE block, which is written from layers")
        found |= {prefix + name: a for name, a in moe_tensors(layer.params, layer.config, config["model_type"]).items()}
    path.mkdir(parents=True, exist_ok=True)
    _replace(path / SINGLE, _safetensors(found))
    _replace(path / "config.json", [json.dumps(config, indent=1).encode()])
    return path


def moe_tensors(params: MoEParams, config: MoEConfig, model_type: str) -> Tensors:
    """The tensors of one MoE block, by their names within it, as the family's releases call them.

    Args:
      params: all of the layer's parameters. config: what they are.
      model_type: the family, as config.json names it.

    Raises:
      FormatError: the family cannot hold the formats, or its way of storing experts is not written.
      CheckpointError: the family is unknown.
      ShapeError: parameters do not fit the config.
    """
    family = families.family_of({"model_type": model_type})
    _check_writable(config, model_type)
    check_params(params, config)
    names, router = family.names[0], params.router
    tensors: Tensors = {names.router: np.asarray(router.kernel).T}
    if router.correction_bias is not None:
        tensors[names.correction_bias[0]] = np.asarray(router.correction_bias)
    if router.tid2eid is not None:
        tensors[names.tid2eid] = np.asarray(router.tid2eid).astype(np.int64)
    prefixes = [f"experts.{e}." for e in range(config.router.num_experts)]
    tensors |= _mlp(params.experts, prefixes, config.intermediate, names)
    if params.shared is not None and params.shared.experts is not None and config.shared is not None:
        width = config.shared.intermediate
        tensors |= _mlp(params.shared.experts, [names.shared + "."], width, names)
        if params.shared.gate is not None:
            tensors[names.shared_gate] = np.asarray(params.shared.gate)[None]
    return tensors


def _check_writable(config: MoEConfig, model_type: str) -> None:
    """Refuses what the family's releases cannot hold, and what is not written."""
    if families.family_of({"model_type": model_type}).interleaved or config.expert_bias:
        raise FormatError(f"{model_type} experts with biases and interleaved rows are not written; load them only")
    if config.fused_slots:
        raise FormatError("fused shared experts are not written; load the layer with fuse_shared=False")
    held = [fmt for fmt in _SCALE if model_type == "deepseek_v4" or fmt not in _ONLY_V4]
    for fmt in (config.weights, config.shared_format):
        if fmt not in held:
            raise FormatError(
                f"{model_type} checkpoints cannot hold {fmt.name}; convert the layer to one of "
                f"{', '.join(f.name for f in held)} with jaxmoe.quant.convert"
            )


def _mlp(weights: ExpertWeights, prefixes: list[str], width: int, names: Names) -> Tensors:
    """Gate, up and down of every expert; ``width`` is I, which the stacks may hold padded."""
    gate_up, stored = weights.gate_up, stored_width(width, weights.gate_up.format)
    stacks = {
        names.gate: slice_n(gate_up, [(0, width)]),
        names.up: slice_n(gate_up, [(stored, stored + width)]),
        names.down: weights.down,
    }
    tensors: Tensors = {}
    for part, stack in stacks.items():
        values, scales = _canonical(stack)
        for e, prefix in enumerate(prefixes):
            tensors[f"{prefix}{part}.weight"] = values[e]
            if scales is not None:
                tensors[f"{prefix}{part}.{_SCALE[stack.format]}"] = scales[e]
    return tensors


def _canonical(w: GroupedWeight) -> tuple[np.ndarray, np.ndarray | None]:
    """Values and scales as releases hold them: [E, N, K or ⌈K/2⌉] and [E, blocks, blocks]."""
    fmt, scales = w.format, canonical_scales(w)
    values = np.asarray(w.values)[:, :, : -(-w.k // (2 if fmt.bits == 4 else 1))]
    values = values.view(np.int8) if fmt.bits == 4 else values
    if scales is None:
        return values, None
    scales = np.asarray(scales)
    if fmt.scale == "float32":
        return values, scales
    blocks = scales[:, :: fmt.block_n]
    if not np.array_equal(np.repeat(blocks, fmt.block_n, axis=1)[:, : w.n], scales):
        raise FormatError(
            f"{fmt.name} weights hold scales that change within {fmt.block_n} rows, as a cut of other weights does; "
            "save the weights that they were cut from"
        )
    return values, blocks.view(ml_dtypes.float8_e8m0fnu)


def _formats(config: Config, layers: Mapping[int, Layer]) -> Config:
    """What config.json says of the formats."""
    routed = {layer.config.weights for layer in layers.values()}
    if len(routed) > 1:
        names = ", ".join(sorted(fmt.name for fmt in routed))
        raise FormatError(f"layers' experts are {names}; config.json names one format for all, convert them to it")
    used = routed | {layer.config.shared_format for layer in layers.values()}
    said: Config = {}
    if config["model_type"] == "deepseek_v4":
        said["expert_dtype"] = {4: "fp4", 8: "fp8", 16: "bf16"}[max(fmt.bits for fmt in routed)]
    if any(fmt.bits == 8 for fmt in used):
        quant: Config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        quant |= {"scale_fmt": "ue8m0"} if FP8BlockUE8M0 in used else {}
        said["quantization_config"] = quant | {"weight_block_size": [128, 128]}
    return said


def _check_described(config: Config, layer: int, moe: MoEConfig) -> None:
    """Refuses a config.json from which another layer than ``moe`` would be loaded."""
    family = families.family_of(config)
    says = {
        "hidden": families.size(config, "hidden_size"),
        "intermediate": families.size(config, family.intermediate),
        "router": families.router_config(config, layer),
        "activation": family.activation(config),
        "shared intermediate": families.shared_intermediate(config),
        "shared gate": family.shared_gate,
    }
    shared = moe.shared
    have = {name: getattr(moe, name) for name in ("hidden", "intermediate", "router", "activation")}
    have["shared intermediate"] = 0 if shared is None else shared.intermediate
    have["shared gate"] = shared is not None and shared.gate
    for name, value in says.items():
        if value != have[name]:
            raise CheckpointError(f"layer {layer}: config.json says {name} is {value}, the layer's is {have[name]}")


def _safetensors(tensors: Tensors) -> list[Any]:
    """A file's parts: length of the header, header, and each tensor's bytes; the widest dtypes lie first, aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[Any] = []
    end = 0
    for name, a in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        if a.dtype not in _NAMES:
            raise CheckpointError(
                f"{name} is {a.dtype}, which safetensors has no name for; cast it to {', '.join(DTYPES)}"
            )
        start, end = end, end + a.nbytes
        header[name] = {"dtype": _NAMES[a.dtype], "shape": list(a.shape), "data_offsets": [start, end]}
        parts.append(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)), text, *parts]


def _replace(path: Path, parts: list[Any]) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as f:
            for part in parts:
                f.write(part)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
