"""What training adds so that experts get even load: two losses, and DeepSeek-V3's step of the selection bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxmoe.config import RouterConfig
from jaxmoe.errors import ShapeError
from jaxmoe.router.scores import scores

Array = jax.Array


def load_balancing_loss(
    logits: Array, ids: Array, router: RouterConfig, *, valid: Array | None = None, sequence_wise: bool = False
) -> Array:
    """``Σ_e f_e · P_e``: 1 for even load, up to E/K if all tokens take the same experts.

    f_e is E/K times the share of tokens that chose expert e, P_e the mean over tokens of its score, scores divided by
    their sum. With K = 1 it is the loss of Switch Transformers (arXiv:2101.03961) and GShard, E·Σ f_e·P_e with f_e
    a share; by sequences it is the complementary loss of DeepSeek-V3 (arXiv:2412.19437, eq. 17-20). Times a factor of
    1e-2 in the former, 1e-4 in the latter. Gradients flow through P only.

    Args:
      logits: f32 [..., S, E], from :func:`jaxmoe.router.router_logits`.
      ids: int32 [..., S, K], the choice of experts, -1 for none.
      router: says how logits become scores; raw ones do by a softmax here.
      valid: bool [..., S]; False tokens count nowhere, whatever they hold.
      sequence_wise: take f and P over the S tokens of each sequence, and the mean of that over sequences with a valid
        token, instead of f and P over all tokens at once.

    Returns:
      f32 scalar, 0 without a token.

    Raises:
      ShapeError: logits, ids and valid are not of the same tokens, or not of E experts.
    """
    logits, valid = _checked(logits, valid, router.logical)
    if ids.shape[:-1] != logits.shape[:-1]:
        raise ShapeError(f"ids are {list(ids.shape)}; logits {list(logits.shape)} need {list(logits.shape[:-1])} + [K]")
    if not sequence_wise:
        logits, ids, valid = logits.reshape(-1, logits.shape[-1]), ids.reshape(-1, ids.shape[-1]), valid.reshape(-1)
    s = scores(jnp.where(valid[..., None], logits, 0.0), router.score if router.score != "raw" else "softmax")
    share = s / jnp.maximum(s.sum(axis=-1, keepdims=True), 1e-20)
    experts = jnp.arange(router.logical, dtype=jnp.int32)
    chosen = (ids[..., None] == experts).any(axis=-2) & valid[..., None]
    tokens = valid.sum(axis=-1, dtype=jnp.float32)[..., None]
    mean = jnp.where(valid[..., None], share, 0.0).sum(axis=-2) / jnp.maximum(tokens, 1.0)
    f = chosen.sum(axis=-2, dtype=jnp.float32) / jnp.maximum(tokens, 1.0) * (router.logical / router.top_k)
    loss = (f * mean).sum(axis=-1)
    if not sequence_wise:
        return loss
    return loss.sum() / jnp.maximum((tokens > 0).sum(dtype=jnp.float32), 1.0)


def router_z_loss(logits: Array, *, valid: Array | None = None) -> Array:
    """Mean over tokens of logsumexp(logits)²: keeps logits small (ST-MoE, arXiv:2202.08906, with a factor of 1e-3).

    Args:
      logits: f32 [..., S, E].
      valid: bool [..., S]; False tokens count nowhere, whatever they hold.

    Returns:
      f32 scalar, 0 without a token.
    """
    logits, valid = _checked(logits, valid, None)
    squares = jax.nn.logsumexp(jnp.where(valid[..., None], logits, 0.0), axis=-1) ** 2
    return jnp.where(valid, squares, 0.0).sum() / jnp.maximum(valid.sum(dtype=jnp.float32), 1.0)


def update_correction_bias(bias: Array, load: Array, rate: float | Array) -> Array:
    """One step of balancing without an auxiliary loss (arXiv:2408.15664): up for who got too little, down for too much.

    Args:
      bias: f32 [..., E], added for selection only.
      load: [..., E], choices per expert since the last step, over all devices.
      rate: the size of a step; DeepSeek-V3 takes 1e-3.

    Returns:
      ``bias + rate · sign(mean load - load)``.

    Raises:
      ShapeError: bias and load differ in shape.
    """
    if bias.shape != load.shape:
        raise ShapeError(f"bias is {list(bias.shape)} and load {list(load.shape)}; they must be of the same experts")
    load = load.astype(jnp.float32)
    return bias + jnp.asarray(rate, bias.dtype) * jnp.sign(load.mean(axis=-1, keepdims=True) - load).astype(bias.dtype)


def _checked(logits: Array, valid: Array | None, experts: int | None) -> tuple[Array, Array]:
    if logits.ndim < 2 or experts not in (None, logits.shape[-1]):
        want = "E" if experts is None else experts
        raise ShapeError(f"logits are {list(logits.shape)}; they must be [..., tokens, {want}]")
    if valid is None:
        valid = jnp.ones(logits.shape[:-1], bool)
    if valid.shape != logits.shape[:-1]:
        raise ShapeError(f"valid is {list(valid.shape)}; logits {list(logits.shape)} need {list(logits.shape[:-1])}")
    return logits.astype(jnp.float32), valid
