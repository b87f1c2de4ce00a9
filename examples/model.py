"""A small decoder in the manner of DeepSeek-V4, whose feed-forward layers are ``jaxmoe.nn.MoE``.

Tokens are bytes, so that there is no tokenizer. A block is RMSNorm, causal attention over a sliding window (plain
multi-head with RoPE, not DeepSeek's latent one), RMSNorm, mixture of experts. The first layers route by token id, the
others by learned scores with a correction bias; a shared expert sees every token. Input and output embedding are one.

In a checkpoint the MoE layers have DeepSeek-V4's names and formats, so that ``jaxmoe.checkpoint`` reads them. The rest
is bf16: ``model.embed.weight`` [V, H], ``model.norm.weight`` [H], and for layer N ``model.layers.N.attn_norm.weight``
and ``ffn_norm.weight`` [H], ``model.layers.N.attn.wq.weight``, ``wk``, ``wv`` and ``wo`` [H outputs, H inputs].
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import meshes
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import jaxmoe
from jaxmoe.balance import load_balancing_loss, router_z_loss
from jaxmoe.checkpoint import CheckpointReader, load_moe, save_moe
from jaxmoe.layer.build import make_params
from jaxmoe.ops import kernel_format
from jaxmoe.router import router_logits

Array = jax.Array
Cache = tuple[tuple[Array, Array], ...]

END = 256
"""The token between texts; those below it are bytes."""
FORMATS = {
    "BF16": (jaxmoe.BF16, jaxmoe.BF16),
    "FP8Block": (jaxmoe.FP8Block, jaxmoe.FP8Block),
    "MXFP4": (jaxmoe.MXFP4, jaxmoe.FP8BlockUE8M0),
}
"""Formats of routed and shared experts, by what the checkpoint is called; DeepSeek-V4 releases are the last."""
_KEYS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "moe_intermediate_size",
    "layers": "num_hidden_layers",
    "hash_layers": "num_hash_layers",
    "heads": "num_attention_heads",
    "window": "sliding_window",
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "swiglu_limit": "swiglu_limit",
    "scaling_factor": "routed_scaling_factor",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}
_FIXED = {
    "architectures": ["ExampleDecoder"],
    "model_type": "deepseek_v4",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": True,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the decoder; the defaults are those of the checkpoint in ``data/tiny_pydoc_mxfp4``."""

    vocab: int = END + 1
    hidden: int = 128
    intermediate: int = 128
    layers: int = 4
    hash_layers: int = 1
    heads: int = 4
    window: int = 128
    experts: int = 8
    top_k: int = 2
    swiglu_limit: float = 10.0
    scaling_factor: float = 1.5
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def moe(self, layer: int, weights: Any = jaxmoe.BF16, shared_weights: Any = None) -> jaxmoe.MoEConfig:
        """The MoE of one layer, with expert weights in these formats."""
        hashed = layer < self.hash_layers
        return jaxmoe.MoEConfig(
            hidden=self.hidden,
            intermediate=self.intermediate,
            router=jaxmoe.RouterConfig(
                num_experts=self.experts,
                top_k=self.top_k,
                score="sqrtsoftplus",
                scaling_factor=self.scaling_factor,
                hash_routing=hashed,
                correction_bias=not hashed,
            ),
            weights=weights,
            activation=jaxmoe.Activation(kind="clamped", limit=self.swiglu_limit),
            shared=jaxmoe.SharedExperts(intermediate=self.intermediate, weights=shared_weights),
        )


class Attention(nnx.Module):
    """Causal self-attention over the last ``window`` positions."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: Any):
        sizes = config.hidden, config.hidden
        linear = functools.partial(nnx.Linear, *sizes, use_bias=False, param_dtype=dtype, rngs=rngs)
        self.wq, self.wk, self.wv, self.wo = linear(), linear(), linear(), linear()
        self.config = config

    def __call__(self, x: Array, cache: tuple[Array, Array] | None, start: Array | int) -> tuple[Array, Any]:
        """x [B, T, H] at positions ``start``…; keys and values of earlier positions are in ``cache``."""
        batch, length, hidden = x.shape
        heads, size = self.config.heads, hidden // self.config.heads
        q, k, v = (w(x).reshape(batch, length, heads, size) for w in (self.wq, self.wk, self.wv))
        at = start + jnp.arange(length)
        q, k = rotate(q, at, self.config.rope_theta), rotate(k, at, self.config.rope_theta)
        if cache is not None:
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(old, new, start, 1) for old, new in zip(cache, (k, v), strict=True)
            )
        behind = at[:, None] - jnp.arange(k.shape[1])
        seen = (behind >= 0) & (behind < self.config.window)
        scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) / math.sqrt(size)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(x.dtype)
        y = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
        return self.wo(y), (k, v)


def rotate(x: Array, at: Array, theta: float) -> Array:
    """RoPE: turns pairs (i, i + D/2) of x [B, T, heads, D] by angles that grow with the position."""
    half = x.shape[-1] // 2
    angle = at[:, None, None].astype(jnp.float32) * theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routed:
    """What the router did, by layer; costs nothing under jit where it is not used.

    Attributes:
      load: int32 [layers, E], choices that each expert got (each place, where experts have copies).
      balance, z: f32 [layers], the losses of :mod:`jaxmoe.balance` for even load, by sequence, and small logits; 0
        where experts are not learned.
    """

    load: Array
    balance: Array
    z: Array


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: ModelConfig, moe: jaxmoe.nn.MoE, rngs: nnx.Rngs, dtype: Any):
        norm = functools.partial(nnx.RMSNorm, config.hidden, epsilon=config.norm_eps, param_dtype=dtype, rngs=rngs)
        self.attn_norm, self.ffn_norm = norm(), norm()
        self.attn = Attention(config, rngs, dtype)
        self.ffn = moe

    def __call__(self, x: Array, tokens: Array, valid: Array | None, cache: Any, start: Array | int) -> Any:
        """Returns x, the cache, and what the router did, without the axis of layers."""
        y, cache = self.attn(self.attn_norm(x), cache, start)
        x = x + y
        y = self.ffn_norm(x)
        # Routed here and not inside of the layer, for the losses.
        params, router = self.ffn.params.router, self.ffn.config.router
        logits = router_logits(params, y)
        flat = [None if a is None else a.reshape(-1, *a.shape[2:]) for a in (logits, tokens, valid)]
        routing = jaxmoe.route(
            params, None, router, logits=flat[0], token_ids=flat[1] if router.hash_routing else None, valid=flat[2]
        )
        routing = jax.tree.map(lambda a: a.reshape(*x.shape[:-1], -1), routing)
        y, load = self.ffn.with_load(y, valid=valid, routing=routing)
        y = y.astype(x.dtype)
        balance = z = jnp.float32(0)
        if not router.hash_routing and router.logical_experts is None:
            balance = load_balancing_loss(logits, routing.ids, router, valid=valid, sequence_wise=True)
            z = router_z_loss(logits, valid=valid)
        return x + y, cache, Routed(load, balance, z)


class Decoder(nnx.Module):
    """The model.

    Args:
      config: its sizes.
      rngs: for what is not given.
      moe: gives the MoE of a layer; None makes float32 ones to be trained.
      dtype: of all parameters but the MoE's, and of the computation around it.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        moe: Callable[[int], jaxmoe.nn.MoE] | None = None,
        dtype: Any = jnp.float32,
    ):
        moe = moe or functools.partial(new_moe, config, rngs)
        self.config = config
        init = nnx.initializers.normal(config.hidden**-0.5)
        self.embed = nnx.Embed(config.vocab, config.hidden, param_dtype=dtype, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([Block(config, moe(layer), rngs, dtype) for layer in range(config.layers)])
        self.norm = nnx.RMSNorm(config.hidden, epsilon=config.norm_eps, param_dtype=dtype, rngs=rngs)

    def __call__(
        self, tokens: Array, *, valid: Array | None = None, cache: Cache | None = None, start: Array | int = 0
    ) -> tuple[Array, Cache, Routed]:
        """Logits of the next token at every position.

        Args:
          tokens: int32 [B, T].
          valid: bool [B, T]; what is not goes to no expert.
          cache: of :meth:`empty_cache`, or of an earlier call; None looks at ``tokens`` alone.
          start: position of the first token in the cache.

        Returns:
          logits f32 [B, T, V], the cache, and what the router did.
        """
        x = self.embed(tokens) * np.float32(self.config.hidden**0.5).astype(self.embed.embedding.dtype)
        caches, routed = [], []
        for n, block in enumerate(self.blocks):
            x, new, did = block(x, tokens, valid, None if cache is None else cache[n], start)
            caches.append(new)
            routed.append(did)
        logits = self.embed.attend(self.norm(x)).astype(jnp.float32)
        return logits, tuple(caches), jax.tree.map(lambda *layers: jnp.stack(layers), *routed)

    def empty_cache(self, batch: int, length: int) -> Cache:
        """Keys and values of ``length`` positions, [B, length, heads, D] each, for every layer."""
        size = self.config.hidden // self.config.heads
        zeros = jnp.zeros((batch, length, self.config.heads, size), self.embed.embedding.dtype)
        return tuple((zeros, zeros) for _ in self.blocks)


def new_moe(config: ModelConfig, rngs: nnx.Rngs, layer: int, mesh: Mesh | None = None) -> jaxmoe.nn.MoE:
    """A layer with float32 weights to be trained, on a mesh of :mod:`meshes` with batches cut over it."""
    moe, table = config.moe(layer), None
    if moe.router.hash_routing:
        draws = np.random.default_rng(layer).random((config.vocab, config.experts))
        table = jnp.asarray(draws.argsort(axis=1)[:, : config.top_k], jnp.int32)
    return jaxmoe.nn.MoE(
        config.hidden,
        config.intermediate,
        config.experts,
        router=moe.router,
        activation=moe.activation,
        shared=moe.shared,
        tid2eid=table,
        dtype=compute_dtype(),
        param_dtype=jnp.float32,
        rngs=rngs,
        layout=None if mesh is None else meshes.layout(0),
        mesh=mesh,
    )


def compute_dtype() -> Any:
    """What experts run in: f32 on a CPU, and bf16 elsewhere, as GPU kernels take it."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def loss_of(logits: Array, targets: Array) -> Array:
    """Mean cross-entropy, nats per token."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def tensors(model: Decoder) -> Iterator[tuple[str, Any, bool]]:
    """Everything but the MoE layers: names in a checkpoint, variables, and whether they are stored transposed."""
    yield "model.embed.weight", model.embed.embedding, False
    yield "model.norm.weight", model.norm.scale, False
    for n, block in enumerate(model.blocks):
        prefix = f"model.layers.{n}."
        yield prefix + "attn_norm.weight", block.attn_norm.scale, False
        yield prefix + "ffn_norm.weight", block.ffn_norm.scale, False
        for name in ("wq", "wk", "wv", "wo"):
            yield f"{prefix}attn.{name}.weight", getattr(block.attn, name).kernel, True


def save(model: Decoder, path: str | Path, name: str) -> Path:
    """Writes a trained model as a checkpoint in the format that ``FORMATS`` calls ``name``."""
    config = _FIXED | {key: getattr(model.config, field) for field, key in _KEYS.items()}
    others = {}
    for tensor, variable, transposed in tensors(model):
        value = np.asarray(variable[...]).astype(ml_dtypes.bfloat16)
        others[tensor] = value.T if transposed else value
    layers = {n: quantized(block.ffn, *FORMATS[name]) for n, block in enumerate(model.blocks)}
    return save_moe(path, config, layers, others)


def quantized(layer: jaxmoe.nn.MoE, weights: Any, shared: Any) -> jaxmoe.nn.MoE:
    """A float32 layer's weights in the given formats."""
    params, config = layer.params, layer.config
    assert config.shared is not None and params.shared is not None and params.shared.experts is not None
    own = dataclasses.replace(config.shared, weights=None if shared == weights else shared)
    config = dataclasses.replace(config, weights=weights, shared=own)
    stacks = {}
    for prefix, experts in (("", params.experts), ("shared_", params.shared.experts)):
        fmt = shared if prefix else weights
        gate_up, down = experts.gate_up.values, experts.down.values
        if not fmt.quantized:
            gate_up, down = gate_up.astype(jnp.bfloat16), down.astype(jnp.bfloat16)
        gate, up = jnp.split(gate_up, 2, axis=1)
        for part, stack in (("gate", gate), ("up", up), ("down", down)):
            stacks[prefix + part] = stack[0] if prefix else stack
    router = params.router
    made = make_params(
        config,
        router_kernel=router.kernel,
        correction_bias=router.correction_bias,
        tid2eid=router.tid2eid,
        **stacks,
    )
    return jaxmoe.nn.MoE.from_params(config, made)


def load(path: str | Path, name: str | None = None, mesh: Mesh | None = None) -> Decoder:
    """A checkpoint of :func:`save`, its experts kept in their format, or converted to what ``FORMATS`` calls ``name``.

    A GPU without kernels for their format gets them in one it has. With a mesh of :mod:`meshes`, sequences are cut
    over it. The model computes in :func:`compute_dtype`.

    Raises:
      ValueError: the checkpoint is not one of this model, or cannot be converted exactly.
    """
    said = json.loads((Path(path) / "config.json").read_text())
    missing = [key for key in _KEYS.values() if key not in said]
    if missing:
        raise ValueError(f"{path}: config.json lacks {missing[0]!r}; is it a checkpoint of examples/train.py?")
    config = ModelConfig(**{field: said[key] for field, key in _KEYS.items()})
    dtype = compute_dtype()

    def moe(layer: int) -> jaxmoe.nn.MoE:
        weights, shared = ("auto", None) if name is None else map(kernel_format, FORMATS[name])
        loaded = load_moe(path, layer, weights=weights, shared_weights=shared, progress=False)
        layout = None if mesh is None else meshes.layout(1)
        return jaxmoe.nn.MoE.from_params(loaded.config, loaded.params, dtype=dtype, layout=layout, mesh=mesh)

    model, reader = Decoder(config, nnx.Rngs(0), moe, dtype), CheckpointReader(path)
    for tensor, variable, transposed in tensors(model):
        value = reader.get(tensor)
        value = value.T if transposed else value
        if value.shape != variable.shape:
            raise ValueError(f"{path}: {tensor} is {value.shape}; config.json says {variable.shape}")
        variable.set_value(jnp.asarray(value.astype(np.float32), dtype))
    if mesh is not None:
        meshes.replicate(model, mesh)
    return model
