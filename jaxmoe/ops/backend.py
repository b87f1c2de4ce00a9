"""The one rule by which an op finds its implementation (design, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def run(op: str, backends: Mapping[str, Callable[..., Any]], backend: str | tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
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
