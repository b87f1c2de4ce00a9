"""What the model is (:class:`MoEConfig`) and how it runs (:class:`Execution`).

All of these are frozen and hashable, so that they are static arguments of ``jax.jit``. Letters used here and in
every docstring of the package: T tokens on this device, H hidden, I expert intermediate, E experts, El local
experts, K experts per token, R expert-parallel ranks, M rows of a grouped buffer, S scale groups along a row.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.quant.formats import BF16, WeightFormat

Score = Literal["softmax", "sigmoid", "sqrtsoftplus", "raw"]
GroupScore = Literal["top2_sum", "max"]
ActivationKind = Literal["silu", "clamped", "oai", "situ"]
Layout = Literal["psum", "masked", "contiguous"]


def _choice(name: str, value: object, kind: object) -> None:
    allowed = get_args(kind)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, allowed))}")


def _positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ShapeError(f"{name} is {value!r}; it must be an integer of at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Which K of E experts a token goes to, and with what weights.

    Attributes:
      num_experts: E, the routed experts in the stacks (shared experts are not counted).
      top_k: K.
      score: how logits become scores; ``raw`` uses the logits themselves.
      softmax_after_topk: take the top K logits first and the softmax over those K (gpt-oss, Mixtral).
      renormalize: divide the K chosen scores by their sum (a softmax over K sums to 1 anyway).
      renormalize_floor: the divisor is at least this, so that K scores of 0 give weights of 0 (ERNIE-4.5's
        ``moe_norm_min`` is 1e-12).
      num_groups, top_groups: grouped top-k: only experts of the best ``top_groups`` of ``num_groups`` equal groups
        can be chosen (DeepSeek-V3).
      group_score: what a group is ranked by: the sum of its two best selection scores, or its best.
      correction_bias: the parameters hold a bias [E] added for selection only, never to the weights.
      logit_bias: the parameters hold a bias [E] added to the logits (gpt-oss).
      scaling_factor: ``routed_scaling_factor``; the router multiplies the final weights by it, once.
      hash_routing: ids come from the table ``tid2eid[token id]``; weights are still the scores at those ids.
      logical_experts: experts that the router knows, where the stacks hold some of them more than once: the parameters
        then say where the copies are (:func:`jaxmoe.balance.place_experts`). None: all of E, each once.
    """

    num_experts: int
    top_k: int
    score: Score = "softmax"
    softmax_after_topk: bool = False
    renormalize: bool = True
    renormalize_floor: float = 1e-20
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2_sum"
    correction_bias: bool = False
    logit_bias: bool = False
    scaling_factor: float = 1.0
    hash_routing: bool = False
    logical_experts: int | None = None

    def __post_init__(self) -> None:
        e, k, n, g = self.logical, self.top_k, self.num_groups, self.top_groups
        _positive(num_experts=self.num_experts, logical_experts=e, top_k=k, num_groups=n, top_groups=g)
        _choice("score", self.score, Score)
        _choice("group_score", self.group_score, GroupScore)
        if e > self.num_experts:
            raise ShapeError(
                f"logical_experts is {e} but the stacks hold only {self.num_experts}; every expert needs a place"
            )
        if k > e:
            raise ShapeError(f"top_k is {k} but there are only {e} experts; lower top_k to at most {e}")
        if e % n:
            raise ShapeError(f"num_experts {e} does not divide into num_groups {n}; choose a divisor of {e}")
        if g > n:
            raise ShapeError(f"top_groups is {g} but there are only {n} groups; lower top_groups to at most {n}")
        if k > g * (e // n):
            raise ShapeError(
                f"top_k is {k} but {g} selected groups of {e // n} hold only {g * (e // n)} experts; "
                "raise top_groups or lower top_k"
            )
        if self.group_score == "top2_sum" and n > 1 and e // n < 2:
            raise ShapeError(
                f"group_score 'top2_sum' needs groups of at least 2 experts, got {e} experts in {n} groups; "
                "use fewer groups or group_score='max'"
            )
        if not 1e-37 <= self.renormalize_floor < math.inf:
            raise ValueError(f"renormalize_floor is {self.renormalize_floor}; it must be finite and at least 1e-37")
        if not math.isfinite(self.scaling_factor):
            raise ValueError(f"scaling_factor is {self.scaling_factor}; it must be finite (1.0 leaves weights alone)")
        if self.softmax_after_topk and self.score != "softmax":
            raise ValueError(f"softmax_after_topk goes with score 'softmax', not {self.score!r}")
        if self.hash_routing and (n > 1 or self.correction_bias):
            raise ValueError("hash_routing takes ids from a table: num_groups must be 1 and correction_bias False")

    @property
    def logical(self) -> int:
        """Experts that the router chooses among."""
        return self.num_experts if self.logical_experts is None else self.logical_experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activation:
    """The gated activation between the two expert GEMMs, computed in f32 from gate g and up u.

    ``silu``: g·σ(g)·u. ``clamped``: g ← min(g, limit), u ← clip(u, ±limit), then silu. ``oai`` (gpt-oss): clamped
    likewise, then g·σ(alpha·g)·(u + 1). ``situ`` (Kimi K3): beta_gate·tanh(g/beta_gate)·σ(g) ·
    beta_up·tanh(u/beta_up).

    Attributes:
      limit: clamp bound of ``clamped`` and ``oai``.
      keep_fp32: quantise the f32 product; otherwise the product is rounded to bf16 first (SGLang's GPU default).
    """

    kind: ActivationKind = "silu"
    limit: float | None = None
    alpha: float = 1.702
    beta_gate: float = 1.0
    beta_up: float = 1.0
    keep_fp32: bool = False

    def __post_init__(self) -> None:
        _choice("activation kind", self.kind, ActivationKind)
        if (self.kind in ("clamped", "oai")) != (self.limit is not None):
            raise ValueError(
                f"activation {self.kind!r} with limit {self.limit}: a limit goes with 'clamped' and 'oai' only"
            )
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"activation limit is {self.limit}; it must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedExperts:
    """Experts that see every token.

    Attributes:
      intermediate: total intermediate width of all shared experts together.
      gate: multiply the shared output by σ(x·gate vector) (Qwen2-MoE).
      fused: run them as extra expert slots of the routed GEMMs; needs the routed experts' format and an
        ``intermediate`` that is a multiple of I.
      weights: format of a separate shared MLP; None takes the routed experts' format.
    """

    intermediate: int
    gate: bool = False
    fused: bool = False
    weights: WeightFormat | None = None

    def __post_init__(self) -> None:
        _positive(shared_intermediate=self.intermediate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One MoE layer as the model defines it.

    Attributes:
      hidden: H. intermediate: I, of one routed expert.
      weights: the format the expert weights are kept in.
      expert_bias: the parameters hold biases for both expert projections (gpt-oss).
      partial_blocks: accept an H or I that is not a multiple of the format's block; the weights are then padded
        inside with zeros, which never shows outside.
    """

    hidden: int
    intermediate: int
    router: RouterConfig
    weights: WeightFormat = BF16
    activation: Activation = Activation()
    expert_bias: bool = False
    shared: SharedExperts | None = None
    partial_blocks: bool = False

    def __post_init__(self) -> None:
        _positive(hidden=self.hidden, intermediate=self.intermediate)
        formats = [("expert", self.weights, {"hidden": self.hidden, "intermediate": self.intermediate})]
        if self.shared is not None:
            formats.append(("shared expert", self.shared_format, {"shared intermediate": self.shared.intermediate}))
            if self.shared.fused:
                self._check_fused(self.shared)
        if not self.partial_blocks:
            for what, fmt, sizes in formats:
                for name, size in sizes.items():
                    if size % fmt.block:
                        raise ShapeError(
                            f"{name} {size} is not a multiple of {fmt.name}'s {what} block {fmt.block}; set "
                            "partial_blocks=True to have the weights padded inside, or keep them in BF16"
                        )

    def _check_fused(self, shared: SharedExperts) -> None:
        if shared.intermediate % self.intermediate:
            raise ShapeError(
                f"fused shared experts need an intermediate that is a multiple of the routed experts' "
                f"{self.intermediate}, got {shared.intermediate}; set fused=False"
            )
        if self.shared_format != self.weights:
            raise FormatError(
                f"fused shared experts must have the routed experts' format {self.weights.name}, got "
                f"{self.shared_format.name}; set fused=False or convert the weights"
            )

    @property
    def shared_format(self) -> WeightFormat:
        """Format of the shared experts."""
        own = self.shared.weights if self.shared is not None else None
        return self.weights if own is None else own

    @property
    def fused_slots(self) -> int:
        """Extra expert slots that fused shared experts take."""
        return self.shared.intermediate // self.intermediate if self.shared is not None and self.shared.fused else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a layer runs; never changes what it means beyond the format's tolerance.

    Attributes:
      backend: of the GEMMs: ``"auto"``, a backend's name, or names in order. A named backend never falls back. The
        other rooms run ``auto``, unless it is ``"reference"``, which goes for all.
      layout: how rows are grouped for the GEMMs; ``"auto"`` is masked for a few rows per expert where memory allows,
        else psum, see :func:`jaxmoe.layer.layout.choose_layout`.
      masked_capacity: rows per expert of the masked layout; None takes T (never fewer: nothing is dropped).
      masked_rows: rows of all experts together that ``"auto"`` may reserve for the masked layout where psum would do
        with fewer; None: no more than psum.
      row_alignment: rows each expert starts at a multiple of; None takes what the backend needs.
      quantize_activations: False runs quantised weights dequantised, on unquantised rows (the exact oracle).
      deterministic: a token's bits do not depend on batch size, position, rank or neighbours.
      forward_format: for training. Unquantised expert weights are quantised to this format for every forward pass, rows
        to match; the backward pass runs as if nothing were quantised (straight through), and computes the forward
        pass of the experts once more. Quantised weights stay as they are forward, are dequantised to x's dtype
        backward, and get no gradient themselves. None: what runs forward is what is differentiated.
    """

    backend: str | tuple[str, ...] = "auto"
    layout: Layout | Literal["auto"] = "auto"
    masked_capacity: int | None = None
    masked_rows: int | None = None
    row_alignment: int | None = None
    quantize_activations: bool = True
    deterministic: bool = False
    forward_format: WeightFormat | None = None

    def __post_init__(self) -> None:
        if self.forward_format is not None and not self.forward_format.quantized:
            raise FormatError(
                f"forward_format is {self.forward_format.name}, which is not quantised; leave it out to run "
                "unquantised weights as they are"
            )
        if self.forward_format is not None and not self.quantize_activations:
            raise ValueError(
                "forward_format quantises rows and weights, quantize_activations=False does not; choose one of them"
            )
        if self.layout != "auto":
            _choice("layout", self.layout, Layout)
        for name in ("masked_capacity", "masked_rows", "row_alignment"):
            if getattr(self, name) is not None:
                _positive(**{name: getattr(self, name)})
