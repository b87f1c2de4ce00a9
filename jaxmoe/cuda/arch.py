"""What kernels are compiled for: the compiler's name of an architecture and the number of SMs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxmoe.errors import BackendUnavailable

# The plain names (sm_90, sm_100) lack the wgmma and tcgen05 instructions. sm_100f is one cubin for 10.0 and 10.3.
_CAPABILITIES = {"sm_90a": ((9, 0),), "sm_100f": ((10, 0), (10, 3))}


@dataclasses.dataclass(frozen=True)
class Arch:
    """A GPU as kernels see it.

    Attributes:
      name: the compiler's name, ``sm_90a`` or ``sm_100f``.
      num_sms: SMs a persistent kernel fills; even, because kernels pair them in clusters of two.
    """

    name: str
    num_sms: int

    def __post_init__(self) -> None:
        if self.name not in _CAPABILITIES:
            raise BackendUnavailable(
                f"architecture {self.name!r}: kernels are compiled for sm_90a (H100, H200) and sm_100f (B200, B300) "
                "only; use another backend on other GPUs"
            )
        if self.num_sms < 2 or self.num_sms % 2:
            raise ValueError(f"num_sms is {self.num_sms}; it must be even and at least 2, as SMs work in pairs")

    @property
    def family(self) -> str:
        """``sm90`` or ``sm100``: which set of kernels."""
        return "sm90" if self.name == "sm_90a" else "sm100"


def arch_name(capability: tuple[int, int]) -> str:
    """Returns the compiler's name for a compute capability.

    Raises:
      BackendUnavailable: there are no kernels for it; the message says why.
    """
    for name, capabilities in _CAPABILITIES.items():
        if capability in capabilities:
            return name
    shown = f"compute capability {capability[0]}.{capability[1]}"
    if capability[0] == 12:
        raise BackendUnavailable(
            f"{shown}: the kernels of sgl-deep-gemm 0.1.4.post1 need wgmma (9.0) or tcgen05 (10.0, 10.3), which "
            "12.x does not have; use another backend"
        )
    raise BackendUnavailable(f"{shown}: there are kernels for 9.0, 10.0 and 10.3 only; use another backend")


def detect(device: Any = None) -> Arch:
    """Returns the architecture of a JAX device.

    Args:
      device: a JAX GPU device; None takes the first local one.

    Raises:
      BackendUnavailable: no GPU, or none with kernels.
    """
    if device is None:
        device = jax.local_devices()[0]
    if device.platform not in ("gpu", "cuda"):
        raise BackendUnavailable(
            f"device {device} is of platform {device.platform!r}; CUDA kernels need an NVIDIA GPU. Name the "
            "architecture (for example sm_90a with 132 SMs) to compile for one that is not here"
        )
    major, _, minor = str(device.compute_capability).partition(".")
    return Arch(arch_name((int(major), int(minor or 0))), device.core_count - device.core_count % 2)
