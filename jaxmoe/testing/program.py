"""One custom call of the launcher, run without XLA: for drivers that record, virtual ranks, and sanitizers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from jaxmoe.cuda.ffi import Library
from jaxmoe.cuda.launch import LaunchSpec, encode

_ERROR_BYTES = 4096
Memory = Sequence[tuple[int, int]]
"""(device address, bytes) of buffers."""


class Program:
    """Launches made ready as XLA would.

    Args:
      library: whose driver they go to, and whose cubin directory they come from.
      launches: specs in order, or their encoding.
      name: of the custom call, for errors.

    Raises:
      RuntimeError: here and from every method, with the launcher's text.
    """

    def __init__(self, library: Library, launches: Sequence[LaunchSpec] | bytes, name: str = "jaxmoe_test"):
        text, size, pointer = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p
        self._c = c = library.c
        c.jaxmoe_program_create.argtypes = [text, size, ctypes.POINTER(pointer), text, size]
        c.jaxmoe_program_prepare.argtypes = [pointer, ctypes.c_int32, text, size]
        c.jaxmoe_program_launch.argtypes = [
            *(pointer, pointer, size, pointer, size),
            *(ctypes.c_int32, pointer, text, size),
        ]
        c.jaxmoe_program_destroy.argtypes = [pointer]
        self._handle = pointer()
        blob = launches if isinstance(launches, bytes) else encode(launches, name)
        self._call(c.jaxmoe_program_create, blob, len(blob), ctypes.byref(self._handle))

    @staticmethod
    def _call(function: ctypes._NamedFuncPointer, *arguments: object) -> None:
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        if function(*arguments, error, _ERROR_BYTES):
            raise RuntimeError(error.value.decode())

    def prepare(self, device: int) -> None:
        """Loads its kernels in the current context, which is that of ``device``."""
        self._call(self._c.jaxmoe_program_prepare, self._handle, device)

    def launch(
        self, arguments: Memory = (), results: Memory = (), *, device: int = 0, stream: int | ctypes.c_void_p = 0
    ) -> None:
        """Puts the launches on a stream of ``device``, whose context is current; 0 is the default stream."""
        both = [np.array(memory, np.uint64).reshape(-1, 2) for memory in (arguments, results)]
        buffers = (part for memory in both for part in (memory.ctypes.data, len(memory)))
        self._call(self._c.jaxmoe_program_launch, self._handle, *buffers, device, stream)

    def __del__(self):
        self._c.jaxmoe_program_destroy(self._handle)
