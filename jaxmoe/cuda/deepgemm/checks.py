"""What the kernels silently get wrong, or trap on, refused before the launch.

A layout that breaks its contract is a ``ShapeError``. A case that DeepGEMM has no kernel for is
``BackendUnavailable``, so that another backend can take it.
"""

from __future__ import annotations

from jaxmoe.cuda.deepgemm.gemm import GEMM_TYPES, SMEM_LIMIT, Config, Gemm, align, ceil_div
from jaxmoe.cuda.deepgemm.heuristics import tensor_memory_columns
from jaxmoe.errors import BackendUnavailable, ShapeError

_INT32_END = 2**31


def check_problem(gemm: Gemm) -> None:
    """Refuses what no configuration can make right.

    Raises:
      ShapeError: negative or empty extents, groups without a grouped layout, a meaningless ``expected_m``.
      BackendUnavailable: dtypes, scale recipes or extents that DeepGEMM has no kernel for.
    """
    _check_extents(gemm)
    _check_dtypes(gemm)
    _check_multiples(gemm)
    _check_range(gemm)


def check(gemm: Gemm, config: Config) -> None:
    """Refuses ``gemm`` if ``config`` cannot run it; see :func:`check_problem` for the rest.

    Raises:
      BackendUnavailable: rows that are not aligned or a capacity that is not a multiple of BLOCK_M, a BLOCK_M that
        the layout cannot have.
      ShapeError: a configuration that no kernel can run: float32 output with swapped operands on SM100, too much
        tensor or shared memory.
    """
    block_m = config.block_m
    if gemm.layout in ("masked", "contiguous") and gemm.m % block_m:
        what, beyond = "number of rows m", "rows without a label"
        if gemm.layout == "masked":
            what, beyond = "capacity m of an expert", "the next expert"
        raise BackendUnavailable(
            f"{gemm.layout}: the {what} is {gemm.m}, not a multiple of BLOCK_M {block_m}, and the last tile would run "
            f"into {beyond}; pad m to {align(gemm.m, block_m)}"
        )
    if gemm.m_grouped and gemm.arch == "sm_90" and block_m not in (64, 128):
        raise BackendUnavailable(f"{gemm.layout} on sm_90: BLOCK_M is {block_m}; set mk_alignment to 64 or 128")
    if gemm.layout == "masked" and gemm.arch == "sm_100" and block_m not in (32, 64, 128):
        raise BackendUnavailable(f"masked on sm_100: BLOCK_M is {block_m}; set mk_alignment to 32, 64 or 128")
    if gemm.arch == "sm_100":
        if config.swap_ab and gemm.d == "f32":
            raise ShapeError("float32 output with swap_ab reads unfinished sums on sm_100; set swap_ab=False")
        columns = tensor_memory_columns(gemm, config)
        if columns > 512:
            raise ShapeError(
                f"{gemm.layout} on sm_100: BLOCK_M {block_m} and BLOCK_N {config.block_n} need {columns} columns of "
                "tensor memory, above 512; set mk_alignment to at most 240, for bf16 to at most 256"
            )
    if config.smem_size > SMEM_LIMIT:
        raise ShapeError(f"{config.smem_size} bytes of shared memory, above {SMEM_LIMIT}; choose a smaller tile")


def _check_extents(gemm: Gemm) -> None:
    if gemm.layout not in GEMM_TYPES:
        raise ValueError(f"layout is {gemm.layout!r}; choose one of {', '.join(map(repr, GEMM_TYPES))}")
    if min(gemm.m, gemm.n) < 0 or gemm.k < 1:
        raise ShapeError(f"m {gemm.m}, n {gemm.n}, k {gemm.k}: m and n must be at least 0, k at least 1")
    if gemm.groups < 1 or (gemm.groups > 1 and not gemm.grouped):
        raise ShapeError(
            f"groups is {gemm.groups} with layout {gemm.layout!r}; dense has 1 group, the others at least 1"
        )
    if gemm.expected_m < 0 or (gemm.expected_m and gemm.layout not in ("psum", "masked")):
        raise ShapeError(
            f"expected_m is {gemm.expected_m} with layout {gemm.layout!r}; psum and masked take rows per expert, "
            "the others 0"
        )


def _check_dtypes(gemm: Gemm) -> None:
    operands = f"a {gemm.a}, b {gemm.b}, d {gemm.d} on {gemm.arch}"
    if gemm.arch not in ("sm_90", "sm_100"):
        raise BackendUnavailable(f"DeepGEMM has no kernels for {gemm.arch}; it has them for sm_90 and sm_100")
    values = {"e4m3"} if gemm.arch == "sm_90" else {"e4m3", "e2m1"}
    if not (gemm.a == gemm.b == "bf16" or {gemm.a, gemm.b} <= values):
        raise BackendUnavailable(f"{operands}: operands are both bf16, or both of {', '.join(sorted(values))}")
    if gemm.d not in ("bf16", "f32"):
        raise BackendUnavailable(f"{operands}: the output is bf16 or f32")
    if gemm.d == "f32" and (gemm.grouped or gemm.kind == "1d2d"):
        raise BackendUnavailable(f"{operands}: float32 output is for dense bf16, and dense on sm_100; take bf16")
    grans = (gemm.gran_a, gemm.gran_b)
    if gemm.kind == "1d2d" and grans != (128, 128):
        raise BackendUnavailable(
            f"scales over {grans} columns on sm_90: the kernel has (1, 128) × (128, 128) only; convert the weights"
        )
    if gemm.kind == "1d1d" and not {*grans} <= {32, 128}:
        raise BackendUnavailable(f"scales over {grans} columns on sm_100: the kernel has 32 and 128 only")
    if gemm.k_grouped and (gemm.scaled or gemm.b_major != "MN"):
        raise BackendUnavailable(f"{operands}: k_grouped is for bf16 operands that lie as [k, m] and [k, n] only")
    if gemm.b_major == "MN" and gemm.scaled:
        raise BackendUnavailable(f"{operands}: an MN-major B is for bf16 only; transpose B")


def _check_multiples(gemm: Gemm) -> None:
    if "e2m1" in (gemm.a, gemm.b):
        step, why = 128, "FP4 copies"
    elif gemm.scaled:
        step, why = 16, "16-byte rows"
    elif gemm.m_grouped and (gemm.arch == "sm_90" or gemm.b_major == "MN"):
        step, why = 64, "tiles that must not reach into the next expert"
    else:
        step, why = 8, "16-byte rows"
    if gemm.k % step:
        raise BackendUnavailable(
            f"k is {gemm.k}, not a multiple of {step} ({why}); pad k to {align(gemm.k, step)} with zeros"
        )
    if gemm.k_grouped and gemm.m % 64:
        raise BackendUnavailable(
            f"k_grouped: m is {gemm.m}, not a multiple of 64, and the last tile would run into the next expert; pad m "
            f"to {align(gemm.m, 64)}"
        )
    if gemm.n % 8:
        raise BackendUnavailable(f"n is {gemm.n}, not a multiple of 8 (16-byte rows); pad n to {align(gemm.n, 8)}")


def _check_range(gemm: Gemm) -> None:
    """Coordinates in tensor maps and SM90's index into the scales of B have 32 bits; element offsets have more."""
    groups_b = gemm.groups if gemm.m_grouped else 1
    b_rows = (gemm.n if gemm.b_major == "K" else gemm.k) * groups_b
    extents = {"rows of a": gemm.rows, "rows of b": b_rows, "n": gemm.n, "k": gemm.k}
    if gemm.kind == "1d2d":
        extents["scales of b"] = ceil_div(gemm.n, 128) * ceil_div(gemm.k, 128) * groups_b
    for what, extent in extents.items():
        if extent >= _INT32_END:
            raise BackendUnavailable(
                f"{what}: {extent} is not below 2^31 = {_INT32_END}; split the batch or the experts"
            )
