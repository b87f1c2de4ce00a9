"""Template arguments and source of each kernel: an include, a using directive, and one full specialisation."""

from __future__ import annotations

from collections.abc import Sequence

from jaxmoe.cuda.deepgemm.gemm import DTYPES, GEMM_TYPES, MAJORS, Config, Gemm
from jaxmoe.cuda.source import KernelSource

_HEADERS = {
    ("sm_90", "1d2d"): "sm90_fp8_gemm_1d2d",
    ("sm_90", "bf16"): "sm90_bf16_gemm",
    ("sm_100", "1d1d"): "sm100_fp8_fp4_gemm_1d1d",
    ("sm_100", "bf16"): "sm100_bf16_gemm",
}
TARGETS = {"sm_90": "sm_90a", "sm_100": "sm_100f"}


def header(gemm: Gemm) -> str:
    """The header, and less ``_impl`` the kernel template, that computes ``gemm``."""
    return _HEADERS[gemm.arch, gemm.kind]


def template_args(gemm: Gemm, config: Config, *, mk_alignment: int = 128) -> tuple[str, ...]:
    """The kernel's template arguments in order, as C++.

    Grouped kernels have the sizes of the weight compiled in, dense ones take all extents at run time; the number of
    rows is never compiled in, so that it costs no compilation.
    """
    c = config
    major_a, major_b = MAJORS["MN" if gemm.k_grouped else "K"], MAJORS[gemm.b_major]
    shape = (0, gemm.n, gemm.k) if gemm.m_grouped else (gemm.m, gemm.n, 0) if gemm.k_grouped else (0, 0, 0)
    block = (c.block_m, c.block_n, c.block_k)
    groups = gemm.groups if gemm.grouped else 1
    swizzle = (c.swizzle_a, c.swizzle_b, c.swizzle_d)
    schedule = (c.producer_threads, c.math_threads, c.cluster, c.cluster_n > 1, c.num_sms)
    gemm_type, a, b, d = GEMM_TYPES[gemm.layout], DTYPES[gemm.a].cpp, DTYPES[gemm.b].cpp, DTYPES[gemm.d].cpp
    epilogue, accumulate = "epilogue::transform::EpilogueIdentity", False
    if header(gemm) == "sm90_fp8_gemm_1d2d":
        args = (MAJORS["K"], *shape, groups, *block, *swizzle, c.stages, *schedule, gemm_type, d, epilogue)
    elif header(gemm) == "sm90_bf16_gemm":
        args = (major_a, major_b, *shape, groups, *block, *swizzle, c.stages, *schedule, gemm_type, accumulate, d)
    elif header(gemm) == "sm100_fp8_fp4_gemm_1d1d":
        grans = (gemm.gran_a, gemm.gran_b, gemm.gran_a)
        args = (major_a, major_b, *grans, *shape, *block, groups, *swizzle, c.stages, *schedule)
        args += (c.swap_ab, gemm.zero_padding, gemm_type, accumulate, a, b, d, epilogue)
    else:
        full_rate = 100
        args = (major_a, major_b, *shape, *block, groups, *swizzle, c.stages, *schedule, mk_alignment)
        args += (c.swap_ab, gemm.zero_padding, gemm_type, accumulate, d, full_rate)
    return tuple(map(_cpp, args))


def source(gemm: Gemm, config: Config, *, mk_alignment: int = 128) -> KernelSource:
    """What to compile for ``gemm``."""
    return instantiate(gemm.name, gemm.arch, header(gemm), template_args(gemm, config, mk_alignment=mk_alignment))


def instantiate(name: str, arch: str, header_name: str, args: Sequence[str]) -> KernelSource:
    """The source that makes one kernel of the template in ``header_name``; taking its address instantiates it."""
    code = (
        f"#include <deep_gemm/impls/{header_name}.cuh>\n"
        "using namespace deep_gemm;\n"
        f"void jaxmoe_instantiate() {{ (void)&{header_name}_impl<{', '.join(args)}>; }}\n"
    )
    return KernelSource(name=name, arch=TARGETS[arch], code=code)


def _cpp(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
