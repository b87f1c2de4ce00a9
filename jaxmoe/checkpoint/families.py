"""What each model family calls its tensors and how its config.json describes a layer: data, read by one set of rules.

Sources: transformers' ``models/<family>/modular_*.py`` (Qwen2-MoE, OLMoE, DeepSeek-V3, GLM-4-MoE, ERNIE-4.5 and
MiniMax-M2), ``configuration_deepseek_v4.py`` and ``conversion_mapping.py``; Mixtral, Qwen3-MoE, gpt-oss and DeepSeek-V4
from checkpoints that transformers wrote. The keys of DeepSeek-V4's, MiniMax-M2's, GLM-4.5's and Kimi-K2's config.json
were read in others' transcriptions, not in the releases; Kimi-K2 says that it reuses the layout of DeepSeek-V3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxmoe.config import Activation, RouterConfig
from jaxmoe.errors import CheckpointError

Config = dict[str, Any]
PREFIXES = ("model.layers.{}.", "layers.{}.")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "moe_k")
_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Names:
    """Tensor names, relative to a layer's MoE block.

    Per expert e: ``experts.{e}.{gate}.weight``; stacked: ``experts.gate_up_proj`` and ``experts.down_proj``. Where a
    field holds several names, each is that of some release.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate.weight"
    logit_bias: str = "router.bias"
    correction_bias: tuple[str, ...] = ("gate.e_score_correction_bias",)
    tid2eid: str = "gate.tid2eid"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate.weight"


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family's config.json configures a layer.

    Attributes:
      names: the release's naming, and where it differs that of transformers' own modules.
      intermediate: the key that holds I.
      score: the scores, where the config has no ``scoring_func``.
      softmax_after_topk: see RouterConfig.
      renormalize: whether the K weights are divided by their sum; None: ``norm_topk_prob`` says.
      renormalize_floor: the key of the divisor's floor.
      grouped: ``n_group`` and ``topk_group`` count.
      scaled: ``routed_scaling_factor`` counts.
      correction_bias, logit_bias, expert_bias: the checkpoint holds them.
      shared_width, shared_count: the key that holds the shared experts' width, or their number (each I wide).
      shared_gate: the shared output is gated.
      interleaved: fused gate_up rows alternate, and unquantised stacks are stored [E, in, out] (gpt-oss).
      activation: of all experts.
      sparse: the config's keys that say which layers have a MoE block.
      hashed: some layers route by token id.
    """

    names: tuple[Names, ...] = (Names(),)
    intermediate: str = "moe_intermediate_size"
    score: str = "softmax"
    softmax_after_topk: bool = False
    renormalize: bool | None = None
    renormalize_floor: str | None = None
    grouped: bool = False
    scaled: bool = False
    correction_bias: bool = False
    logit_bias: bool = False
    expert_bias: bool = False
    shared_width: str | None = None
    shared_count: str | None = None
    shared_gate: bool = False
    interleaved: bool = False
    activation: Callable[[Config], Activation] = lambda config: Activation()
    sparse: tuple[str, ...] = ()
    hashed: bool = False


def _clamped(config: Config) -> Activation:
    return Activation(kind="clamped", limit=float(value(config, "swiglu_limit")))


def _oai(config: Config) -> Activation:
    # The first releases' config.json has no swiglu_alpha: 1.702 was then a constant of the model.
    return Activation(
        kind="oai",
        limit=float(value(config, "swiglu_limit")),
        alpha=float(value(config, "swiglu_alpha", default=1.702)),
    )


_W123 = Names(block="block_sparse_moe", gate="w1", up="w3", down="w2")
_DEEPSEEK_V3 = Family(
    score="sigmoid",
    grouped=True,
    scaled=True,
    correction_bias=True,
    shared_count="n_shared_experts",
    sparse=("first_k_dense_replace", "moe_layer_freq"),
)
_QWEN_SPARSE = ("mlp_only_layers", "decoder_sparse_step")

FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        names=(_W123, Names()), intermediate="intermediate_size", softmax_after_topk=True, renormalize=True
    ),
    "qwen2_moe": Family(
        names=(Names(shared="shared_expert"),),
        shared_width="shared_expert_intermediate_size",
        shared_gate=True,
        sparse=_QWEN_SPARSE,
    ),
    "qwen3_moe": Family(sparse=_QWEN_SPARSE),
    "olmoe": Family(intermediate="intermediate_size"),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe": _DEEPSEEK_V3,
    "deepseek_v4": Family(
        names=(
            Names(block="ffn", gate="w1", up="w3", down="w2", correction_bias=("gate.bias",)),
            Names(),
        ),
        score="sqrtsoftplus",
        scaled=True,
        correction_bias=True,
        shared_count="n_shared_experts",
        activation=_clamped,
        hashed=True,
    ),
    "gpt_oss": Family(
        names=(Names(router="router.weight"),),
        intermediate="intermediate_size",
        softmax_after_topk=True,
        renormalize=True,
        logit_bias=True,
        expert_bias=True,
        interleaved=True,
        activation=_oai,
    ),
    "ernie4_5_moe": Family(
        names=(
            Names(correction_bias=("moe_statics.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias")),
        ),
        renormalize=True,
        renormalize_floor="moe_norm_min",
        correction_bias=True,
        shared_count="moe_num_shared_experts",
        sparse=("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
    ),
    "minimax_m2": Family(
        names=(
            dataclasses.replace(_W123, correction_bias=("e_score_correction_bias",)),
            Names(correction_bias=("e_score_correction_bias",)),
        ),
        intermediate="intermediate_size",
        score="sigmoid",
        renormalize=True,
        correction_bias=True,
    ),
}

# For each key that makes some layers dense: is this layer's block a MoE, given the key's value?
_SPARSE: dict[str, Callable[[Any, int], bool]] = {
    "first_k_dense_replace": lambda first, layer: layer >= first,
    "moe_layer_freq": lambda freq, layer: bool(freq[layer]) if isinstance(freq, list) else layer % freq == 0,
    "mlp_only_layers": lambda dense, layer: layer not in dense,
    "decoder_sparse_step": lambda step, layer: (layer + 1) % step == 0,
    "moe_layer_start_index": lambda first, layer: layer >= first,
    "moe_layer_end_index": lambda last, layer: last < 0 or layer <= last,
    "moe_layer_interval": lambda step, layer: (layer + 1) % step == 0,
    "mlp_layer_types": lambda types, layer: types[layer] != "dense",
}
# A value that would change what the layer computes in a way that no setting here describes.
_ONLY = {
    "hidden_act": ("silu", "swish"),
    "topk_method": ("noaux_tc",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
    "moe_gate_act": ("softmax",),
    "use_bias": (False,),
    "mlp_bias": (False,),
}


def value(config: Config, *keys: str, default: Any = _REQUIRED) -> Any:
    """The value of whichever of ``keys`` config.json has; those that are there must agree.

    Raises:
      CheckpointError: none is there and there is no default, or two contradict each other.
    """
    found = {key: config[key] for key in keys if config.get(key) is not None}
    if not found:
        if default is _REQUIRED:
            raise CheckpointError(f"config.json lacks {' or '.join(map(repr, keys))}")
        return default
    first = next(iter(found.values()))
    if any(v != first for v in found.values()):
        raise CheckpointError(f"config.json contradicts itself: {found}")
    return first


def size(config: Config, *keys: str) -> int:
    """As :func:`value`, for a positive integer."""
    result = value(config, *keys)
    if type(result) is not int or result < 1:
        raise CheckpointError(
            f"config.json: {' or '.join(map(repr, keys))} is {result!r}; it must be a positive integer"
        )
    return result


def family_of(config: Config) -> Family:
    """The family that config.json's ``model_type`` names."""
    model_type = value(config, "model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(f"config.json: model_type {model_type!r} is not one of {', '.join(FAMILIES)}")
    for key, allowed in _ONLY.items():
        if config.get(key) is not None and config[key] not in allowed:
            raise CheckpointError(f"config.json: {key} is {config[key]!r}; only {allowed[0]!r} is supported")
    return FAMILIES[model_type]


def is_moe_layer(config: Config, layer: int) -> bool:
    """Whether this layer's feed-forward block is a mixture of experts."""
    for key in (*family_of(config).sparse, "mlp_layer_types"):
        try:
            if config.get(key) is not None and not _SPARSE[key](config[key], layer):
                return False
        except (TypeError, IndexError, ZeroDivisionError) as e:
            raise CheckpointError(f"config.json: {key} is {config[key]!r}, which says nothing of layer {layer}") from e
    return True


def _is_hash_layer(config: Config, layer: int) -> bool:
    types = config.get("mlp_layer_types")
    return types[layer] == "hash_moe" if types is not None else layer < value(config, "num_hash_layers")


def router_config(config: Config, layer: int) -> RouterConfig:
    """The router of one layer."""
    family = family_of(config)
    hashed = family.hashed and _is_hash_layer(config, layer)
    score = value(config, "scoring_func", default=family.score)
    if score not in _SCORES:
        raise CheckpointError(f"config.json: scoring_func is {score!r}; choose one of {', '.join(_SCORES)}")
    renormalize = family.renormalize
    extra: Config = {}
    if family.grouped:
        extra |= {"num_groups": size(config, "n_group"), "top_groups": size(config, "topk_group")}
    if family.scaled:
        extra["scaling_factor"] = float(value(config, "routed_scaling_factor"))
    if family.renormalize_floor is not None and config.get(family.renormalize_floor) is not None:
        extra["renormalize_floor"] = float(config[family.renormalize_floor])
    return RouterConfig(
        num_experts=size(config, *_NUM_EXPERTS),
        top_k=size(config, *_TOP_K),
        score=score,
        softmax_after_topk=family.softmax_after_topk,
        renormalize=bool(value(config, "norm_topk_prob")) if renormalize is None else renormalize,
        correction_bias=family.correction_bias and not hashed,
        logit_bias=family.logit_bias,
        hash_routing=hashed,
        **extra,
    )


def shared_intermediate(config: Config) -> int:
    """Total width of the shared experts, 0 without."""
    family = family_of(config)
    if family.shared_width is not None:
        return size(config, family.shared_width)
    count = 0 if family.shared_count is None else value(config, family.shared_count, default=0)
    return count * size(config, family.intermediate) if count else 0


def weight_block(config: Config) -> tuple[int, int] | None:
    """Rows and columns of one FP8 scale as config.json says, None for one scale per tensor.

    Raises:
      CheckpointError: a quantisation method that is not known, or a malformed block size.
    """
    quant = config.get("quantization_config") or {}
    method = quant.get("quant_method", "fp8")
    if method not in ("fp8", "mxfp4"):
        raise CheckpointError(
            f"config.json: quant_method {method!r} is not supported; use a bf16, fp8 or mxfp4 release of the model"
        )
    block = quant.get("weight_block_size")
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
        raise CheckpointError(f"config.json: weight_block_size is {block!r}; it must be two positive integers")
    return block[0], block[1]
