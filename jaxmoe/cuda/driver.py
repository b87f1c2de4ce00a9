"""The part of the CUDA driver that sets up peer buffers: memory, peer access, handles of other processes.

Eager calls only; launches go through ``ffi/``. Devices are CUDA ordinals (``jax.Device.local_hardware_id``), and all
work is done in their primary contexts, as XLA does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator

from jaxmoe.errors import BackendUnavailable

_CLOCK_RATE_KHZ = 13
_ALREADY_ENABLED = 704
_LAZY_PEER_ACCESS = 1
HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


_U64, _INT, _SIZE = ctypes.c_uint64, ctypes.c_int, ctypes.c_size_t
_FUNCTIONS = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (_INT, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGetCount": (ctypes.POINTER(_INT),),
    "cuDeviceGet": (ctypes.POINTER(_INT), _INT),
    "cuDeviceGetAttribute": (ctypes.POINTER(_INT), _INT, _INT),
    "cuDeviceCanAccessPeer": (ctypes.POINTER(_INT), _INT, _INT),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), _INT),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuCtxSynchronize": (),
    "cuCtxEnablePeerAccess": (ctypes.c_void_p, ctypes.c_uint),
    "cuMemGetInfo_v2": (ctypes.POINTER(_SIZE), ctypes.POINTER(_SIZE)),
    "cuMemAlloc_v2": (ctypes.POINTER(_U64), _SIZE),
    "cuMemFree_v2": (_U64,),
    "cuMemsetD8_v2": (_U64, ctypes.c_ubyte, _SIZE),
    "cuMemcpyHtoD_v2": (_U64, ctypes.c_char_p, _SIZE),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, _U64, _SIZE),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _U64),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_U64), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_U64,),
}


class Driver:
    """One loaded CUDA driver.

    Args:
      path: of libcuda.

    Every method raises RuntimeError with the function and CUDA's name of the error if a call fails.
    """

    def __init__(self, path: str):
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise BackendUnavailable(
                f"the CUDA driver cannot be loaded ({error}); peer buffers need an NVIDIA GPU with its driver"
            ) from error
        self._functions = {}
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _INT
            self._functions[name] = function
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Calls one function of :data:`_FUNCTIONS`."""
        result = self._functions[name](*arguments)
        if result:
            raise RuntimeError(f"{name} failed: {self._error_name(result)}")

    def _error_name(self, result: int) -> str:
        text = ctypes.c_char_p()
        self._functions["cuGetErrorName"](result, ctypes.byref(text))
        return text.value.decode() if text.value else f"CUDA error {result}"

    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Makes the device's primary context current on this thread."""
        self.call("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device: int) -> ctypes.c_void_p:
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(device))
            self._contexts[device] = context
        return self._contexts[device]

    def _device(self, device: int) -> int:
        handle = _INT()
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        return handle.value

    def device_count(self) -> int:
        """Devices that this process sees."""
        count = _INT()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def clock_hz(self, device: int) -> int:
        """Cycles per second that the SMs reach at most."""
        khz = _INT()
        self.call("cuDeviceGetAttribute", ctypes.byref(khz), _CLOCK_RATE_KHZ, self._device(device))
        return khz.value * 1000

    def free_bytes(self, device: int) -> int:
        """Memory of the device that nobody has taken."""
        free, total = _SIZE(), _SIZE()
        with self.current(device):
            self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, device: int, nbytes: int) -> int:
        """Address of fresh memory, outside of XLA's pool."""
        address = _U64()
        with self.current(device):
            self.call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, device: int, address: int) -> None:
        """Gives memory back."""
        with self.current(device):
            self.call("cuMemFree_v2", address)

    def clear(self, device: int, address: int, nbytes: int) -> None:
        """Zeroes memory and waits for it."""
        with self.current(device):
            self.call("cuMemsetD8_v2", address, 0, nbytes)
            self.call("cuCtxSynchronize")

    def write(self, device: int, address: int, data: bytes) -> None:
        """Copies to the device and waits for it."""
        with self.current(device):
            self.call("cuMemcpyHtoD_v2", address, data, len(data))
            self.call("cuCtxSynchronize")

    def read(self, device: int, address: int, nbytes: int) -> bytes:
        """Copies from the device."""
        data = ctypes.create_string_buffer(nbytes)
        with self.current(device):
            self.call("cuMemcpyDtoH_v2", data, address, nbytes)
        return data.raw

    def synchronize(self, device: int) -> None:
        """Waits for everything on the device; raises what any kernel left behind."""
        with self.current(device):
            self.call("cuCtxSynchronize")

    def reaches(self, device: int, peer: int) -> bool:
        """Whether kernels of ``device`` can touch memory of ``peer``, once :meth:`enable_peer` has been called."""
        able = _INT()
        self.call("cuDeviceCanAccessPeer", ctypes.byref(able), self._device(device), self._device(peer))
        return bool(able.value)

    def enable_peer(self, device: int, peer: int) -> None:
        """Lets kernels of ``device`` touch memory of ``peer``; XLA may have done so."""
        with self.current(device):
            result = self._functions["cuCtxEnablePeerAccess"](self._context(peer), 0)
        if result not in (0, _ALREADY_ENABLED):
            raise RuntimeError(f"cuCtxEnablePeerAccess failed: {self._error_name(result)}")

    def export(self, device: int, address: int) -> bytes:
        """A handle by which another process of this host can open the memory."""
        handle = _Handle()
        with self.current(device):
            self.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, device: int, handle: bytes) -> int:
        """Address under which ``device`` sees the memory of another process."""
        address = _U64()
        with self.current(device):
            opened = _Handle.from_buffer_copy(handle)
            self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, device: int, address: int) -> None:
        """Undoes :meth:`open`."""
        with self.current(device):
            self.call("cuIpcCloseMemHandle", address)


def driver() -> Driver:
    """The driver that ``JAXMOE_LIBCUDA`` names, else libcuda; loaded on first use.

    Raises:
      BackendUnavailable: there is none.
    """
    return _load(os.environ.get("JAXMOE_LIBCUDA") or "libcuda.so.1")


@functools.cache
def _load(path: str) -> Driver:
    return Driver(path)
