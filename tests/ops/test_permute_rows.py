"""Quantised rows, the masked slab, and what ``unpermute`` adds and scales, by the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.errors import BackendUnavailable, ShapeError
from jaxmoe.ops.permute import (
    api,
    expand_to_masked_slab,
    group_tokens,
    masked_slab_to_expand,
    permute,
    unpermute,
)
from jaxmoe.ops.permute.reference import take_scales
from jaxmoe.ops.quantize import quantize, row_scales
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.tensors import QuantizedRows

QUANTS = [ActivationQuant(128, "float32"), ActivationQuant(128, "ue8m0"), ActivationQuant(32, "ue8m0")]
LAYOUTS = ("psum", "masked", "contiguous")
IDS = np.array([[0, 2], [2, -1], [-1, -1], [3, 3], [2, 0]], np.int32)


def assert_same_bits(got: QuantizedRows, want: QuantizedRows, valid: Any) -> None:
    """Values where they count, scales everywhere."""
    assert got.values.shape == want.values.shape and got.quant == want.quant
    a, b = (np.asarray(r.values.astype(jnp.float32))[np.asarray(valid)] for r in (got, want))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.asarray(got.scales), np.asarray(want.scales))


@pytest.mark.parametrize("quant", QUANTS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alignment", [1, 8])
def test_moved_then_quantised_is_quantised_then_moved(
    rng: np.random.Generator, quant: ActivationQuant, layout: Any, alignment: int
) -> None:
    """Rows no multiple of 4, K groups no multiple of 4, NaN in a token without a choice; F18: padding scales are 1."""
    x = rng.normal(size=(5, 640)) * 10.0 ** rng.integers(-3, 4, (5, 1))
    x[2] = np.nan
    g = group_tokens(jnp.asarray(IDS), 4, layout=layout, alignment=alignment)
    x = jnp.asarray(x, jnp.bfloat16)
    rows = jax.jit(lambda x: permute(quantize(x, quant), g).rows)(x)
    want = quantize(permute(x, g).values, quant, valid=g.valid)
    assert_same_bits(rows, want, g.valid)
    padding = np.asarray(row_scales(rows))[~np.asarray(g.valid)]
    assert (padding == 1).all()


@pytest.mark.parametrize("quant", QUANTS, ids=str)
@pytest.mark.parametrize("row_shape", [(65536,), (2, 32767), (3, 25000)])
def test_scales_of_many_rows(rng: np.random.Generator, quant: ActivationQuant, row_shape: tuple[int, ...]) -> None:
    """Above and below the number of rows from which on they move another way."""
    dtype = jnp.float32 if quant.scale == "float32" else jnp.int32
    scales = jnp.asarray(rng.integers(1, 1 << 30, (3, 8)), dtype)
    source = jnp.asarray(rng.integers(-1, 7, np.prod(row_shape)), jnp.int32)
    got = np.asarray(take_scales(scales, quant, source, row_shape))
    *lead, rows = row_shape
    index = np.pad(np.asarray(source).reshape(-1, rows), [(0, 0), (0, -rows % 4)], constant_values=-1)
    neutral = np.asarray(1 if quant.scale == "float32" else 0x7F7F7F7F, dtype)
    want = np.where(index[:, None] >= 0, np.asarray(scales).T[index].swapaxes(1, 2), neutral)
    np.testing.assert_array_equal(got, want.reshape(got.shape))
    assert got.shape == (*lead, 3, -(-rows // 4) * 4) and got.dtype == dtype


@pytest.mark.parametrize("n", [8, 16384])
def test_auto_takes_what_is_faster(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    asked = []

    def declining(name: str) -> Any:
        def decline(*_: Any) -> Any:
            asked.append(name)
            raise BackendUnavailable(name)

        return decline

    for name in ("cuda", "pallas"):
        monkeypatch.setitem(api.COPY_QUANTIZED, name, declining(name))
    g = group_tokens(jnp.zeros((n, 2), jnp.int32), 1, alignment=1)
    permute(quantize(jnp.zeros((n, 128)), QUANTS[0]), g)
    assert asked == ["cuda", "pallas"]


@pytest.mark.parametrize("quant", QUANTS, ids=str)
@pytest.mark.parametrize("ids", [np.zeros((0, 2)), np.full((3, 2), -1), np.zeros((1, 1)), np.full((9, 2), 3)])
def test_quantised_extremes(rng: np.random.Generator, quant: ActivationQuant, ids: np.ndarray) -> None:
    g = group_tokens(jnp.asarray(ids, jnp.int32), 4, alignment=8)
    x = jnp.asarray(rng.normal(size=(len(ids), 128)), jnp.bfloat16)
    want = quantize(permute(x, g).values, quant, valid=g.valid)
    assert_same_bits(permute(quantize(x, quant), g).rows, want, g.valid)


@pytest.mark.parametrize("ids", [IDS, np.full((4, 2), -1), np.full((6, 1), 3), np.array([[0], [3]])])
def test_slab_there_and_back(rng: np.random.Generator, ids: np.ndarray) -> None:
    """The slab is what the masked layout would hold; padding is poisoned on both ways; empty experts in between."""
    ids = jnp.asarray(ids, jnp.int32)
    x = jnp.asarray(rng.normal(size=(len(ids), 6)), jnp.float32)
    g = group_tokens(ids, 4, alignment=2)
    rows = permute(x, g)
    rows = rows.with_rows(jnp.where(g.valid[:, None], rows.values, jnp.nan))
    slab = jax.jit(expand_to_masked_slab, static_argnums=1)(rows, 7)
    assert (slab.layout, slab.values.shape) == ("masked", (4, 8, 6))
    counts = [int((ids == e).sum()) for e in range(4)]
    assert slab.group.tolist() == counts
    for e, n in enumerate(counts):
        tokens = np.repeat(np.arange(len(ids)), (np.asarray(ids) == e).sum(1))
        np.testing.assert_array_equal(slab.values[e, :n], np.asarray(x)[tokens])
    held = np.arange(8) < np.array(counts)[:, None]
    poisoned = slab.with_rows(jnp.where(held[..., None], slab.values, jnp.nan))
    back = masked_slab_to_expand(poisoned, rows)
    assert (back.layout, back.alignment) == ("psum", 2)
    np.testing.assert_array_equal(back.values, np.where(g.valid[:, None], rows.values, 0))
    weights = jnp.asarray(np.where(g.valid, rng.normal(size=g.valid.shape), np.nan), jnp.float32)
    weighted = masked_slab_to_expand(poisoned, rows, weights=weights, out_dtype=jnp.float32)
    want = np.where(g.valid[:, None], weights[:, None] * rows.values, 0)
    np.testing.assert_allclose(weighted.values, want, rtol=1e-6)


@pytest.mark.parametrize("quant", QUANTS, ids=str)
@pytest.mark.parametrize("alignment", [2, 8])
def test_quantised_slab(rng: np.random.Generator, quant: ActivationQuant, alignment: int) -> None:
    x = jnp.asarray(rng.normal(size=(5, 640)), jnp.bfloat16)
    g = group_tokens(jnp.asarray(IDS), 4, alignment=alignment)
    rows = permute(quantize(x, quant), g)
    slab = expand_to_masked_slab(rows, 5)
    want = quantize(expand_to_masked_slab(permute(x, g), 5).values, quant)
    held = np.arange(want.values.shape[1]) < np.asarray(slab.group)[:, None]
    for a, b in zip((slab.rows.values, row_scales(slab.rows)), (want.values, row_scales(want)), strict=True):
        np.testing.assert_array_equal(np.asarray(a.astype(jnp.float32))[held], np.asarray(b.astype(jnp.float32))[held])
    assert_same_bits(masked_slab_to_expand(slab, rows).rows, rows.rows, g.valid)


def test_slab_gradients(rng: np.random.Generator) -> None:
    g = group_tokens(jnp.asarray(IDS), 4, alignment=2)
    x, c = (jnp.asarray(rng.normal(size=(5, 6)), jnp.float32) for _ in range(2))
    w = jnp.asarray(rng.normal(size=g.source.shape), jnp.float32)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        rows = permute(x, g)
        back = masked_slab_to_expand(expand_to_masked_slab(rows, 5), rows, weights=w)
        return jnp.sum(c * unpermute(back.values, g.slots, jnp.ones((5, 2))))

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(c * x * jnp.where(IDS >= 0, w[g.slots], 0).sum(1)[:, None])

    for a, b in zip(jax.grad(loss, (0, 1))(x, w), jax.grad(plain, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_scale_and_add(rng: np.random.Generator) -> None:
    """routed_scaling_factor multiplies the routed sum once and never the shared expert; gradients agree."""
    slots = jnp.asarray([[0, 3], [2, -1], [-1, -1]], jnp.int32)
    rows = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32).at[1].set(jnp.nan)
    weights = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)
    add = jnp.asarray(rng.normal(size=(3, 6)), jnp.float32)

    def ours(rows: jax.Array, weights: jax.Array, add: jax.Array) -> jax.Array:
        return unpermute(rows, slots, weights, scale=2.5, add=add)

    def plain(rows: jax.Array, weights: jax.Array, add: jax.Array) -> jax.Array:
        held = slots >= 0
        taken = jnp.where(held[..., None], rows[jnp.where(held, slots, 0)], 0.0)
        return 2.5 * jnp.sum(jnp.where(held, weights, 0.0)[..., None] * taken, axis=1) + add

    y = ours(rows, weights, add)
    np.testing.assert_allclose(y, plain(rows, weights, add), rtol=1e-5)
    np.testing.assert_array_equal(y[2], add[2])
    c = jnp.asarray(rng.normal(size=(3, 6)), jnp.float32)
    grads = (jax.grad(lambda *a, f=f: jnp.sum(c * f(*a)), (0, 1, 2))(rows, weights, add) for f in (ours, plain))
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    half = unpermute(rows, slots, weights, add=add.astype(jnp.bfloat16), out_dtype=jnp.bfloat16)
    assert half.dtype == jnp.bfloat16


def test_bad_input() -> None:
    g = group_tokens(jnp.asarray(IDS), 4)
    rows = permute(jnp.zeros((5, 64)), g)
    with pytest.raises(ShapeError, match=r"\[6, 128\].*5 tokens"):
        permute(quantize(jnp.zeros((6, 64)), QUANTS[0]), g)
    with pytest.raises(ShapeError, match=r"add \[5, 32\] must be \[5, 64\]"):
        unpermute(rows.values, g.slots, jnp.zeros((5, 2)), add=jnp.zeros((5, 32)))
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        permute(jnp.zeros((5, 64)), g, backend="cuda")
    with pytest.raises(ShapeError, match="only psum rows"):
        expand_to_masked_slab(dataclasses.replace(rows, layout="contiguous"), 8)
    with pytest.raises(ShapeError, match="capacity is 0"):
        expand_to_masked_slab(rows, 0)
    slab = expand_to_masked_slab(rows, 8)
    with pytest.raises(ShapeError, match="4 experts does not go into one of 2"):
        masked_slab_to_expand(slab, GroupedRows(rows.values, rows.group[:2], "psum", 8))
    quantised = expand_to_masked_slab(permute(quantize(jnp.zeros((5, 128)), QUANTS[0]), g), 8)
    with pytest.raises(ShapeError, match="take no weights"):
        masked_slab_to_expand(quantised, rows, weights=jnp.zeros(rows.values.shape[0]))
