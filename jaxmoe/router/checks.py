"""Checks of what enters the router, and of a routing that a user made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmoe.config import RouterConfig
from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.layer.params import RouterParams

Array = jax.Array


def check_routing(
    ids: Array | np.ndarray,
    weights: Array | np.ndarray,
    num_experts: int,
    *,
    tokens: int | None = None,
    top_k: int | None = None,
) -> None:
    """Refuses a routing that the pipeline cannot run.

    Values are looked at only where they are known: under a trace, or where other processes hold some, shapes and dtypes
    are all there is to check.

    Args:
      ids: int32 [T, K], -1 for no expert.
      weights: f32 [T, K].
      num_experts: E.
      tokens: T, checked when given.
      top_k: K, checked when given.

    Raises:
      ShapeError: ``ids`` is not [T, K], or ``weights`` has another shape.
      FormatError: ``ids`` is not int32 or ``weights`` not f32.
      ValueError: an id outside [-1, E). An expert may stand twice in one row; it then counts twice.
    """
    if ids.ndim != 2:
        raise ShapeError(f"ids has shape {tuple(ids.shape)}; it must be [T, K]")
    for name, have, want in (("tokens", ids.shape[0], tokens), ("experts per token", ids.shape[1], top_k)):
        if want is not None and have != want:
            raise ShapeError(f"ids has shape {tuple(ids.shape)}, which is {have} {name}; expected {want}")
    if tuple(weights.shape) != tuple(ids.shape):
        raise ShapeError(f"weights has shape {tuple(weights.shape)} but ids has {tuple(ids.shape)}; they must agree")
    if ids.dtype != jnp.int32:
        raise FormatError(f"ids is {ids.dtype}; convert it to int32")
    if weights.dtype != jnp.float32:
        raise FormatError(f"weights is {weights.dtype}; convert it to float32")
    if isinstance(ids, Tracer) or (isinstance(ids, jax.Array) and not ids.is_fully_addressable):
        return
    known = np.asarray(ids)
    outside = np.argwhere((known < -1) | (known >= num_experts))
    if len(outside):
        t, k = outside[0]
        raise ValueError(
            f"ids[{t}, {k}] is {known[t, k]}; expert ids must be in [0, {num_experts}), or -1 for no expert "
            f"({len(outside)} entries are not)"
        )


def check_inputs(
    params: RouterParams,
    x: Array | None,
    config: RouterConfig,
    logits: Array | None,
    token_ids: Array | None,
    valid: Array | None,
) -> None:
    """Refuses inputs of ``route`` that do not fit the config or each other; shapes and dtypes only."""
    e = config.logical
    if logits is not None:
        if logits.ndim != 2 or logits.shape[1] != e:
            raise ShapeError(f"logits has shape {logits.shape}; it must be [T, {e}] (num_experts is {e})")
        if logits.dtype not in (jnp.float32, jnp.bfloat16):
            raise FormatError(f"logits is {logits.dtype}; it must be float32 or bfloat16")
    elif x is None:
        raise ValueError("route needs x or logits; both are None")
    else:
        _check_gemm(params.kernel, x, e)
    if x is not None and logits is not None and x.shape[:1] != logits.shape[:1]:
        raise ShapeError(f"x has shape {x.shape} but logits has {logits.shape}; they must be of the same tokens")
    rows = logits if logits is not None else x
    assert rows is not None
    t = rows.shape[0]
    _check_bias("logit_bias", params.logit_bias, config.logit_bias, e)
    _check_bias("correction_bias", params.correction_bias, config.correction_bias, e)
    _check_hash(params.tid2eid, token_ids, config, t)
    check_replicas(params.replicas, config)
    if valid is not None:
        if valid.shape != (t,):
            raise ShapeError(f"valid has shape {valid.shape}; there are {t} tokens, so it must be [{t}]")
        if valid.dtype != jnp.bool_:
            raise FormatError(f"valid is {valid.dtype}; it must be bool (True for real tokens)")


def check_replicas(replicas: Array | None, config: RouterConfig) -> None:
    """Refuses a table of copies that does not go with the config; the table's values are the placement's business."""
    if (replicas is None) != (config.logical_experts is None):
        have = "no table" if replicas is None else f"a table {list(replicas.shape)}"
        raise ValueError(
            f"the router config says logical_experts={config.logical_experts} and the parameters hold {have} of "
            "copies; jaxmoe.balance.place_experts makes both"
        )
    if replicas is None:
        return
    if replicas.ndim != 2 or replicas.shape[0] != config.logical:
        raise ShapeError(f"replicas has shape {replicas.shape}; it must be [{config.logical}, copies]")
    if replicas.dtype != jnp.int32:
        raise FormatError(f"replicas is {replicas.dtype}; it must be int32")


def _check_gemm(kernel: Array, x: Array, e: int) -> None:
    if kernel.ndim != 2 or kernel.shape[1] != e:
        raise ShapeError(f"router kernel has shape {kernel.shape}; it must be [H, {e}] (num_experts is {e})")
    if x.ndim != 2 or x.shape[1] != kernel.shape[0]:
        raise ShapeError(f"x has shape {x.shape}; the router kernel {kernel.shape} needs [T, {kernel.shape[0]}]")
    for name, value in (("x", x), ("router kernel", kernel)):
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise FormatError(f"{name} is {value.dtype}; it must be floating point")


def _check_bias(name: str, bias: Array | None, configured: bool, e: int) -> None:
    if configured and bias is None:
        raise ValueError(f"the router config says {name}=True but the parameters hold none; give one of shape [{e}]")
    if not configured and bias is not None:
        raise ValueError(f"the parameters hold a {name} but the router config says {name}=False; set it to True")
    if bias is not None and bias.shape != (e,):
        raise ShapeError(f"{name} has shape {bias.shape}; it must be [{e}] (num_experts is {e})")
    if bias is not None and bias.dtype != jnp.float32:
        raise FormatError(f"{name} is {bias.dtype}; convert it to float32 (it decides between close scores)")


def _check_hash(table: Array | None, token_ids: Array | None, config: RouterConfig, t: int) -> None:
    if not config.hash_routing:
        if table is not None:
            raise ValueError(
                "the parameters hold tid2eid but the router config says hash_routing=False; set it to True"
            )
        return
    if table is None:
        raise ValueError("the router config says hash_routing=True but the parameters hold no tid2eid [V, K]")
    if token_ids is None:
        raise ValueError("hash routing takes expert ids from the tokens' ids: pass token_ids [T]")
    if table.ndim != 2 or table.shape[1] != config.top_k:
        raise ShapeError(f"tid2eid has shape {table.shape}; it must be [vocabulary, {config.top_k}] (top_k)")
    if token_ids.shape != (t,):
        raise ShapeError(f"token_ids has shape {token_ids.shape}; there are {t} tokens, so it must be [{t}]")
    for name, value in (("tid2eid", table), ("token_ids", token_ids)):
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise FormatError(f"{name} is {value.dtype}; it must be an integer type")
