"""The memory behind an EpContext: allocated on each local device, and found on the devices of the other ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import pathlib
import socket
import struct
import threading
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh

from jaxmoe.cuda.deepep.sizes import DATA_OFFSET, TABLE_OFFSET, Sizes, Wire
from jaxmoe.cuda.driver import driver
from jaxmoe.cuda.ffi import Library
from jaxmoe.errors import BackendUnavailable, ShapeError

_WAIT_MS = 120_000
_SPARE_BYTES = 64 << 20  # what the driver takes when it loads kernels
_lock = threading.Lock()
_next_context = 1
_made: dict[tuple[int, ...], Any] = {}


def groups_of(mesh: Mesh, axis: str | tuple[str, ...]) -> list[list[Any]]:
    """The devices of each group of ranks along an axis or axes, major first, in order of rank.

    Raises:
      ValueError: the mesh has no such axis.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in axes:
        if name not in mesh.shape:
            have = ", ".join(f"{a!r} ({n})" for a, n in mesh.shape.items())
            raise ValueError(f"axis {name!r} is not in the mesh, which has {have}")
    order = [mesh.axis_names.index(a) for a in mesh.axis_names if a not in axes]
    order += [mesh.axis_names.index(a) for a in axes]
    ranks = math.prod(mesh.shape[a] for a in axes)
    return np.transpose(mesh.devices, order).reshape(-1, ranks).tolist()


class Buffers:
    """One allocation per local device of some groups of ranks.

    Args:
      groups: devices in order of rank. sizes, wire: of the records. who: for messages.

    Attributes:
      context: id under which kernels find the addresses, equal in all processes.

    Raises:
      BackendUnavailable, MemoryError, ShapeError: see :class:`jaxmoe.dispatch.deepep.EpContext`.
    """

    def __init__(self, groups: list[list[Any]], sizes: Sizes, wire: Wire, who: str):
        self._who, self._sizes = who, sizes
        self._nbytes = sizes.buffer_bytes(wire)
        self._driver = driver()
        self._own: dict[Any, int] = {}
        self._opened: list[tuple[int, int]] = []
        self._library: Library | None = None
        devices = [d for group in groups for d in group]
        me = jax.process_index()
        self._local = [d for d in devices if d.process_index == me]
        self._processes = tuple(sorted({d.process_index for d in devices}))
        self._groups = [g for g in groups if any(d.process_index == me for d in g)]
        self._meeting = _Meeting(self._processes)
        try:
            problem = None
            try:
                self._allocate()
                mine = {str(d.id): self._export(d) for d in self._local}
            except Exception as error:
                problem, mine = error, {"error": f"{type(error).__name__}: {error}"}
            said = self._meeting.tell(mine, shape=f"{sizes} {wire}", who=who)
            if problem is not None:
                raise problem
            self.context = self._meeting.context
            self._connect(said)
        except BaseException:
            self.close()
            raise

    def _allocate(self) -> None:
        for device in self._local:
            ordinal = device.local_hardware_id
            free = self._driver.free_bytes(ordinal)
            if free < self._nbytes + _SPARE_BYTES:
                raise MemoryError(
                    f"the {self._who} needs {self._nbytes:,} bytes on {device} and leaves {_SPARE_BYTES:,} for the "
                    f"driver; {free:,} are free. Use fewer tokens ({self._sizes.tokens}), close another EpContext, or "
                    "have XLA reserve less, with XLA_PYTHON_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_PREALLOCATE=false"
                )
            self._own[device] = self._driver.allocate(ordinal, self._nbytes)
            self._driver.clear(ordinal, self._own[device], DATA_OFFSET)

    def _export(self, device: Any) -> str:
        if len(self._processes) == 1:
            return ""
        return self._driver.export(device.local_hardware_id, self._own[device]).hex()

    def _connect(self, said: dict[str, str]) -> None:
        self._tables: dict[Any, tuple[int, int]] = {}
        for group in self._groups:
            for rank, device in enumerate(group):
                if device not in self._own:
                    continue
                ordinal = device.local_hardware_id
                table = [self._address(device, peer, said) for peer in group]
                self._driver.write(ordinal, self._own[device] + TABLE_OFFSET, struct.pack(f"<{len(table)}Q", *table))
                self._tables[device] = (ordinal, rank)
        self._meeting.wait("connected")

    def _address(self, device: Any, peer: Any, said: dict[str, str]) -> int:
        """Where ``device`` sees the buffer of ``peer``."""
        if device == peer:
            return self._own[device]
        ordinal = device.local_hardware_id
        if peer in self._own:
            if not self._driver.reaches(ordinal, peer.local_hardware_id):
                raise BackendUnavailable(
                    f"{device} has no peer access to {peer} (see nvidia-smi topo -p2p r); the deepep transport needs "
                    "it between all ranks: use the AllToAll transport"
                )
            self._driver.enable_peer(ordinal, peer.local_hardware_id)
            return self._own[peer]
        try:
            address = self._driver.open(ordinal, bytes.fromhex(said[str(peer.id)]))
        except RuntimeError as error:
            raise BackendUnavailable(
                f"{device} cannot open the buffer of {peer}, of process {peer.process_index} ({error}); the deepep "
                "transport needs peer access between all ranks: use the AllToAll transport"
            ) from error
        self._opened.append((ordinal, address))
        return address

    def publish(self, library: Library) -> None:
        """Tells the launcher where everything is."""
        self._library = library
        for device, (ordinal, rank) in self._tables.items():
            start = self._own[device]
            library.set_peer(
                self.context,
                ordinal,
                base=start + DATA_OFFSET,
                workspace=start,
                window=start + TABLE_OFFSET,
                rank=rank,
            )

    def failed(self) -> str | None:
        """What a kernel of a local device left behind, None if all is well."""
        for device in self._own:
            try:
                self._driver.synchronize(device.local_hardware_id)
            except RuntimeError as error:
                return f"{device}: {error}"
        return None

    def close(self) -> None:
        """Gives everything back. After a kernel has failed nothing can be: its memory ends with the process."""
        if self._library is not None:
            self._library.erase_peer(self.context)
            self._library = None
        if self.failed() is None:
            # A peer may still use what this process exports, or write to it, until it has arrived here, too.
            self._meet("closing")
            for ordinal, address in self._opened:
                self._driver.close(ordinal, address)
            self._meet("freed")
            for device, address in self._own.items():
                self._driver.free(device.local_hardware_id, address)
        self._own, self._opened = {}, []

    def _meet(self, point: str) -> None:
        # Whoever does not come has ended, and uses nothing any more.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._meeting.wait(point)


class _Meeting:
    """What processes tell each other through the store of ``jax.distributed``; nothing, where there is one process."""

    def __init__(self, processes: tuple[int, ...]):
        global _next_context
        self._processes = processes
        with _lock:
            number = next(_made.setdefault(processes, itertools.count()))
            self.context, _next_context = _next_context, _next_context + 1
        self._key = f"jaxmoe/ep/{'-'.join(map(str, processes))}/{number}"
        self._client: Any = distributed.global_state.client if len(processes) > 1 else None

    def tell(self, mine: dict[str, str], *, shape: str, who: str) -> dict[str, str]:
        """Tells the others of this process's handles and gives theirs.

        Raises:
          BackendUnavailable: the processes are on several hosts. ShapeError: they make different contexts.
          RuntimeError: another process failed or did not come.
        """
        global _next_context
        if self._client is None:
            return mine
        me = jax.process_index()
        about = {"host": _host(), "shape": shape, "context": self.context, "handles": mine}
        self._client.key_value_set_bytes(f"{self._key}/{me}", json.dumps(about).encode())
        said: dict[str, str] = {}
        for process in self._processes:
            other = json.loads(self._client.blocking_key_value_get_bytes(f"{self._key}/{process}", _WAIT_MS))
            if "error" in other["handles"] and process != me:
                raise RuntimeError(f"process {process} cannot make the {who}: {other['handles']['error']}")
            if other["host"] != about["host"]:
                raise BackendUnavailable(
                    f"processes {me} and {process} are on several hosts ({about['host']}, {other['host']}); the deepep "
                    "transport works inside one: use the AllToAll transport"
                )
            if other["shape"] != shape:
                raise ShapeError(
                    f"process {process} makes another context than process {me}: {other['shape']}, not {shape}; every "
                    "process must make the same ones in the same order"
                )
            said |= other["handles"]
            self.context = max(self.context, other["context"])
        with _lock:
            _next_context = max(_next_context, self.context + 1)
        return said

    def wait(self, point: str) -> None:
        """Waits until all processes have come to ``point``."""
        if self._client is not None:
            self._client.wait_at_barrier(f"{self._key}/{point}", _WAIT_MS, list(self._processes))


def _host() -> str:
    """The same in all processes of a host, and nowhere else."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()
