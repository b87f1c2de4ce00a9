"""Runs a planned kernel inside a traced program: compile it if it is missing, then launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jaxmoe.cuda import cubin_cache, ffi
from jaxmoe.cuda.launch import LaunchSpec
from jaxmoe.cuda.source import KernelSource
from jaxmoe.errors import BackendUnavailable

Array = jax.Array


def run_kernel(
    planned: tuple[KernelSource, LaunchSpec], args: Sequence[Array], results: Sequence[jax.ShapeDtypeStruct]
) -> tuple[Array, ...]:
    """Launches one planned kernel as the custom call ``jaxmoe_<name>``; compiles it now unless the cache has it.

    Raises:
      BackendUnavailable: the cubin is not in the cache and cannot be compiled here; names ``jaxmoe warmup``.
      KernelCompileError, CacheError: from the compiler or the cache.
    """
    source, spec = planned
    try:
        key = cubin_cache.ensure([source])[source]
    except BackendUnavailable as reason:
        raise BackendUnavailable(
            f"{reason}; or run `jaxmoe warmup` for {source.arch} on a machine with a compiler and bring its cache here"
        ) from reason
    return ffi.launch([dataclasses.replace(spec, cubin=key)], args, results, name=f"jaxmoe_{spec.name}")
