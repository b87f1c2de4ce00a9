"""How DeepGEMM's host code cuts a GEMM into tiles, as a pure function.

:func:`choose` only chooses; whether a kernel can run the choice is :func:`jaxmoe.cuda.deepgemm.checks.check`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxmoe.cuda.deepgemm.gemm import DTYPES, SMEM_LIMIT, Arch, Config, Gemm, align, ceil_div, swizzle_of
from jaxmoe.errors import BackendUnavailable, ShapeError

_CLUSTERS = ((1, 1), (1, 2), (2, 1))


def choose(gemm: Gemm, *, num_sms: int, mk_alignment: int = 128) -> Config:
    """The configuration for one GEMM.

    Args:
      gemm: what to compute; every extent at least 1.
      num_sms: SMs to use, even.
      mk_alignment: rows that experts start at multiples of. It is BLOCK_M for contiguous and psum, and for masked
        on SM100.

    Raises:
      ShapeError: an empty GEMM, an odd ``num_sms``.
      BackendUnavailable: an alignment that is not a multiple of 16; no configuration fits into shared memory.
    """
    if min(gemm.m, gemm.n, gemm.k, gemm.groups) < 1:
        raise ShapeError(f"m {gemm.m}, n {gemm.n}, k {gemm.k}, groups {gemm.groups}: each must be at least 1")
    if num_sms < 2 or num_sms % 2:
        raise ShapeError(f"num_sms is {num_sms}; the kernels run on an even number of SMs, at least 2")
    aligned = gemm.layout in ("contiguous", "psum", "k_grouped") or (gemm.layout == "masked" and gemm.arch == "sm_100")
    if aligned and (mk_alignment < 16 or mk_alignment % 16):
        raise BackendUnavailable(f"mk_alignment is {mk_alignment}; it must be a multiple of 16, at least 16")
    if gemm.k_grouped and gemm.arch == "sm_90" and mk_alignment % 64:
        raise BackendUnavailable(
            f"k_grouped on sm_90: groups are multiples of {mk_alignment} rows; set mk_alignment to a multiple of 64"
        )
    choice = _choose_sm90 if gemm.arch == "sm_90" else _choose_sm100
    return choice(gemm, num_sms, mk_alignment)


def theoretical_mk_alignment(arch: Arch, expected_m: int = 0) -> int:
    """The row alignment that should run fastest; nothing applies it by itself.

    Args:
      arch: where it runs.
      expected_m: real rows per expert; 0 if unknown.

    Returns:
      128 on SM90. On SM100 the least of 32, 64, …, 224 that holds ``expected_m`` rows, 224 if none or unknown. A
      masked layout on SM100 can use 32, 64 and 128 only.
    """
    if arch == "sm_90":
        return 128
    return min(224, max(32, align(expected_m, 32))) if expected_m else 224


def waves(gemm: Gemm, block_m: int, block_n: int, num_sms: int) -> tuple[int, int]:
    """How often all SMs get a tile, and the number of tiles in the last round."""
    expected_m, expected_groups = gemm.balanced
    blocks = ceil_div(expected_m, block_m) * ceil_div(gemm.n, block_n) * expected_groups
    rounds = ceil_div(blocks, num_sms)
    return rounds, blocks - (rounds - 1) * num_sms


def _choose_sm90(gemm: Gemm, num_sms: int, mk_alignment: int) -> Config:
    best, best_cost = None, None
    for config in _candidates_sm90(gemm, num_sms, mk_alignment):
        cost = _cost_sm90(gemm, config)
        if best_cost is None or cost < best_cost:
            best, best_cost = config, cost
    return _found(best, gemm, num_sms, mk_alignment)


def _candidates_sm90(gemm: Gemm, num_sms: int, mk_alignment: int) -> Iterator[Config]:
    if gemm.layout == "dense":
        block_ms = [64, 128, *(b for b in (16, 32) if gemm.m <= b), *([256] if gemm.d != "f32" else [])]
    elif gemm.k_grouped:
        block_ms = [64, 128, 256]
    else:
        block_ms = [64, 128] if gemm.layout == "masked" else [mk_alignment]
    for cluster_m, cluster_n in _CLUSTERS:
        for block_m in block_ms:
            for block_n in range(16, 193 if gemm.scaled else 257, 16):
                config = _tile_sm90(gemm, num_sms, block_m, block_n, cluster_m, cluster_n)
                if _legal_sm90(gemm, config):
                    yield config


def _tile_sm90(gemm: Gemm, num_sms: int, block_m: int, block_n: int, cluster_m: int, cluster_n: int) -> Config:
    size, out = DTYPES[gemm.a].smem_bytes, DTYPES[gemm.d].smem_bytes
    block_k = 128 // size
    fixed = align(block_m * block_n * out, 1024) + 256
    stage = (block_m + block_n) * 128
    if gemm.scaled:
        fixed += align(ceil_div(gemm.k, block_k) * 4 * (1 if block_k % block_n == 0 else 2), 8)
        stage += align(4 * block_m, 128)
    stages = min((SMEM_LIMIT - fixed) // stage, 16)
    return Config(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        cluster_m=cluster_m,
        cluster_n=cluster_n,
        load_m=block_m,
        load_n=block_n,
        store_m=block_m,
        swizzle_a=128,
        swizzle_b=128 if gemm.b_major == "K" else swizzle_of(block_n * size),
        swizzle_d=swizzle_of(block_n * out) if gemm.d != "f32" else 0,
        stages=stages,
        smem_size=fixed + stages * stage,
        num_sms=num_sms,
        producer_threads=128,
        math_threads=128 if block_m <= 64 else 256,
    )


def _legal_sm90(gemm: Gemm, c: Config) -> bool:
    beyond = c.block_n - c.block_k
    straddles = gemm.scaled and beyond > 0 and c.block_n % beyond and c.block_k % beyond
    unpaired = gemm.layout in ("masked", "psum") and ceil_div(gemm.n, c.block_n) % c.cluster
    unpaired = _reaches_out(gemm, c) if gemm.k_grouped else unpaired
    shallow = c.stages < (4 if c.block_m * c.block_n < 128 * 192 else 3)
    too_large = c.block_m > 128 and c.block_n > 128
    return not (c.num_sms % c.cluster or straddles or unpaired or shallow or too_large or c.swizzle_b < 64)


def _reaches_out(gemm: Gemm, c: Config) -> int:
    """Whether a tile of a k-grouped GEMM would store into the next group, or a cluster span two groups.

    Such a cluster hangs or gives wrong numbers (deepseek-ai/DeepGEMM pull requests 415 and 429).
    """
    m_tiles, n_tiles = ceil_div(gemm.m, c.block_m), ceil_div(gemm.n, c.block_n)
    return gemm.m % c.block_m or m_tiles % c.cluster_m or n_tiles % c.cluster_n


def _cost_sm90(gemm: Gemm, c: Config) -> float:
    """A model of the time the tiles take, from bytes through L2 and L1 and the fill of the last round."""
    size, out = DTYPES[gemm.a].smem_bytes, DTYPES[gemm.d].smem_bytes
    rounds, last = waves(gemm, c.block_m, c.block_n, c.num_sms)
    if c.cluster > 1 and rounds == 1:
        return float("inf")
    blocks = (rounds - 1) * c.num_sms + last
    l2_rate = int(min(64 * c.num_sms, 8e6 / 1.3e3))
    l1_rate = 128 * c.num_sms
    io = c.block_m * c.block_n * out
    l2_loads = gemm.depth * (c.block_m // c.cluster_n + c.block_n // c.cluster_m) * size
    l1_loads = gemm.depth * (c.block_m + c.block_n) * size
    tensor_cores = gemm.depth * (max(64, c.block_m) + c.block_n) * size + io
    cycles = max((l2_loads + io) * blocks // l2_rate, (l1_loads + tensor_cores + io) * blocks // l1_rate)
    return int(np.float32(cycles) / np.float32(blocks / (rounds * c.num_sms)))


def _choose_sm100(gemm: Gemm, num_sms: int, mk_alignment: int) -> Config:
    if gemm.m_grouped:
        pair = ceil_div(gemm.n, 128) % 2 == 0
        best = _tile_sm100(gemm, num_sms, True, mk_alignment, 128, 1, 2 if pair else 1)
        return _found(best if best.stages > 0 else None, gemm, num_sms, mk_alignment)
    best = min(_candidates_sm100(gemm, num_sms), key=lambda c: _rank_sm100(gemm, c), default=None)
    return _found(best, gemm, num_sms, mk_alignment)


def _candidates_sm100(gemm: Gemm, num_sms: int) -> Iterator[Config]:
    upright = 32 if gemm.m <= 32 else 64 if gemm.m <= 64 or (gemm.k_grouped and gemm.m % 128) else 128
    widths = [16, *range(32, (128 if gemm.k <= 256 else 256) + 1, 32)]
    # The pinned kernel reads tensor memory without the wait it needs when it stores float32 and swaps: never swap then.
    for swap in (False,) if gemm.d == "f32" else (False, True):
        blocks = [(block_m, 128) for block_m in range(16, 257, 16)] if swap else [(upright, width) for width in widths]
        for cluster_m, cluster_n in _CLUSTERS:
            if cluster_m > 1 if swap else cluster_n > 1:
                continue
            for block_m, block_n in blocks:
                config = _tile_sm100(gemm, num_sms, swap, block_m, block_n, cluster_m, cluster_n)
                if _legal_sm100(gemm, config):
                    yield config


def _tile_sm100(
    gemm: Gemm, num_sms: int, swap: bool, block_m: int, block_n: int, cluster_m: int, cluster_n: int
) -> Config:
    a, b, out = DTYPES[gemm.a].smem_bytes, DTYPES[gemm.b].smem_bytes, DTYPES[gemm.d].smem_bytes
    block_k = 128 // a
    load_m, load_n = block_m // cluster_n, block_n // cluster_m
    store_m = 16 if swap else min(128, block_m)
    swizzle_d = swizzle_of(block_n * out)
    fixed = (16 * 128 * out if swap else store_m * swizzle_d) * 2 + 32 * 24 + 32 + 8 + 4
    stage = (load_m * a + load_n * b) * block_k
    if gemm.scaled:
        stage += 4 * (align(block_m, 128) + align(block_n, 128))
    stages = min((SMEM_LIMIT - fixed) // stage, 32)
    return Config(
        swap_ab=swap,
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        cluster_m=cluster_m,
        cluster_n=cluster_n,
        load_m=load_m,
        load_n=load_n,
        store_m=store_m,
        swizzle_a=swizzle_of(load_m * a) if gemm.k_grouped else 128,
        swizzle_b=128 if gemm.b_major == "K" else swizzle_of(load_n * b),
        swizzle_d=swizzle_d,
        stages=stages,
        smem_size=fixed + stages * stage,
        num_sms=num_sms,
        producer_threads=128,
        math_threads=128,
    )


def tensor_memory_columns(gemm: Gemm, config: Config) -> int:
    """Columns of SM100 tensor memory in use: two accumulators and, with scales, one copy of the scales; at most 512."""
    accumulators = 2 * (config.block_m if config.swap_ab else config.block_n)
    scales = (align(config.block_m, 128) + align(config.block_n, 128)) // 32 if gemm.scaled else 0
    return accumulators + scales


def _legal_sm100(gemm: Gemm, c: Config) -> bool:
    step_m, step_n = 64 if gemm.k_grouped else 8, 64 if gemm.b_major == "MN" else 8
    unaligned = c.load_m % step_m or c.load_n % step_n or (gemm.k_grouped and _reaches_out(gemm, c))
    unpaired = ceil_div(gemm.m, c.block_m) % c.cluster_m or ceil_div(gemm.n, c.block_n) % c.cluster_n
    return not (c.num_sms % c.cluster or unaligned or unpaired or tensor_memory_columns(gemm, c) > 512)


def _rank_sm100(gemm: Gemm, c: Config) -> tuple[int, ...]:
    """Best first: a single round, pairs of CTAs, fewer rounds, a fuller last round, smaller tiles."""
    rounds, last = waves(gemm, c.block_m, c.block_n, c.num_sms)
    return (rounds > 1, -c.cluster, rounds, -last, c.block_m + c.block_n, c.block_m * c.block_n)


def _found(config: Config | None, gemm: Gemm, num_sms: int, mk_alignment: int) -> Config:
    if config is None:
        raise BackendUnavailable(
            f"no DeepGEMM tile fits {SMEM_LIMIT} bytes of shared memory for {gemm} on {num_sms} SMs "
            f"with rows aligned to {mk_alignment}; use mk_alignment 128 or another backend"
        )
    return config
