"""The router: token rows to expert ids and final weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxmoe.config import RouterConfig
from jaxmoe.layer.params import RouterParams
from jaxmoe.router.checks import check_inputs
from jaxmoe.router.copies import choose_copies
from jaxmoe.router.grouped import grouped_keys
from jaxmoe.router.hash import lookup
from jaxmoe.router.routing import Routing
from jaxmoe.router.scores import row_sum, scores, softmax
from jaxmoe.router.tiles import by_tiles
from jaxmoe.router.topk import order_keys, top_k_of_keys

Array = jax.Array


def route(
    params: RouterParams,
    x: Array | None,
    config: RouterConfig,
    *,
    logits: Array | None = None,
    token_ids: Array | None = None,
    valid: Array | None = None,
    deterministic: bool = False,
) -> Routing:
    """Chooses K experts per token and the weights of their outputs.

    Ids of a row are distinct and in [0, E) whatever the logits hold; NaN ranks last and ties go to the lowest id.
    Weights come from the unbiased scores and are differentiable; the choice is not. Where experts have copies, the
    ids are places in the stacks, see :func:`jaxmoe.router.choose_copies`.

    Args:
      params: the router's parameters; ``kernel`` is unused when ``logits`` are given.
      x: [T, H] floating point, multiplied by the kernel in f32; may be None when ``logits`` are given.
      config: what the model does.
      logits: f32 or bf16 [T, E] to use in place of the router GEMM's; complete, so that ``logit_bias`` is not
        added to them.
      token_ids: integers [T], for hash routing; one outside the table means no expert.
      valid: bool [T]; False rows (padding) get ids -1 and weights 0, whatever they hold.
      deterministic: route in tiles of a fixed number of rows, so that not a bit of a row's result depends on T or on
        other rows. Slower.

    Raises:
      ShapeError, FormatError: an input does not fit the config.
      ValueError: token ids, a bias or a table is missing, or there though the config has no use for it.
    """
    check_inputs(params, x, config, logits, token_ids, valid)
    rows = x if logits is None else None, logits, token_ids, valid
    if deterministic:
        routing = by_tiles(lambda *tile: _route(params, config, *tile), *rows)
    else:
        routing = _route(params, config, *rows)
    return routing if params.replicas is None else choose_copies(routing, params.replicas, by_place=not deterministic)


def router_logits(params: RouterParams, x: Array) -> Array:
    """What the router makes of tokens before any score: ``x · kernel + logit_bias`` in f32.

    Args:
      params: the router's parameters.
      x: [..., H] floating point.

    Returns:
      f32 [..., E].
    """
    x, kernel = x.astype(jnp.float32), params.kernel.astype(jnp.float32)
    logits = jnp.dot(x, kernel, precision=jax.lax.Precision.HIGHEST)
    return logits if params.logit_bias is None else logits + params.logit_bias


def _route(
    params: RouterParams,
    config: RouterConfig,
    x: Array | None,
    logits: Array | None,
    token_ids: Array | None,
    valid: Array | None,
) -> Routing:
    ids = None
    if config.hash_routing:
        assert params.tid2eid is not None and token_ids is not None
        ids = lookup(params.tid2eid, token_ids, config.logical)
        known = ids[:, 0] >= 0
        valid = known if valid is None else valid & known
    # Rows that go nowhere are zeroed at the door: NaN in them can then reach neither results nor gradients.
    if logits is None:
        assert x is not None
        logits = router_logits(params, _select_rows(valid, x.astype(jnp.float32)))
    else:
        logits = _select_rows(valid, logits.astype(jnp.float32))
    all_scores = scores(logits, "raw" if config.softmax_after_topk else config.score)
    if ids is None:
        ids = _choose(params, config, jax.lax.stop_gradient(logits), jax.lax.stop_gradient(all_scores))
    if valid is not None:
        ids = jnp.where(valid[:, None], ids, -1)
    return Routing(ids, _weights(config, all_scores, ids))


def _select_rows(valid: Array | None, rows: Array) -> Array:
    return rows if valid is None else jnp.where(valid[:, None], rows, 0.0)


def _choose(params: RouterParams, config: RouterConfig, logits: Array, all_scores: Array) -> Array:
    """Ids, int32 [T, K], best first."""
    if params.correction_bias is None and config.num_groups == 1:
        # Every score rises with its logit, so logits give the same order, less the ties made by rounding scores.
        return top_k_of_keys(order_keys(logits), config.top_k)
    selection = all_scores if params.correction_bias is None else all_scores + params.correction_bias
    if config.num_groups == 1:
        return top_k_of_keys(order_keys(selection), config.top_k)
    return top_k_of_keys(
        grouped_keys(selection, config.num_groups, config.top_groups, config.group_score), config.top_k
    )


def _weights(config: RouterConfig, all_scores: Array, ids: Array) -> Array:
    """Final weights, f32 [T, K], of the chosen ids."""
    chosen = jnp.take_along_axis(all_scores, jnp.maximum(ids, 0), axis=1)
    if config.softmax_after_topk:
        weights = softmax(chosen)
    elif config.renormalize:
        total = row_sum(chosen)
        floor = config.renormalize_floor
        weights = chosen / jnp.where(jnp.abs(total) < floor, floor, total)
    else:
        weights = chosen
    return jnp.where(ids >= 0, weights * config.scaling_factor, 0.0)
