"""The kernels that move rows: in the interpreter, lowered for both architectures, and on a GPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmoe.cuda import target
from jaxmoe.errors import BackendUnavailable
from jaxmoe.ops.mosaic import LOWERS
from jaxmoe.ops.permute import group_tokens, permute, reference, unpermute
from jaxmoe.ops.permute.cuda import choose_tiles, copy_scales_kernel
from jaxmoe.ops.permute.pallas import COLUMNS, STAGE, copy_kernel, sum_kernel
from jaxmoe.ops.permute.reference import take_scales
from jaxmoe.ops.quantize import quantize
from jaxmoe.quant.formats import ActivationQuant

needs_lowering = pytest.mark.skipif(not LOWERS, reason="Mosaic GPU of this JAX refuses the kernels")
QUANTS = [ActivationQuant(128, "float32"), ActivationQuant(128, "ue8m0"), ActivationQuant(32, "ue8m0")]


def routing(rng: np.random.Generator, n: int, k: int, e: int, kind: str = "mixed") -> jax.Array:
    """ids [N, K] with holes and repeats; ``none`` and ``one`` are the extremes."""
    if kind == "none":
        return jnp.full((n, k), -1, jnp.int32)
    if kind == "one":
        return jnp.full((n, k), e - 1, jnp.int32)
    return jnp.asarray(np.where(rng.random((n, k)) < 0.4, -1, rng.integers(0, e, (n, k))), jnp.int32)


def operands(rng: np.random.Generator, n: int, k: int, m: int, w: int, dtype: Any):
    """Rows with NaN where no slot points, slots with holes, weights that are NaN at the holes."""
    slots = np.where(rng.random((n, k)) < 0.4, -1, rng.permutation(m)[: n * k].reshape(n, k))
    rows = rng.normal(size=(m, w))
    rows[~np.isin(np.arange(m), slots)] = np.nan
    weights = np.where(slots < 0, np.nan, rng.normal(size=(n, k)))
    return jnp.asarray(rows, dtype), jnp.asarray(slots, jnp.int32), jnp.asarray(weights, jnp.float32)


@pytest.mark.parametrize(
    ("dtype", "n", "k", "w", "stage"),
    [
        (jnp.bfloat16, 7, 3, 64, 3 * 128),  # three rows a block, the last block short
        (jnp.float8_e4m3fn, 5, 2, 384, 1),  # a stage below one row
        (jnp.float32, 1, 1, 448, 1 << 16),
    ],
)
def test_copies_in_the_interpreter(rng: np.random.Generator, dtype: Any, n: int, k: int, w: int, stage: int) -> None:
    g = group_tokens(routing(rng, n, k, 3), 3)
    x = jnp.asarray(rng.normal(size=(n, w)), dtype)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = copy_kernel(x, g.slots, g.source, stage)
    valid, want = np.asarray(g.valid), reference.copy_rows(x, g.slots, g.source)
    np.testing.assert_array_equal(*(np.asarray(a.astype(jnp.float32))[valid] for a in (got, want)))


def test_copies_under_vmap(rng: np.random.Generator) -> None:
    g = jax.vmap(lambda ids: group_tokens(ids, 3, backend="reference"))(routing(rng, 10, 2, 3).reshape(2, 5, 2))
    x = jnp.asarray(rng.normal(size=(2, 5, 128)), jnp.float32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = jax.vmap(lambda x, g: copy_kernel(x, g.slots, g.source, STAGE))(x, g)
    for i, valid in enumerate(np.asarray(g.source) >= 0):
        np.testing.assert_array_equal(np.asarray(got[i])[valid], np.asarray(x[i])[np.asarray(g.source[i])[valid]])


@pytest.mark.parametrize(
    ("dtype", "k", "w", "columns", "extras"),
    [
        (jnp.bfloat16, 3, 64, 1024, True),
        (jnp.bfloat16, 1, 1152, 1024, False),  # overlapping last tile
        (jnp.float32, 9, 448, 256, True),  # more choices than are fetched at once
    ],
)
def test_sums_in_the_interpreter(
    rng: np.random.Generator, dtype: Any, k: int, w: int, columns: int, extras: bool
) -> None:
    rows, slots, weights = operands(rng, 4, k, 40, w, dtype)
    add = jnp.asarray(rng.normal(size=(4, w)), jnp.bfloat16) if extras else None
    options = {"scale": 2.5 if extras else 1.0, "out_dtype": jnp.dtype(jnp.float32)}
    chosen = weights if extras else None
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = sum_kernel(rows, slots, chosen, add, columns=columns, **options)
    want = reference.sum_rows(rows, slots, chosen, add, **options)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@needs_lowering
@pytest.mark.parametrize("arch", [(9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn])
def test_lowers(monkeypatch: pytest.MonkeyPatch, dtype: Any, arch: tuple[int, int]) -> None:
    monkeypatch.setattr(mosaic_utils, "_infer_arch", lambda: arch)
    x, slots = jax.ShapeDtypeStruct((300, 2944), dtype), jax.ShapeDtypeStruct((300, 8), jnp.int32)
    source, weights = jax.ShapeDtypeStruct((4000,), jnp.int32), jax.ShapeDtypeStruct((300, 8), jnp.float32)
    programs = [jax.jit(lambda x, s, m: copy_kernel(x, s, m, STAGE)).trace(x, slots, source)]
    if dtype != jnp.float8_e4m3fn:
        options = {"scale": 2.5, "out_dtype": jnp.dtype(jnp.bfloat16), "columns": COLUMNS}
        programs.append(jax.jit(lambda *a: sum_kernel(*a, **options)).trace(x, slots, weights, x))
    for program in programs:
        assert "mosaic_gpu" in program.lower(lowering_platforms=("cuda",)).as_text()


@needs_lowering
def test_lowers_inside_shard_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_utils, "_infer_arch", lambda: (9, 0))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    options: dict[str, Any] = {"scale": 1.0, "out_dtype": jnp.dtype(jnp.float32), "columns": COLUMNS}

    def there_and_back(x: jax.Array, slots: jax.Array, source: jax.Array) -> jax.Array:
        rows = copy_kernel(x, slots, source, STAGE)
        y = sum_kernel(rows, slots, None, x, **options)
        assert jax.typeof(rows).manual_axis_type == jax.typeof(y).manual_axis_type == jax.typeof(x).manual_axis_type
        return y

    cut = jax.sharding.PartitionSpec("x")
    program = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=cut, out_specs=cut))
    x, slots = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16), jax.ShapeDtypeStruct((64, 2), jnp.int32)
    traced = program.trace(x, slots, jax.ShapeDtypeStruct((256,), jnp.int32))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_refusals() -> None:
    slots, source = jnp.zeros((4, 2), jnp.int32), jnp.zeros(8, jnp.int32)
    for x, words in (
        (jnp.zeros((4, 96)), "96, must be a multiple of 64"),
        (jnp.zeros((0, 64)), "nothing to move"),
        (jnp.zeros((4, 64), jnp.float8_e4m3fn), "64 bytes; the copy engine takes multiples of 128"),
        (jnp.zeros((4, 1 << 16)), "262144 bytes"),
        (jnp.zeros((4, 64), jnp.int32), "int32"),
    ):
        with pytest.raises(BackendUnavailable, match=words):
            copy_kernel(x, slots, source, STAGE)
    with pytest.raises(BackendUnavailable, match="bfloat16 and float32"):
        sum_kernel(jnp.zeros((4, 64), jnp.float16), slots, None, None, scale=1.0, out_dtype=jnp.float32, columns=64)


def test_needs_a_gpu() -> None:
    g = group_tokens(jnp.zeros((4, 2), jnp.int32), 2)
    with pytest.raises(BackendUnavailable, match="need an NVIDIA GPU" if LOWERS else r"JAX 0\.11"):
        permute(jnp.zeros((4, 64)), g, backend="pallas")
    with pytest.raises(BackendUnavailable, match="need an NVIDIA GPU" if LOWERS else r"JAX 0\.11"):
        unpermute(jnp.zeros((8, 64)), g.slots, jnp.zeros((4, 2)), backend="pallas")


SHAPES = [(1, 1, 64), (1, 8, 7168), (37, 3, 2880), (300, 8, 1152), (513, 1, 7168), (64, 10, 256)]


@pytest.mark.gpu
@needs_lowering
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn])
@pytest.mark.parametrize(("n", "k", "w"), SHAPES)
@pytest.mark.parametrize("kind", ["mixed", "one", "none"])
@pytest.mark.parametrize("layout", ["psum", "masked"])
def test_permute_on_a_gpu(rng: np.random.Generator, dtype: Any, n: int, k: int, w: int, kind: str, layout: Any) -> None:
    if w * jnp.dtype(dtype).itemsize % 128:
        w = 128
    g = group_tokens(routing(rng, n, k, 5, kind), 5, layout=layout, alignment=128)
    x = jnp.asarray(rng.normal(size=(n, w)), dtype)
    valid = np.asarray(g.valid)
    a, b = (permute(x, g, backend=name).values for name in ("pallas", "reference"))
    np.testing.assert_array_equal(*(np.asarray(r.astype(jnp.float32))[valid] for r in (a, b)))


@pytest.mark.gpu
@needs_lowering
@pytest.mark.parametrize("quant", QUANTS, ids=str)
@pytest.mark.parametrize(("layout", "k"), [("psum", 640), ("contiguous", 7168), ("masked", 640)])
def test_quantised_rows_on_a_gpu(rng: np.random.Generator, quant: ActivationQuant, layout: Any, k: int) -> None:
    """Moving quantised rows and quantising moved rows: the same bits, values and scales, padding scales 1."""
    for n in (1, 1501, 4099):  # one token, two and four a block
        g = group_tokens(routing(rng, n, 6, 5), 5, layout=layout, alignment=4)
        x = jnp.asarray(rng.normal(size=(n, k)), jnp.bfloat16)
        want = quantize(permute(x, g, backend="reference").values, quant, valid=g.valid)
        valid = np.asarray(g.valid)
        for backend in ("cuda", "pallas"):
            got = permute(quantize(x, quant), g, backend=backend).rows
            np.testing.assert_array_equal(*(np.asarray(r.values.astype(jnp.float32))[valid] for r in (got, want)))
            np.testing.assert_array_equal(np.asarray(got.scales), np.asarray(want.scales))


@pytest.mark.gpu
@pytest.mark.parametrize("quant", QUANTS[:2], ids=str)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("n", "row_shape"), [(1, (7,)), (1501, (9001,)), (8192, (70000,)), (300, (5, 1203))])
def test_scales_alone_on_a_gpu(
    rng: np.random.Generator, quant: ActivationQuant, shared: bool, n: int, row_shape: tuple[int, ...]
) -> None:
    bits = jnp.asarray(rng.integers(1, 1 << 30, (7, -(-n // 4) * 4)), jnp.int32)
    scales = bits if quant.scale != "float32" else jax.lax.bitcast_convert_type(bits, jnp.float32)
    source = jnp.asarray(rng.integers(-1, n, math.prod(row_shape)), jnp.int32)
    tiles = dataclasses.replace(choose_tiles((n, 640), scales.shape, 1, row_shape), shared=shared)
    got = jax.jit(copy_scales_kernel(target.current().name, row_shape, quant, tiles))(scales, source)
    want = take_scales(scales, quant, source, row_shape)
    np.testing.assert_array_equal(*(np.asarray(a).view(np.int32) for a in (got, want)))


@pytest.mark.gpu
@needs_lowering
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("n", "k", "w"), SHAPES)
@pytest.mark.parametrize("extras", [False, True])
def test_unpermute_on_a_gpu(rng: np.random.Generator, dtype: Any, n: int, k: int, w: int, extras: bool) -> None:
    """Against the formula in float64; NaN in rows and weights that no slot names stays out; the same bits again."""
    rows, slots, weights = operands(rng, n, k, n * k + 16, w, dtype)
    add = jnp.asarray(rng.normal(size=(n, w)), jnp.bfloat16) if extras else None
    options: dict[str, Any] = {"scale": 2.5 if extras else 1.0, "add": add, "out_dtype": jnp.float32}
    got = unpermute(rows, slots, weights, backend="pallas", **options)
    s = np.asarray(slots)
    taken = np.where(s[..., None] >= 0, np.asarray(rows.astype(jnp.float32), np.float64)[s], 0)
    products = np.where(s >= 0, np.asarray(weights, np.float64), 0)[..., None] * taken
    want = options["scale"] * products.sum(1) + (0 if add is None else np.asarray(add.astype(jnp.float32)))
    limit = 1e-6 * (np.abs(products).sum(1) * options["scale"] + 1)
    assert (np.abs(np.asarray(got) - want) <= limit).all()
    again = unpermute(rows, slots, weights, backend="pallas", **options)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(again))
    one = unpermute(
        rows, slots[-1:], weights[-1:], backend="pallas", **(options | {"add": None if add is None else add[-1:]})
    )
    np.testing.assert_array_equal(np.asarray(got)[-1:], np.asarray(one), err_msg="depends on the batch")


@pytest.mark.gpu
@needs_lowering
@pytest.mark.parametrize("layout", ["psum", "masked"])
def test_gradients_on_a_gpu(rng: np.random.Generator, layout: Any) -> None:
    """The kernels' gradients are the reference's, with NaN in every row that nothing points at."""
    g = group_tokens(routing(rng, 100, 4, 5), 5, layout=layout)
    x, w = jnp.asarray(rng.normal(size=(100, 256)), jnp.float32), jnp.asarray(rng.normal(size=(100, 4)), jnp.float32)
    add, c = (jnp.asarray(rng.normal(size=(100, 256)), jnp.float32) for _ in range(2))

    def loss(backend: str, x: jax.Array, w: jax.Array, add: jax.Array) -> jax.Array:
        rows = permute(x, g, backend=backend).values
        rows = jnp.where(g.valid[..., None], jnp.sin(rows), jnp.nan)
        return jnp.sum(c * unpermute(rows, g.slots, w, scale=1.5, add=add, backend=backend))

    ours, theirs = (jax.grad(loss, argnums=(1, 2, 3))(b, x, w, add) for b in ("pallas", "reference"))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@needs_lowering
def test_a_thousand_times_the_same(rng: np.random.Generator) -> None:
    g = group_tokens(routing(rng, 512, 8, 16), 16, alignment=128)
    x = jnp.asarray(rng.normal(size=(512, 1024)), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(512, 8)), jnp.float32)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        return unpermute(permute(x, g, backend="pallas").values, g.slots, weights, backend="pallas")

    first = run(x)
    differ = sum(jnp.any(run(x) != first).astype(jnp.int32) for _ in range(1000))
    assert int(differ) == 0
