"""Ranks of an exchange on GPUs of this process, each a peer context with a buffer and a stream; no JAX runs them."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import jax
import numpy as np

from jaxmoe.cuda import cubin_cache, ffi
from jaxmoe.cuda.deepep import specs
from jaxmoe.cuda.deepep.sizes import DATA_OFFSET, TABLE_OFFSET, Sizes, Wire
from jaxmoe.cuda.driver import driver
from jaxmoe.testing.program import Program

FIRST_CONTEXT = 1000
POISON = 0xC3


class VirtualRanks:
    """R ranks on the CUDA devices ``devices`` (ordinals, one per rank; the same one may come again)."""

    def __init__(self, sizes: Sizes, wire: Wire, devices: list[int] | None = None, arch: str = "sm_90a"):
        self.sizes, self.wire, self.arch = sizes, wire, arch
        self.devices = devices or [0] * sizes.ranks
        self.cuda = driver()
        self.library = ffi.library()
        self.library.set_cubin_directory(cubin_cache.directory())
        self.nbytes = sizes.buffer_bytes(wire)
        self.starts = [self.cuda.allocate(d, self.nbytes) for d in self.devices]
        self._held: list[tuple[int, int]] = []
        table = np.array(self.starts, np.uint64).tobytes()
        self.streams = []
        for rank, (device, start) in enumerate(zip(self.devices, self.starts, strict=True)):
            for peer in set(self.devices) - {device}:
                self.cuda.enable_peer(device, peer)
            self.cuda.clear(device, start, DATA_OFFSET)
            self.cuda.write(device, start + TABLE_OFFSET, table)
            self.library.set_peer(
                FIRST_CONTEXT + rank,
                device,
                base=start + DATA_OFFSET,
                workspace=start,
                window=start + TABLE_OFFSET,
                rank=rank,
            )
            stream = ctypes.c_void_p()
            with self.cuda.current(device):
                self._cuda("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
            self.streams.append(stream)

    def _cuda(self, name: str, *args: Any) -> None:
        result = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
        assert result == 0, (name, result)

    def run(self, calls: list[specs.Call], arrays: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """One call on each rank at the same time; results start as poison."""
        keys = cubin_cache.ensure([source for call in calls for source, _ in call.launches])
        prepared = []
        for rank, (call, given) in enumerate(zip(calls, arrays, strict=True)):
            device = self.devices[rank]
            arguments = [self._put(device, np.ascontiguousarray(given[n])) for n in call.arguments]
            results = [self._fill(device, r) for r in call.results.values()]
            launches = [dataclasses.replace(spec, cubin=keys[source]) for source, spec in call.launches]
            with self.cuda.current(device):  # as XLA has it
                program = Program(self.library, launches, call.name)
                program.prepare(device)
            prepared.append((program, arguments, results))
        for device in set(self.devices):
            self.cuda.synchronize(device)
        for rank, (program, arguments, results) in enumerate(prepared):
            with self.cuda.current(self.devices[rank]):
                program.launch(arguments, results, device=self.devices[rank], stream=self.streams[rank])
        for device in set(self.devices):
            self.cuda.synchronize(device)
        out = []
        for rank, (call, (_, _, results)) in enumerate(zip(calls, prepared, strict=True)):
            got = {}
            for (name, like), (address, nbytes) in zip(call.results.items(), results, strict=True):
                raw = self.cuda.read(self.devices[rank], address, nbytes)
                got[name] = np.frombuffer(raw, like.dtype).reshape(like.shape)
            out.append(got)
        for device, address in self._held:
            self.cuda.free(device, address)
        self._held = []
        return out

    def _put(self, device: int, array: np.ndarray) -> tuple[int, int]:
        address = self.cuda.allocate(device, max(array.nbytes, 16))
        self._held.append((device, address))
        if array.nbytes:
            self.cuda.write(device, address, array.tobytes())
        return address, array.nbytes

    def _fill(self, device: int, like: jax.ShapeDtypeStruct) -> tuple[int, int]:
        return self._put(device, np.full(like.size * np.dtype(like.dtype).itemsize, POISON, np.uint8))

    def close(self) -> None:
        for rank, (device, start) in enumerate(zip(self.devices, self.starts, strict=True)):
            self.library.erase_peer(FIRST_CONTEXT + rank)
            self.cuda.free(device, start)
            with self.cuda.current(device):
                self._cuda("cuStreamDestroy_v2", self.streams[rank])
