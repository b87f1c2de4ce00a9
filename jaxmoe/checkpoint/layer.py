"""One MoE layer of a checkpoint, found and checked by config.json and the headers alone; nothing of it is read yet."""

from __future__ import annotations

from pathlib import Path

from jaxmoe.checkpoint import families
from jaxmoe.checkpoint.families import Config
from jaxmoe.checkpoint.reader import CheckpointReader, read_json
from jaxmoe.checkpoint.slots import FLOATS, Block, find_experts, find_shared
from jaxmoe.config import MoEConfig, SharedExperts
from jaxmoe.errors import CheckpointError
from jaxmoe.quant.formats import WeightFormat


def moe_layers(path: str | Path) -> list[int]:
    """Indices of a checkpoint's MoE layers, as its config.json says.

    Args:
      path: the checkpoint's directory.

    Raises:
      CheckpointError: config.json is missing, malformed, or of a model that is not known.
    """
    return _moe_layers(read_json(Path(path) / "config.json"))


def _moe_layers(config: Config) -> list[int]:
    return [n for n in range(families.size(config, "num_hidden_layers")) if families.is_moe_layer(config, n)]


class FoundLayer:
    """Everything one layer's block holds: claimed, checked, and each a view of a mapped file.

    Raises:
      CheckpointError: a tensor is missing, unexpected, given twice, malformed, or of another shape or dtype; the
        layer is dense; config.json lacks a key or asks for something unknown.
    """

    def __init__(self, path: str | Path, layer: int) -> None:
        self.config = read_json(Path(path) / "config.json")
        self.family = families.family_of(self.config)
        layers = families.size(self.config, "num_hidden_layers")
        if layer not in range(layers):
            raise CheckpointError(f"{path}: has no layer {layer}; layers are 0 to {layers - 1}")
        if not families.is_moe_layer(self.config, layer):
            raise CheckpointError(
                f"{path}: layer {layer} has no MoE, its MLP is dense; MoE layers are {_moe_layers(self.config)}"
            )
        self.router = families.router_config(self.config, layer)
        self.hidden = families.size(self.config, "hidden_size")
        self.intermediate = families.size(self.config, self.family.intermediate)
        self.activation = self.family.activation(self.config)
        self.shared_width = families.shared_intermediate(self.config)
        block = Block(CheckpointReader(path), self.family, layer)
        self.name = block.prefix.removesuffix(".")
        self._claim(block, families.weight_block(self.config))
        block.finish()

    def _claim(self, block: Block, fp8_block: tuple[int, int] | None) -> None:
        names, router, e, h, i = block.names, self.router, self.router.num_experts, self.hidden, self.intermediate
        self.kernel = block.array([names.router], "the router", FLOATS, (e, h))
        self.correction_bias = self.logit_bias = self.tid2eid = self.shared = self.shared_gate = None
        self.gate_up_bias = self.down_bias = None
        if router.correction_bias:
            what = "the router's correction bias"
            self.correction_bias = block.array(names.correction_bias, what, FLOATS, (e,), (1, e))
        if router.logit_bias:
            self.logit_bias = block.array([names.logit_bias], "the router's bias", FLOATS, (e,))
        if router.hash_routing:
            shape = (families.size(self.config, "vocab_size"), router.top_k)
            self.tid2eid = block.array([names.tid2eid], "the hash layer's table", ("I64", "I32"), shape)
        self.experts = find_experts(block, self.family, e, h, i, fp8_block)
        declared, stored = self.config.get("expert_dtype"), {4: "fp4", 8: "fp8", 16: "bf16"}[self.experts.format.bits]
        if declared is not None and declared != stored:
            raise CheckpointError(f"config.json: expert_dtype is {declared!r}, but {self.name}'s experts are {stored}")
        if self.family.expert_bias:
            self.gate_up_bias = block.array(["experts.gate_up_proj_bias"], "gate and up's bias", FLOATS, (e, 2 * i))
            self.down_bias = block.array(["experts.down_proj_bias"], "down's bias", FLOATS, (e, h))
        if self.shared_width:
            self.shared = find_shared(block, h, self.shared_width, fp8_block)
            if self.family.shared_gate:
                self.shared_gate = block.array([names.shared_gate], "the shared expert's gate", FLOATS, (1, h))

    def moe_config(
        self, weights: WeightFormat, shared_weights: WeightFormat, width: int, shared_width: int, fused: bool
    ) -> MoEConfig:
        """The layer's config with experts of these formats and widths (of a shard: its own)."""
        shared = None
        if self.shared is not None:
            own = None if shared_weights == weights else shared_weights
            gate = self.shared_gate is not None
            shared = SharedExperts(intermediate=shared_width, gate=gate, fused=fused, weights=own)
        blocks = [(weights, self.hidden), (weights, width), *([(shared_weights, shared_width)] if shared else [])]
        return MoEConfig(
            hidden=self.hidden,
            intermediate=width,
            router=self.router,
            weights=weights,
            activation=self.activation,
            expert_bias=self.family.expert_bias,
            shared=shared,
            partial_blocks=any(size % fmt.block for fmt, size in blocks),
        )
