"""Runs a planned kernel inside a traced program: compile what is missing, tell the launcher where it lies, launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jaxmoe.cuda import cubin_cache
from jaxmoe.cuda.ffi import launch, library
from jaxmoe.cuda.launch import LaunchSpec
from jaxmoe.cuda.source import KernelSource

Array = jax.Array


def run_kernel(
    planned: tuple[KernelSource, LaunchSpec], args: Sequence[Array], results: Sequence[jax.ShapeDtypeStruct]
) -> tuple[Array, ...]:
    """Launches one planned kernel as the custom call ``jaxmoe_<name>``; compiles it now unless the cache has it.

    Raises:
      BackendUnavailable: the cubin is not in the cache and cannot be compiled here.
      KernelCompileError, CacheError: from the compiler or the cache.
    """
    source, spec = planned
    key = cubin_cache.ensure([source])[source]
    library().set_cubin_directory(cubin_cache.directory())
    return launch([dataclasses.replace(spec, cubin=key)], args, results, name=f"jaxmoe_{spec.name}")
