"""The XLA FFI handler from Python: load the shared library, register targets, call launches from traced code."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxmoe.cuda
from jaxmoe.cuda import cubin_cache
from jaxmoe.cuda import launch as _launch
from jaxmoe.errors import FormatError, ShapeError

LIBRARY_NAME = "libjaxmoe_ffi.so"
NO_GRAPH = "_no_graph"
"""Suffix of the target that XLA keeps out of its command buffers."""


class Library:
    """One loaded copy of the shared library, for one XLA platform.

    Targets are called the same on every platform, so a process works with one library (:func:`library`).

    Args:
      path: the shared object.
      platform: ``"CUDA"``, or ``"cpu"`` to run the launches against a stand-in driver without a GPU.
    """

    def __init__(self, path: str | os.PathLike[str], platform: str = "CUDA"):
        self.path = Path(path)
        self.platform = platform
        self.c = ctypes.CDLL(str(path))
        self._lock = threading.Lock()
        self._targets: set[str] = set()
        self._declare()
        types = {
            "type_id": jax.ffi.pycapsule(self.c.jaxmoe_state_type_id()),
            "type_info": jax.ffi.pycapsule(self.c.jaxmoe_state_type_info()),
        }
        jax.ffi.register_ffi_type("jaxmoe_executable", types, platform=platform)  # pyright: ignore[reportArgumentType]

    def _declare(self) -> None:
        c = self.c
        c.jaxmoe_state_type_id.restype = ctypes.c_void_p
        c.jaxmoe_state_type_info.restype = ctypes.c_void_p
        c.jaxmoe_set_cubin_directory.argtypes = [ctypes.c_char_p]
        c.jaxmoe_set_cubin_directory.restype = None
        u64, u32, i32 = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32
        c.jaxmoe_set_peer.argtypes = [u32, i32, u64, u64, u64, i32]
        c.jaxmoe_set_peer.restype = None
        c.jaxmoe_erase_peer.argtypes = [u32]
        c.jaxmoe_load_driver.argtypes = [ctypes.c_char_p, ctypes.c_size_t]

    def load_driver(self) -> None:
        """Opens the CUDA driver now instead of at the first instantiation.

        Raises:
          RuntimeError: no driver, or one older than CUDA 12.4; says which library and which function.
        """
        error = ctypes.create_string_buffer(1024)
        if self.c.jaxmoe_load_driver(error, len(error)):
            raise RuntimeError(error.value.decode())

    def set_cubin_directory(self, directory: str | os.PathLike[str]) -> None:
        """Says where ``<key>.cubin`` files lie; executables hold keys only. Loaded kernels stay loaded."""
        self.c.jaxmoe_set_cubin_directory(os.fsencode(Path(directory).absolute()))

    def set_peer(self, context: int, device: int, *, base: int, workspace: int, window: int, rank: int) -> None:
        """Sets what the :class:`~jaxmoe.cuda.launch.PeerField` values of ``context`` are on one device.

        Args:
          context: the id that the specs carry.
          device: CUDA ordinal (``jax.Device.local_hardware_id``).
          base, workspace, window: device addresses. rank: of this device in the context.
        """
        self.c.jaxmoe_set_peer(context, device, base, workspace, window, rank)

    def erase_peer(self, context: int) -> None:
        """Forgets ``context`` on all devices; a later launch that needs it fails with its id and device.

        Raises:
          KeyError: it was not set.
        """
        if not self.c.jaxmoe_erase_peer(context):
            raise KeyError(f"peer context {context} is not set")

    def register(self, name: str) -> None:
        """Registers the handler as ``name`` (may be recorded in command buffers) and ``name + "_no_graph"``.

        Registering a name again does nothing.
        """
        with self._lock:
            if name in self._targets:
                return
            for target, execute in self._executes(name):
                handlers = {
                    "instantiate": jax.ffi.pycapsule(self.c.jaxmoe_instantiate),
                    "initialize": jax.ffi.pycapsule(self.c.jaxmoe_initialize),
                    "execute": jax.ffi.pycapsule(execute),
                }
                jax.ffi.register_ffi_target(target, handlers, platform=self.platform)
            self._targets.add(name)

    def _executes(self, name: str):
        if self.platform == "cpu":
            return (name, self.c.jaxmoe_execute_on_host), (name + NO_GRAPH, self.c.jaxmoe_execute_on_host)
        return (name, self.c.jaxmoe_execute_in_graph), (name + NO_GRAPH, self.c.jaxmoe_execute)


def library_path() -> Path:
    """The shared library: what ``JAXMOE_FFI_LIBRARY`` names, else the one built into this package."""
    override = os.environ.get("JAXMOE_FFI_LIBRARY")
    if override:
        return Path(override)
    # An editable install keeps the library apart from the sources; the package's path holds both directories.
    places = [Path(directory) / LIBRARY_NAME for directory in jaxmoe.cuda.__path__]
    return next((place for place in places if place.is_file()), places[0])


@functools.cache
def library() -> Library:
    """The library of this process, loaded on first use.

    Raises:
      RuntimeError: it is not built; says where it was looked for and how to build it.
    """
    path = library_path()
    if not path.is_file():
        raise RuntimeError(
            f"{path} does not exist. Install jaxmoe with `pip install .` (or `pip install -e .`), which builds it with "
            "a C++17 compiler, or name a built library in JAXMOE_FFI_LIBRARY."
        )
    return Library(path)


def register(name: str) -> None:
    """Makes the custom call ``name`` known to XLA; its cubins come from the directory that the cache names now.

    :func:`launch` does this. It is for a process that loads a serialised executable and traces nothing.
    """
    current = library()
    current.set_cubin_directory(cubin_cache.directory())
    current.register(name)


def launch(
    specs: Sequence[_launch.LaunchSpec],
    args: Sequence[jax.Array],
    result_shapes: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    input_output_aliases: Mapping[int, int] | None = None,
    command_buffer: bool = True,
    has_side_effect: bool = False,
) -> tuple[jax.Array, ...]:
    """Launches ``specs`` in order on the device's stream, as one custom call.

    Works in ``jit``, ``shard_map`` (each device launches on its own shard) and ``scan``. ``vmap`` is refused: the
    geometry in the specs is for one set of buffers.

    Args:
      specs: launches; their buffers are positions in ``args`` and in the results.
      args: arrays, row-major. Types of less than a byte are refused: pass them packed, as uint8.
      result_shapes: of the results, which start uninitialised unless aliased.
      name: of the custom call, in HLO, profiles and messages, e.g. ``jaxmoe_sm90_fp8_1d2d_m_grouped_psum``.
      input_output_aliases: {argument: result} pairs that share a buffer.
      command_buffer: whether XLA may record the launches into its command buffers (CUDA graphs).
      has_side_effect: whether the call must run although nobody uses its results.

    Raises:
      ShapeError: a spec names an argument or a result that does not exist.
      FormatError: an argument or result has a type of less than a byte.
      NotImplementedError: under ``vmap``.
    """
    for what, arrays in (("argument", args), ("result", result_shapes)):
        for index, array in enumerate(arrays):
            if jax.dtypes.itemsize_bits(array.dtype) < 8:
                raise FormatError(f"{what} {index} has dtype {array.dtype}, less than a byte; pass it packed, as uint8")
    _check_buffers(specs, len(args), len(result_shapes))
    register(name)
    blob = np.frombuffer(_launch.encode(specs, name), np.uint8)
    call: Callable[..., Any] = jax.ffi.ffi_call(
        name if command_buffer else name + NO_GRAPH,
        _varying_like(result_shapes, args),
        input_output_aliases=dict(input_output_aliases or {}),
        has_side_effect=has_side_effect,
    )
    return _refuse_vmap(lambda *arrays: call(*arrays, spec=blob), name)(*args)


def _check_buffers(specs: Sequence[_launch.LaunchSpec], arguments: int, results: int) -> None:
    counts = {"argument": arguments, "result": results}
    for spec in specs:
        for position, param in enumerate(spec.params):
            buffer = getattr(param, "buffer", None)
            if buffer is not None and buffer.index >= counts[buffer.kind]:
                raise ShapeError(
                    f"parameter {position} of kernel {spec.name!r} is {buffer.kind} {buffer.index}; the call has "
                    f"{counts[buffer.kind]} {buffer.kind}s"
                )


def _varying_like(results: Sequence[jax.ShapeDtypeStruct], args: Sequence[jax.Array]):
    """Inside shard_map the results differ over every mesh axis over which any argument does."""
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in args))
    if not axes:
        return tuple(results)
    where = {
        "sharding": jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec()),
        "manual_axis_type": jax.sharding.ManualAxisType(varying=axes),
    }
    return tuple(jax.ShapeDtypeStruct(r.shape, r.dtype, **where) for r in results)


def _refuse_vmap(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    batched = jax.custom_batching.custom_vmap(function)

    @batched.def_vmap
    def _(axis_size: int, in_batched: Any, *_: Any):
        raise NotImplementedError(
            f"{name}: jax.vmap over a CUDA launch is not supported, because its geometry is for one set of buffers. "
            "Fold the mapped axis into the rows of the operands, or use jax.lax.map."
        )

    return batched
