"""LaunchSpecs of the DeepGEMM GEMMs.

The custom call takes ``a, [scales of a], b, [scales of b], [grouped_layout]`` as its arguments, in this order and
without gaps (bf16 has no scales, dense no ``grouped_layout``), and gives d as its only result:

============== =============================================================================================
a              [m, k], masked [G, m, k], k_grouped [k, m]; FP4 as bytes [.., k/2]
scales of a    SM90: float32 [⌈k/128⌉, align(m, 4)]; SM100: int32 [⌈k/(4·gran_a)⌉, align(m, 4)], four UE8M0
               exponents a word; masked has G of these
b              [n, k] or [G, n, k], FP4 as bytes [.., k/2]; with ``b_major`` "MN" [k, n] or [G, k, n], k_grouped [k, n]
scales of b    SM90: float32 [⌈n/128⌉, ⌈k/128⌉]; SM100: int32 [⌈k/(4·gran_b)⌉, align(n, 4)]; grouped has G of these
grouped_layout as :class:`jaxmoe.cuda.deepgemm.gemm.Gemm` says
d              [m, n], masked and k_grouped [G, m, n]
============== =============================================================================================
"""

from __future__ import annotations

from jaxmoe.cuda.deepgemm.checks import check, check_problem
from jaxmoe.cuda.deepgemm.gemm import DTYPES, Config, Gemm, align, ceil_div
from jaxmoe.cuda.deepgemm.heuristics import choose
from jaxmoe.cuda.deepgemm.template import source
from jaxmoe.cuda.launch import Buffer, Integer, LaunchSpec, Param, Pointer, TensorMap, TensorMapDtype
from jaxmoe.cuda.source import KernelSource


def plan_launch(
    gemm: Gemm, *, num_sms: int, mk_alignment: int = 128, pdl: bool = False
) -> tuple[KernelSource, LaunchSpec] | None:
    """Source and launch of one GEMM.

    Args:
      gemm: what to compute.
      num_sms: SMs to use, even; at most those of the device.
      mk_alignment: rows that experts start at multiples of (contiguous, psum; masked on SM100).
      pdl: programmatic stream serialisation.

    Returns:
      The source, and the launch whose ``cubin`` is the kernel's name until ``dataclasses.replace(spec, cubin=key)``.
      None when m or n is 0: there is nothing to launch, and a tensor map cannot be empty.

    Raises:
      ShapeError: extents, alignment or capacity that the layout does not allow.
      BackendUnavailable: a case DeepGEMM has no kernel for.
    """
    check_problem(gemm)
    if gemm.m == 0 or gemm.n == 0:
        return None
    config = choose(gemm, num_sms=num_sms, mk_alignment=mk_alignment)
    check(gemm, config)
    return source(gemm, config, mk_alignment=mk_alignment), build(gemm, config, pdl=pdl)


def build(gemm: Gemm, config: Config, *, cubin: str | None = None, pdl: bool = False) -> LaunchSpec:
    """The launch of ``gemm`` cut as ``config`` says, unchecked; ``cubin`` is the kernel's name if not given."""
    return LaunchSpec(
        cubin=cubin or gemm.name,
        name=gemm.name,
        grid=(config.num_sms, 1, 1),
        block=(config.threads, 1, 1),
        dynamic_smem=config.smem_size,
        params=_params(gemm, config),
        cluster=config.cluster,
        pdl=pdl,
    )


def argument_names(gemm: Gemm) -> tuple[str, ...]:
    """The custom call's arguments in order."""
    names = ("a", "scales_a", "b", "scales_b") if gemm.scaled else ("a", "b")
    return (*names, "grouped_layout") if gemm.grouped else names


def _params(gemm: Gemm, config: Config) -> tuple[Param, ...]:
    buffers = {name: Buffer("argument", i) for i, name in enumerate(argument_names(gemm))}
    maps = _maps(gemm, config, buffers)
    shape = tuple(map(Integer, (gemm.m, gemm.n, gemm.k)))
    layout = Pointer(None)
    if gemm.grouped:
        layout = Pointer(buffers["grouped_layout"], 4 * (gemm.m if gemm.layout == "contiguous" else gemm.groups))
    if gemm.kind == "bf16":
        return (layout, *shape, maps["a"], maps["b"], maps["d"])
    if gemm.kind == "1d2d":
        blocks = ceil_div(gemm.n, 128) * ceil_div(gemm.k, 128) * gemm.groups
        return (
            Pointer(buffers["scales_b"], 4 * blocks),
            layout,
            *shape,
            maps["a"],
            maps["b"],
            maps["d"],
            maps["scales_a"],
        )
    return (layout, *shape, maps["a"], maps["b"], maps["scales_a"], maps["scales_b"], maps["d"])


def _maps(gemm: Gemm, c: Config, buffers: dict[str, Buffer]) -> dict[str, TensorMap]:
    groups_a = gemm.groups if gemm.layout == "masked" else 1
    groups_b = gemm.groups if gemm.m_grouped else 1
    a, b, d = DTYPES[gemm.a], DTYPES[gemm.b], DTYPES[gemm.d]
    a_inner, a_outer, a_box = gemm.k, gemm.m * groups_a, (c.block_k, c.load_m)
    if gemm.k_grouped:
        a_inner, a_outer, a_box = gemm.m, gemm.k, (c.swizzle_a // a.smem_bytes, c.block_k)
    b_inner, b_outer, b_box = gemm.k, gemm.n, (c.block_k, c.load_n)
    if gemm.b_major == "MN":
        b_inner, b_outer, b_box = gemm.n, gemm.k, (c.swizzle_b // b.smem_bytes, c.block_k)
    d_inner = c.swizzle_d // d.smem_bytes if c.swizzle_d else c.block_n
    maps = {
        "a": _map(buffers["a"], a.tensor_map, a.bits, a_inner, a_outer, a_box, c.swizzle_a),
        "b": _map(buffers["b"], b.tensor_map, b.bits, b_inner, b_outer * groups_b, b_box, c.swizzle_b),
        "d": _map(Buffer("result", 0), d.tensor_map, d.bits, gemm.n, gemm.rows, (d_inner, c.store_m), c.swizzle_d),
    }
    if gemm.scaled:
        packed = 1 if gemm.kind == "1d2d" else 4
        dtype: TensorMapDtype = "FLOAT32" if gemm.kind == "1d2d" else "INT32"
        operands = {
            "scales_a": (gemm.m, gemm.gran_a, groups_a, c.block_m),
            "scales_b": (gemm.n, gemm.gran_b, groups_b, c.block_n),
        }
        for name, (rows, gran, groups, block) in operands.items():
            outer = ceil_div(gemm.k, packed * gran) * groups
            maps[name] = _map(buffers[name], dtype, 32, align(rows, 4), outer, (block, 1), 0)
    return maps


def _map(
    buffer: Buffer, dtype: TensorMapDtype, bits: int, inner: int, outer: int, box: tuple[int, int], swizzle: int
) -> TensorMap:
    """A map over a dense row-major [outer, inner] array; a swizzle of 16 bytes is none."""
    return TensorMap(
        buffer=buffer,
        dtype=dtype,
        dims=(inner, outer),
        strides=(inner * bits // 8,),
        box=box,
        swizzle=swizzle if swizzle > 16 else 0,
    )
