"""The one rule by which an op finds its implementation (design, section 3)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

Backend = str | tuple[str, ...]


def run(op: str, backends: Mapping[str, Callable[..., Any]], backend: Backend, *args: Any, **kwargs: Any) -> Any:
    """Runs ``op`` on the first backend that accepts the case.

    Args:
      op: name for messages.
      backends: implementations, best first; one raises ``NotImplementedError`` with a reason where it cannot.
      backend: ``"auto"`` (all, in order), one name (never falls back), or names in order.

    Raises:
      ValueError: unknown name.
      NotImplementedError: the one named backend declined.
      ExceptionGroup: every backend declined, each with its reason.
    """
    names = tuple(backends) if backend == "auto" else (backend,) if isinstance(backend, str) else tuple(backend)
    for name in names:
        if name not in backends:
            raise ValueError(f"{op} has no backend {name!r}; choose 'auto' or among {', '.join(map(repr, backends))}")
    refusals: list[Exception] = []
    for name in names:
        try:
            return backends[name](*args, **kwargs)
        except NotImplementedError as refusal:
            if len(names) == 1:
                raise
            refusal.add_note(f"backend {name!r} of {op}")
            refusals.append(refusal)
    raise ExceptionGroup(f"no backend of {op} accepts this case", refusals)


def run_or_reference(
    op: str, backends: Mapping[str, Callable[..., Any]], backend: Backend, *args: Any, **kwargs: Any
) -> Any:
    """Like :func:`run`, for an op whose ``reference`` is far slower: on a GPU ``auto`` warns before it falls back."""
    if backend != "auto":
        return run(op, backends, backend, *args, **kwargs)
    kernels = tuple(name for name in backends if name != "reference")
    reasons = ["no kernel backend is installed"]
    if kernels:
        try:
            return run(op, backends, kernels, *args, **kwargs)
        except* NotImplementedError as refusals:
            reasons = [str(refusal) for refusal in refusals.exceptions]
    if jax.default_backend() == "gpu":
        _warn_slow(op, "; ".join(reasons))
    return run(op, backends, "reference", *args, **kwargs)


@functools.cache
def _warn_slow(op: str, reason: str) -> None:
    warnings.warn(f"{op} runs the slow reference on this GPU: {reason}", RuntimeWarning, stacklevel=4)
