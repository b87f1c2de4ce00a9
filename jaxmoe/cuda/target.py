"""Which GPU kernels are chosen for while a program is traced: the default device's, or one named to compile for."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

from jaxmoe.cuda.arch import Arch, detect

_TARGET = jax.make_user_context(default_value=None)


def current() -> Arch:
    """The named target, or the architecture of the default device.

    Raises:
      BackendUnavailable: no target is named and the default device is no GPU with kernels.
    """
    named = _TARGET.value
    if named is not None:
        return named
    device = jax.config.jax_default_device
    return detect(jax.local_devices(backend=device)[0] if isinstance(device, str) else device)


def target(arch: Arch | None) -> AbstractContextManager[None]:
    """Chooses kernels for ``arch``, which need not be here; programs traced inside can be lowered and exported.

    It is part of the key under which ``jax.jit`` keeps programs: one function can be traced for several targets.

    Args:
      arch: None goes back to the default device's.
    """
    return _TARGET(arch)
