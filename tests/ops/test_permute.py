"""Rows into expert order and back, with -1, repeated ids, every layout, and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.errors import ShapeError
from jaxmoe.ops.permute import expert_counts, group_tokens, padded_rows, permute, unpermute

LAYOUTS = ("psum", "masked", "contiguous")


_grouped = jax.jit(group_tokens, static_argnames=("num_experts", "layout", "alignment"))
_counts = jax.jit(expert_counts, static_argnames="num_experts")


def _group(ids: np.ndarray, e: int, layout: str, alignment: int = 8):
    return _grouped(jnp.asarray(ids, jnp.int32), num_experts=e, layout=layout, alignment=alignment)


def _expected(ids: np.ndarray, e: int, layout: str, alignment: int) -> np.ndarray:
    """Slots by plain loops: by expert, then token, then k."""
    slots, start = np.full(ids.shape, -1), 0
    for expert in range(e):
        rank, row_of = 0, {}
        base = expert * max(-(-ids.shape[0] // alignment) * alignment, alignment) if layout == "masked" else start
        for t, k in np.argwhere(ids == expert):
            if layout == "masked" and t in row_of:
                slots[t, k] = row_of[t]
                continue
            slots[t, k] = row_of[t] = base + rank
            rank += 1
        start += -(-rank // alignment) * alignment
    return slots


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), layout=st.sampled_from(LAYOUTS), holes=st.sampled_from([0.0, 0.3, 1.0]))
def test_slots_property(seed: int, layout: str, holes: float) -> None:
    """Repeated ids and holes everywhere, against plain loops; the inverse map agrees; nothing overflows."""
    rng = np.random.default_rng(seed)
    e, n, k = 5, 11, 3
    ids = np.where(rng.random((n, k)) < holes, -1, rng.integers(0, e, (n, k))).astype(np.int32)
    g = _group(ids, e, layout)
    slots, source = np.asarray(g.slots), np.asarray(g.source)
    np.testing.assert_array_equal(slots, _expected(ids, e, layout, 8))
    tokens = np.broadcast_to(np.arange(n)[:, None], ids.shape)
    np.testing.assert_array_equal(source[slots[ids >= 0]], tokens[ids >= 0])
    assert (source >= 0).sum() == len(np.unique(slots[slots >= 0]))
    assert slots.max() < len(source)
    counts = np.bincount(ids[ids >= 0], minlength=e)
    np.testing.assert_array_equal(_counts(jnp.asarray(ids), num_experts=e), counts)
    group = np.asarray(g.group)
    if layout == "psum":
        starts = np.concatenate([[0], -(-group[:-1] // 8) * 8])
        np.testing.assert_array_equal(group - starts, counts)
    elif layout == "contiguous":
        np.testing.assert_array_equal(group[slots[ids >= 0]], ids[ids >= 0])
        assert (group >= 0).sum() == counts.sum()
    else:
        np.testing.assert_array_equal(group, [len({t for t, _ in np.argwhere(ids == x)}) for x in range(e)])


@pytest.mark.parametrize("alignment", [1, 8, 128])
def test_the_worst_case_fits_and_is_aligned(alignment: int) -> None:
    for rows, e in ((0, 4), (1, 4), (7, 4), (64, 1), (33, 37)):
        worst = 0
        for spread in range(1, min(rows, e) + 1):
            sizes = np.zeros(e, int)
            sizes[:spread] = 1
            sizes[0] += rows - spread
            worst = max(worst, int((-(-sizes // alignment) * alignment).sum()))
        assert worst == padded_rows(rows, e, alignment)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(rng: np.random.Generator, layout: str) -> None:
    """Identity experts: y = Σ_k w·x over choices; padding rows are 0 even where x of a -1 token is NaN."""
    ids = np.array([[0, 2], [2, -1], [-1, -1], [1, 1], [2, 0]], np.int32)
    x = rng.normal(size=(5, 6)).astype(np.float32)
    x[2] = np.nan
    w = rng.normal(size=(5, 2)).astype(np.float32)
    w[ids < 0] = np.nan
    g = _group(ids, 4, layout)
    rows = permute(jnp.asarray(x), g)
    assert np.asarray(rows.values)[~np.asarray(g.valid)].sum() == 0
    y = unpermute(jnp.where(g.valid[..., None], rows.values, jnp.nan), g.slots, jnp.asarray(w))
    want = np.where(ids >= 0, w, 0).sum(1)[:, None] * np.where(np.isnan(x), 0, x)
    np.testing.assert_allclose(y, want, rtol=1e-6)
    assert (np.asarray(y[2]) == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(rng: np.random.Generator, layout: str) -> None:
    """Against autodiff of the dense formula; exact zeros at -1; NaN in unused rows and their cotangents stays out."""
    ids = np.array([[0, 2], [2, -1], [-1, -1], [1, 1], [2, 0]], np.int32)
    x, w = jnp.asarray(rng.normal(size=(5, 6)), jnp.float32), jnp.asarray(rng.normal(size=(5, 2)), jnp.float32)
    scale = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
    c = jnp.asarray(rng.normal(size=(5, 6)), jnp.float32)
    g = _group(ids, 4, layout)

    def routed(x: jax.Array, w: jax.Array) -> jax.Array:
        rows = permute(x, g)
        owner = np.full(g.source.shape, 0)
        owner[np.asarray(g.slots)[ids >= 0]] = ids[ids >= 0]
        y = rows.values * scale[owner.reshape(g.row_shape)]
        poisoned = jnp.where(g.valid[..., None], y, jnp.nan)
        return jnp.sum(c * unpermute(poisoned, g.slots, w))

    def dense(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.where((ids >= 0)[..., None], w[..., None] * scale[ids] * x[:, None], 0)
        return jnp.sum(c * y.sum(1))

    dx, dw = jax.grad(routed, argnums=(0, 1))(x, w)
    want_x, want_w = jax.grad(dense, argnums=(0, 1))(x, w)
    np.testing.assert_allclose(dx, want_x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dw, want_w, rtol=1e-5, atol=1e-6)
    assert (np.asarray(dw)[ids < 0] == 0).all() and (np.asarray(dx)[2] == 0).all()


def test_sum_is_in_f32_and_rounded_once() -> None:
    """1 + 2^-8 + 2^-8: bf16 partial sums would lose both small terms."""
    rows = jnp.array([[1.0], [2.0**-8], [2.0**-8]], jnp.bfloat16)
    y = unpermute(rows, jnp.array([[0, 1, 2]], jnp.int32), jnp.ones((1, 3), jnp.float32))
    assert y.dtype == jnp.bfloat16 and float(y[0, 0]) == 1 + 2.0**-7


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tokens(layout: str) -> None:
    g = _group(np.zeros((0, 2), np.int32), 3, layout)
    rows = permute(jnp.zeros((0, 4), jnp.bfloat16), g)
    assert unpermute(rows.values, g.slots, jnp.zeros((0, 2), jnp.float32)).shape == (0, 4)


def test_bad_input() -> None:
    ids = jnp.zeros((9, 2), jnp.int32)
    with pytest.raises(ShapeError, match="capacity 8 is below the 9 tokens"):
        group_tokens(ids, 4, layout="masked", capacity=8)
    with pytest.raises(ShapeError, match=r"float32\[9, 2\]"):
        group_tokens(ids.astype(jnp.float32), 4)
    with pytest.raises(ShapeError, match=r"\[3, 4\].*9 tokens"):
        permute(jnp.zeros((3, 4)), group_tokens(ids, 4))
    with pytest.raises(ShapeError, match=r"\[9, 2\].*\[9, 1\]"):
        unpermute(jnp.zeros((8, 4)), ids, jnp.zeros((9, 1)))
