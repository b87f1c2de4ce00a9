"""The reference grouped GEMM against float64, over formats, layouts and spreads of rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.ops.grouped_gemm import grouped_gemm, ragged_gemm
from jaxmoe.ops.quantize import dequantize_rows, quantize
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.ops.shapes import SPREADS, group_sizes
from jaxmoe.quant.formats import BF16, FORMATS, MXFP4, ActivationQuant, FP8BlockUE8M0
from jaxmoe.quant.tensors import GroupedWeight
from jaxmoe.quant.weights import dequantize, quantize_weight

A, CAPACITY = 8, 48
_ragged = jax.jit(ragged_gemm)
LAYOUTS = ("psum", "masked", "contiguous")


def place(x: np.ndarray, sizes: np.ndarray, layout: str, poison: float = np.nan) -> tuple[GroupedRows, np.ndarray]:
    """Rows x, sorted by expert, in a layout whose other rows hold ``poison``; and each buffer row's index in x, -1."""
    padded = -(-sizes // A) * A
    e = len(sizes)
    if layout == "masked":
        starts, shape = np.arange(e) * CAPACITY, (e, CAPACITY)
    else:
        starts, shape = np.cumsum(padded) - padded, (CAPACITY + e * A,)
    index = np.full(shape, -1).reshape(-1)
    for expert, row in enumerate(np.cumsum(sizes) - sizes):
        index[starts[expert] : starts[expert] + sizes[expert]] = np.arange(row, row + sizes[expert])
    buffer = np.where(index[:, None] >= 0, x[index], poison).reshape(*shape, x.shape[1])
    owner = np.repeat(np.arange(e), sizes)
    labels = np.where(index >= 0, owner[index] if len(owner) else -1, -1)
    group = {"psum": starts + sizes, "masked": sizes, "contiguous": labels}[layout]
    rows = GroupedRows(jnp.asarray(buffer, jnp.float32), jnp.asarray(group, jnp.int32), layout, A)  # type: ignore[arg-type]
    return rows, index


def formula(x: np.ndarray, w: GroupedWeight, sizes: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """float64 [rows, N] for rows sorted by expert."""
    matrices = np.asarray(dequantize(w), np.float64)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    y = np.einsum("mk,mnk->mn", x.astype(np.float64)[:, : w.k], matrices[owner])
    return y if bias is None else y + bias[owner]


def close(got: jax.Array | np.ndarray, want: np.ndarray, tolerance: float = 1e-5) -> None:
    scale = max(float(np.abs(want).max(initial=0)), 1e-30)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=tolerance * scale)


def weight(rng: np.random.Generator, fmt_name: str, e: int, n: int, k: int) -> GroupedWeight:
    w = jnp.asarray(rng.normal(size=(e, n, k)) * np.exp(rng.normal(size=(e, n, 1))), jnp.float32)
    return quantize_weight(w, FORMATS[fmt_name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_against_float64(rng: np.random.Generator, name: str, layout: str) -> None:
    """Five groups of 128 columns less a tail; every spread of rows; NaN in the rows of no expert; both row kinds."""
    e, n, k = 5, 72, 600
    w, bias = weight(rng, name, e, n, k), rng.normal(size=(e, n)).astype(np.float32)

    @jax.jit
    def run(rows: GroupedRows) -> jax.Array:
        return grouped_gemm(rows, w, bias=jnp.asarray(bias), out_dtype=jnp.float32)

    for spread in SPREADS:
        sizes = group_sizes(spread, e, 45)
        x = rng.normal(size=(sizes.sum() + 1, k)).astype(np.float32)
        rows, index = place(x, sizes, layout)
        want = np.zeros((len(index), n))
        want[index >= 0] = formula(x[:-1], w, sizes, bias)[index[index >= 0]]
        close(run(rows).reshape(-1, n), want)
        quant = w.format.activation
        if quant is not None:
            q = quantize(rows.values, quant, valid=jnp.asarray(index >= 0).reshape(rows.values.shape[:-1]))
            xq = np.asarray(dequantize_rows(q)).reshape(-1, w.k_padded)[index >= 0]
            want[index >= 0] = formula(xq[np.argsort(index[index >= 0])], w, sizes, bias)[index[index >= 0]]
            close(run(rows.with_rows(q)).reshape(-1, n), want)


@pytest.mark.parametrize("name", FORMATS)
def test_one_rounding_to_bf16(rng: np.random.Generator, name: str) -> None:
    w = weight(rng, name, 2, 16, 256)
    x = jnp.asarray(rng.normal(size=(A, 256)), jnp.bfloat16)
    rows = GroupedRows(x, jnp.array([8, 8], jnp.int32), "psum", A)
    quant = w.format.activation
    rows = rows if quant is None else rows.with_rows(quantize(x, quant))
    run = jax.jit(grouped_gemm, static_argnames="out_dtype")
    rounded, exact = run(rows, w), run(rows, w, out_dtype=jnp.float32)
    assert rounded.dtype == jnp.bfloat16
    assert (rounded == exact.astype(jnp.bfloat16)).all()


def test_scale_groups_are_added_in_order_of_k() -> None:
    """2^24 in the first group, then 1 four times: in order and in f32 each 1 is lost; summed first they are not."""
    codes = np.zeros((1, 640), np.float32)
    codes[0, [0, 128, 256, 384, 512]] = 1
    x = jnp.asarray(np.repeat(codes, A, 0))
    scales = np.array([2.0**24, 1, 1, 1, 1], np.float32)
    w = quantize_weight(jnp.asarray(np.repeat(scales, 128)[None, None].repeat(8, 1)), FP8BlockUE8M0)
    q = quantize(x, ActivationQuant(128, "ue8m0"))
    y = grouped_gemm(GroupedRows(q, jnp.array([A], jnp.int32), "psum", A), w, out_dtype=jnp.float32)
    assert (np.asarray(y) == 2.0**24).all()


def test_bits_of_a_row_do_not_depend_on_the_others(rng: np.random.Generator) -> None:
    w = weight(rng, "BF16", 3, 96, 512)
    x = jnp.asarray(rng.normal(size=(200, 512)), jnp.bfloat16)
    y = _ragged(x, w, jnp.array([150, 0, 50], jnp.int32))
    for t in (0, 77, 149):
        assert (_ragged(x[t : t + 1], w, jnp.array([1, 0, 0], jnp.int32))[0] == y[t]).all()
    assert (_ragged(x[150:], w, jnp.array([0, 0, 50], jnp.int32)) == y[150:]).all()


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=4, max_size=4), tail=st.integers(0, 9), seed=st.integers(0, 99))
def test_ragged_property(sizes: list[int], tail: int, seed: int) -> None:
    """Any counts over four experts; NaN tail rows are never read. M is fixed so that there is one compile."""
    rng = np.random.default_rng(seed)
    total = min(sum(sizes), 160 - tail)
    counts = np.diff(np.minimum(np.cumsum([0, *sizes]), total)).astype(np.int32)
    x = np.full((160, 64), np.nan, np.float32)
    x[:total] = rng.normal(size=(total, 64))
    w = GroupedWeight(jnp.asarray(rng.normal(size=(4, 24, 64)), jnp.float32), None, BF16, 64)
    y = np.asarray(_ragged(jnp.asarray(x), w, jnp.asarray(counts)))
    close(y[:total], formula(x[:total], w, counts))
    assert (y[total:] == 0).all()


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("psum", jnp.float32), ("masked", jnp.float32), ("contiguous", jnp.float32), ("psum", jnp.bfloat16)],
)
def test_gradients_against_float64(rng: np.random.Generator, layout: str, dtype: jnp.dtype) -> None:
    """dx, dw and dbias; the poisoned rows and their cotangents reach nothing; an empty expert gets exactly 0."""
    sizes, n, k = np.array([9, 0, 3, 33, 1], np.int32), 20, 48
    x = np.asarray(jnp.asarray(rng.normal(size=(sizes.sum(), k)), dtype), np.float32)
    rows, index = place(x, sizes, layout)
    values = jnp.asarray(rng.normal(size=(5, n, k)), dtype)
    bias = jnp.asarray(rng.normal(size=(5, n)), jnp.float32)
    dy = np.array(jnp.asarray(rng.normal(size=(len(index), n)), dtype), np.float32)
    dy[index < 0] = np.nan

    def run(x: jax.Array, values: jax.Array, bias: jax.Array) -> jax.Array:
        return grouped_gemm(rows.with_rows(x), GroupedWeight(values, None, BF16, k), bias=bias)

    y, vjp = jax.vjp(jax.jit(run), rows.values.astype(dtype), values, bias)
    dx, dw, db = vjp(jnp.asarray(dy, y.dtype).reshape(y.shape))
    owner, real = np.repeat(np.arange(5), sizes), index >= 0
    dy64 = np.zeros((sizes.sum(), n))
    dy64[index[real]] = dy[real]
    want_dx = np.zeros((len(index), k))
    want_dx[real] = np.einsum("mn,mnk->mk", dy64, np.asarray(values, np.float64)[owner])[index[real]]
    tolerance = 1e-5 if dtype == jnp.float32 else 2.0**-8
    close(dx.reshape(-1, k), want_dx, tolerance)
    close(dw, np.stack([dy64[owner == e].T @ x[owner == e].astype(np.float64) for e in range(5)]), tolerance)
    close(db, np.stack([dy64[owner == e].sum(0) for e in range(5)]))
    assert (np.asarray(dw[1]) == 0).all() and (np.asarray(db[1]) == 0).all()


def test_gradient_through_dequantised_weights_and_refusals(rng: np.random.Generator) -> None:
    w = weight(rng, "FP8Block", 2, 24, 128)
    x = jnp.asarray(rng.normal(size=(A, 128)), jnp.float32)
    rows = GroupedRows(x, jnp.array([A, A], jnp.int32), "psum", A)

    def loss(x: jax.Array, w: GroupedWeight, quantised: bool = False) -> jax.Array:
        quant = w.format.activation
        assert quant is not None
        return grouped_gemm(rows.with_rows(quantize(x, quant) if quantised else x), w, out_dtype=jnp.float32).sum()

    close(jax.grad(loss)(x, w), np.broadcast_to(np.asarray(dequantize(w), np.float64)[0].sum(0), (A, 128)))
    with pytest.raises(NotImplementedError, match=r"quantised rows have no gradient.*quantize_activations=False"):
        jax.grad(loss)(x, w, True)
    with pytest.raises(NotImplementedError, match="quantised weights have no gradient"):
        jax.grad(lambda scales: loss(x, dataclasses.replace(w, scales=scales)))(w.scales)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rows(layout: str) -> None:
    w = GroupedWeight(jnp.ones((2, 8, 16), jnp.bfloat16), None, BF16, 16)
    x = jnp.zeros((2, 0, 16) if layout == "masked" else (0, 16), jnp.bfloat16)
    rows = GroupedRows(x, jnp.zeros(0 if layout == "contiguous" else 2, jnp.int32), layout, A)  # type: ignore[arg-type]
    assert grouped_gemm(rows, w).shape == (*x.shape[:-1], 8)
    grad = jax.grad(lambda v: grouped_gemm(rows, dataclasses.replace(w, values=v)).astype(jnp.float32).sum())(w.values)
    assert (grad == 0).all()


def test_vmap_and_scan(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(3, 16, 32)), jnp.float32)
    v = jnp.asarray(rng.normal(size=(3, 2, 8, 32)), jnp.float32)
    sizes = jnp.array([[5, 11], [0, 16], [0, 0]], jnp.int32)
    want = np.stack([np.asarray(_ragged(x[i], v[i], sizes[i])) for i in range(3)])
    close(jax.jit(jax.vmap(ragged_gemm))(x, v, sizes), want)
    _, got = jax.lax.scan(lambda c, a: (c, ragged_gemm(*a)), None, (x, v, sizes))
    close(got, want)


def bad(**changes: object) -> tuple[GroupedRows, GroupedWeight, dict[str, object]]:
    rows = GroupedRows(jnp.ones((16, 128), jnp.bfloat16), jnp.array([8, 16], jnp.int32), "psum", A)
    w = GroupedWeight(jnp.ones((2, 8, 128), jnp.bfloat16), None, BF16, 128)
    options = {key: changes.pop(key) for key in ("bias",) if key in changes}
    w = changes.pop("weight", w)
    return dataclasses.replace(rows, **changes), w, options  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows": jnp.ones((16, 64), jnp.bfloat16)}, ShapeError, "64 wide, the weight takes K = 128"),
        ({"rows": jnp.ones((12, 128), jnp.bfloat16)}, ShapeError, "12 rows are not a multiple of the alignment 8"),
        ({"rows": jnp.ones((16, 128), jnp.float16)}, FormatError, "float16"),
        ({"rows": jnp.ones((2, 8, 128), jnp.bfloat16)}, ShapeError, r"\(2, 8, 128\)"),
        ({"group": jnp.zeros(3, jnp.int32)}, ShapeError, r"int32\[3\]; it must be int32\[2\]"),
        ({"group": jnp.array([8, 17], jnp.int32)}, ShapeError, r"\[8, 17\].*M = 16"),
        ({"group": jnp.array([9, 8], jnp.int32)}, ShapeError, r"\[9, 8\]"),
        ({"bias": jnp.ones((2, 9), jnp.float32)}, ShapeError, r"float32\[2, 9\]; it must be float32\[2, 8\]"),
        ({"layout": "masked", "rows": jnp.ones((3, 8, 128), jnp.bfloat16)}, ShapeError, "3 experts, the weight has 2"),
        ({"layout": "masked", "rows": jnp.ones((2, 8, 128), jnp.bfloat16)}, ShapeError, r"\[8, 16\].*C = 8"),
        ({"layout": "contiguous", "group": jnp.full(16, 2, jnp.int32)}, ShapeError, r"-1\.\.1, got 2\.\.2"),
        (
            {"rows": quantize(jnp.ones((16, 128), jnp.bfloat16), ActivationQuant(128, "float32"))},
            FormatError,
            "do not go with BF16 weights",
        ),
        (
            {
                "rows": quantize(jnp.ones((16, 128), jnp.bfloat16), ActivationQuant(128, "float32")),
                "weight": quantize_weight(jnp.ones((2, 8, 128), jnp.bfloat16), MXFP4),
            },
            FormatError,
            "MXFP4",
        ),
    ],
)
def test_bad_input(changes: dict[str, object], error: type[Exception], message: str) -> None:
    rows, w, options = bad(**changes)
    with pytest.raises(error, match=message):
        grouped_gemm(rows, w, **options)  # type: ignore[arg-type]


def test_bad_ragged_input() -> None:
    x, w = jnp.ones((4, 8), jnp.float32), jnp.ones((2, 3, 8), jnp.float32)
    with pytest.raises(ShapeError, match=r"\[3, 2\].*M = 4"):
        ragged_gemm(x, w, jnp.array([3, 2], jnp.int32))
    with pytest.raises(ShapeError, match=r"\[-1, 2\]"):
        ragged_gemm(x, w, jnp.array([-1, 2], jnp.int32))
    with pytest.raises(ShapeError, match=r"int32\[3\].*int32\[2\]"):
        ragged_gemm(x, w, jnp.array([1, 1, 1], jnp.int32))
    with pytest.raises(ValueError, match="no backend 'cutlass'"):
        ragged_gemm(x, w, jnp.array([1, 2], jnp.int32), backend="cutlass")
