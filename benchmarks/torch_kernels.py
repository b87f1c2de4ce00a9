"""The rooms around DeepGEMM's products for :mod:`benchmarks.torch_layer`, each one Triton kernel.

Import it only where torch and Triton are wanted. Rows of a grouped buffer lie in groups of ``each``; the scales of a
group are [columns / 128, each], as the products read them. A contiguous buffer is one group.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route(
    logits,
    bias,
    ids,
    weights,
    places,
    counts,
    tokens,
    scaling,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grouped sigmoid top-k of ROWS tokens; a choice's place is its number among those of its expert."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, E)
    live = (t < tokens)[:, None]
    score = tl.sigmoid(tl.load(logits + t[:, None] * E + e[None, :], mask=live, other=0.0))
    left = score + tl.load(bias + e)[None, :]

    members = tl.reshape(left, (ROWS, GROUPS, E // GROUPS))
    first = tl.argmax(members, axis=2)[:, :, None] == tl.arange(0, E // GROUPS)[None, None, :]
    value = tl.max(members, axis=2) + tl.max(tl.where(first, float("-inf"), members), axis=2)
    group = tl.arange(0, GROUPS)[None, :]
    open_groups = group < 0
    for _ in tl.static_range(TOP):
        best = tl.argmax(value, axis=1)[:, None] == group
        open_groups = open_groups | best
        value = tl.where(best, float("-inf"), value)
    closed = tl.where(open_groups, 0.0, float("-inf"))
    left += tl.reshape(tl.broadcast_to(closed[:, :, None], (ROWS, GROUPS, E // GROUPS)), (ROWS, E))

    order = tl.full((ROWS, E), K, tl.int32)
    for k in tl.static_range(K):
        best = tl.argmax(left, axis=1)[:, None] == e[None, :]
        order = tl.where(best, k, order)
        left = tl.where(best, float("-inf"), left)
    chosen = (order < K) & live
    weight = tl.where(chosen, score, 0.0)
    weight *= scaling / tl.sum(weight, axis=1)[:, None]
    ones = chosen.to(tl.int32)
    base = tl.atomic_add(counts + e, tl.sum(ones, axis=0), sem="relaxed")
    place = base[None, :] + tl.cumsum(ones, axis=0) - ones
    at = t[:, None] * K + order
    tl.store(ids + at, tl.broadcast_to(e[None, :], (ROWS, E)), mask=chosen)
    tl.store(weights + at, weight, mask=chosen)
    tl.store(places + at, place, mask=chosen)


@triton.jit
def quantise(x, values, scales, rows, width, each, GATED: tl.constexpr, BLOCKS: tl.constexpr):
    """Some 1×128 blocks of a row to e4m3. GATED: of silu(gate)·up of x [gate, up], and the rows are those listed."""
    row = tl.program_id(0)
    if GATED:
        row = tl.load(rows + row)
    group, place = row // each, row % each
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    start = row.to(tl.int64) * width
    if GATED:
        gate = tl.load(x + 2 * start + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + 2 * start + width + column, mask=inside, other=0.0).to(tl.float32)
        y = (gate * tl.sigmoid(gate) * up).to(tl.bfloat16).to(tl.float32)
    else:
        y = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(y), axis=1), 1e-10) * (1.0 / 448.0)
    codes = y * (1.0 / scale)[:, None]
    tl.store(values + start + column, codes.to(values.dtype.element_ty), mask=inside)
    at = (group * (width // 128) + block) * each + place
    tl.store(scales + at, scale, mask=block * 128 < width)


@triton.jit
def scatter(
    values,
    scales,
    ids,
    places,
    counts,
    to_values,
    to_scales,
    rows,
    labels,
    words,
    width_blocks,
    stride,
    each,
    E: tl.constexpr,
    K: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Part of a quantised token, in 8-byte words, to each of its K experts; the first part brings scale and label."""
    t, part = tl.program_id(0), tl.program_id(1)
    e = tl.arange(0, E)
    if MASKED:
        starts = e * each
    else:
        padded = (tl.load(counts + e) + 127) // 128 * 128
        starts = tl.cumsum(padded, axis=0) - padded
    word = part * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(values + t * words + word, mask=word < words)
    block = tl.arange(0, SCALES)
    scale = tl.load(scales + block * stride + t, mask=(block < width_blocks) & (part == 0))
    for k in tl.static_range(K):
        expert = tl.load(ids + t * K + k)
        row = tl.sum(tl.where(e == expert, starts, 0), axis=0) + tl.load(places + t * K + k)
        tl.store(to_values + row.to(tl.int64) * words + word, token, mask=word < words)
        if part == 0:
            at = (row // each * width_blocks + block) * each + row % each
            tl.store(to_scales + at, scale, mask=block < width_blocks)
            tl.store(rows + t * K + k, row)
            if not MASKED:
                tl.store(labels + row, expert)


@triton.jit
def gather(y, rows, weights, shared, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """Part of a token's output: the weighted sum over its experts and the shared expert's."""
    t = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(shared + t * width + column, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        row = tl.load(rows + t * K + k).to(tl.int64)
        part = tl.load(y + row * width + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + t * K + k) * part
    tl.store(out + t * width + column, total.to(tl.bfloat16), mask=inside)
