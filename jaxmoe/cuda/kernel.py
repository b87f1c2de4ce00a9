"""Runs a planned kernel inside a traced program: compile it if it is missing, then launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

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
      BackendUnavailable: the cubin is not in the cache and cannot be compiled here; says how it gets there.
      KernelCompileError, CacheError: from the compiler or the cache.
    """
    return run_kernels([planned], args, results, name=f"jaxmoe_{planned[1].name}")


def run_kernels(
    planned: Sequence[tuple[KernelSource, LaunchSpec]],
    args: Sequence[Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    **options: Any,
) -> tuple[Array, ...]:
    """Launches planned kernels in order as one custom call ``name``; see :func:`run_kernel`, also for the errors.

    Args:
      options: of :func:`jaxmoe.cuda.ffi.launch`.
    """
    keys = compile_kernels([source for source, _ in planned])
    specs = [dataclasses.replace(spec, cubin=keys[source]) for source, spec in planned]
    return ffi.launch(specs, args, results, name=name, **options)


def compile_kernels(sources: Sequence[KernelSource]) -> dict[KernelSource, str]:
    """Compiles what the cache lacks; the keys. Raises as :func:`run_kernel`."""
    try:
        return cubin_cache.ensure(sources)
    except BackendUnavailable as reason:
        how = {
            "deep_gemm": f"run `jaxmoe warmup` for {sources[0].arch} on a machine with a compiler",
            "deep_ep": "make the same context on a machine with such GPUs and a compiler",
        }[sources[0].package]
        raise BackendUnavailable(f"{reason}; or {how} and bring its cache here") from reason
