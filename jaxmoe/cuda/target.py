"""Which GPU kernels are chosen for while a program is traced: the default device's, or one named for cross-compiling."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

from jaxmoe.cuda.arch import Arch, detect

_TARGET: contextvars.ContextVar[Arch | None] = contextvars.ContextVar("jaxmoe_target", default=None)


def current() -> Arch:
    """The named target, or the architecture of the default device.

    Raises:
      BackendUnavailable: no target is named and the default device is no GPU with kernels.
    """
    named = _TARGET.get()
    if named is not None:
        return named
    device = jax.config.jax_default_device
    return detect(device if isinstance(device, jax.Device) else None)


@contextlib.contextmanager
def target(arch: Arch) -> Iterator[None]:
    """Chooses kernels for ``arch``, which need not be here; programs traced inside can be lowered and exported."""
    token = _TARGET.set(arch)
    try:
        yield
    finally:
        _TARGET.reset(token)
