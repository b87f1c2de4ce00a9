"""The source of one kernel as data: what :mod:`jaxmoe.cuda.jit` hashes, compiles and caches."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Literal

Package = Literal["deep_gemm", "deep_ep"]


@dataclasses.dataclass(frozen=True)
class KernelSource:
    """CUDA source that instantiates exactly one kernel.

    Attributes:
      name: what runs, for messages, profiles and file names, e.g. ``sm90_fp8_1d2d_m_grouped_psum``.
      arch: what to compile for, ``sm_90a`` or ``sm_100f``.
      code: the translation unit. Equal code for an equal arch is the same cubin.
      package: whose headers it includes, ``deep_gemm`` or ``deep_ep``.
    """

    name: str
    arch: str
    code: str
    package: Package = "deep_gemm"


@functools.cache
def own_kernel(name: str, arch: str, *files: str) -> KernelSource:
    """One of ``jaxmoe/cuda/kernels``, made of ``files`` in order; it serves all sizes."""
    return KernelSource(name, arch, "\n".join(map(own_code, files)))


def own_code(file: str) -> str:
    """A file of ``jaxmoe/cuda/kernels``."""
    return (Path(__file__).parent / "kernels" / f"{file}.cuh").read_text(encoding="utf-8")
