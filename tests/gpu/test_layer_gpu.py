"""Whole layers on a GPU, their GEMMs on DeepGEMM's kernels: field cases, agreement with the CPU, memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.bench.layer import random_params
from jaxmoe.config import Execution, Layout, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.layer.build import make_params
from jaxmoe.layer.params import MoEParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.layer.plan import plan
from jaxmoe.ops.grouped_gemm import ragged_gemm
from jaxmoe.ops.permute import group_tokens, permute, unpermute
from jaxmoe.quant.formats import BF16, FP8Block, WeightFormat
from jaxmoe.router import Routing
from jaxmoe.testing import calc_diff, marker, marker_layer

pytestmark = pytest.mark.gpu

LAYOUTS: tuple[Layout, ...] = ("psum", "contiguous", "masked")


def kernels(layout: Layout = "psum") -> Execution:
    return Execution(backend="deepgemm", layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", [BF16, FP8Block], ids=repr)
def test_same_as_on_the_cpu(rng: np.random.Generator, fmt: WeightFormat, layout: Layout) -> None:
    h, i, e = 512, 256, 8
    config = MoEConfig(hidden=h, intermediate=i, router=RouterConfig(num_experts=e, top_k=3), weights=fmt)
    gate, up, down = (rng.standard_normal(s) / 16 for s in ((e, i, h), (e, i, h), (e, h, i)))
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        arrays = {"gate": gate, "up": up, "down": down, "router_kernel": rng.standard_normal((h, e))}
        params = make_params(config, **{name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()})
        if fmt is BF16:
            params = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim == 3 else a, params)
        x = jnp.asarray(rng.standard_normal((77, h)), jnp.bfloat16)
        want = moe(params, x, config, Execution(backend="reference", layout=layout, row_alignment=128))
    params, x = jax.device_put((params, x), jax.devices()[0])
    got = jax.jit(lambda p, x: moe(p, x, config, kernels(layout)))(params, x)
    # The activation's rounding differs by an ulp between devices, which moves a few e4m3 codes by one step.
    assert calc_diff(got, want) < (1e-5 if fmt is BF16 else 1e-4)


@pytest.mark.parametrize("fmt", [BF16, FP8Block], ids=repr)
def test_f23_c_markers_afresh_on_each_call(fmt: WeightFormat) -> None:
    config, params = marker_layer(4, 2, weights=fmt)

    @jax.jit
    def step(x: jax.Array, ids: jax.Array) -> jax.Array:
        weights = jnp.broadcast_to(jnp.array([0.6, 0.4], jnp.float32), ids.shape)
        return moe(params, x, config, kernels(), routing=Routing(ids, weights))

    for c, ids, want in (
        (1, [0, 1], 1.02348201),
        (2, [2, 3], 11.9788403),
        (3, [1, 0], 13.7170674),
        (1, [0, 1], 1.02348201),
    ):
        y = step(jnp.full((3, 128), c, jnp.bfloat16), jnp.array([ids] * 3, jnp.int32))
        np.testing.assert_allclose(np.asarray(y, np.float32), want, rtol=2e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", [BF16, FP8Block], ids=repr)
def test_f18_b_c_old_memory_never_shows(fmt: WeightFormat, layout: Layout) -> None:
    config, params = marker_layer(4, 2, weights=fmt)

    @jax.jit
    def run(x: jax.Array, ids: jax.Array) -> jax.Array:
        weights = jnp.full(ids.shape, 0.5, jnp.float32)
        return moe(params, x, config, kernels(layout), routing=Routing(ids, weights))

    ids = jnp.array([[0, 1], [2, 3], [3, 0]], jnp.int32)
    x = jnp.broadcast_to(jnp.array([1, 2, 3], jnp.bfloat16)[:, None], (3, 128))
    fresh = np.asarray(run(x, ids))
    jax.block_until_ready(run(jnp.full((128, 128), jnp.nan, jnp.bfloat16), jnp.tile(ids[:1], (128, 1))))
    np.testing.assert_array_equal(np.asarray(run(x, ids)), fresh)
    want = marker([1, 2, 3]) * (np.asarray(ids) + 1).sum(1) / 2
    np.testing.assert_allclose(fresh.astype(np.float32), want[:, None] * np.ones(128), rtol=2e-2)


def test_f22_gradients_skip_unused_rows() -> None:
    """Tokens that are padding hold NaN; nothing of them enters an output or a gradient."""
    config, params = marker_layer(2, 1)
    valid = jnp.arange(8) < 3
    routing = Routing(jnp.zeros((8, 1), jnp.int32), jnp.ones((8, 1), jnp.float32))

    def loss(params: object, fill: float) -> jax.Array:
        x = jnp.where(valid[:, None], jnp.ones((8, 128), jnp.bfloat16), jnp.asarray(fill, jnp.bfloat16))
        y = moe(params, x, config, kernels(), routing=routing, valid=valid)  # type: ignore[arg-type]
        return jnp.sum(y.astype(jnp.float32)[:, 0])

    value_and_grad = jax.jit(jax.value_and_grad(loss, allow_int=True), static_argnums=1)
    results = [value_and_grad(params, fill) for fill in (float("nan"), 0.0, 7.0)]
    np.testing.assert_allclose(results[0][0], 3 * 0.73105858, rtol=2e-2)
    for value, grads in results:
        assert value == results[0][0]
        for got, want in zip(jax.tree.leaves(grads.experts), jax.tree.leaves(results[0][1].experts), strict=True):
            assert np.isfinite(np.asarray(got, np.float32)).all()
            np.testing.assert_array_equal(got, want)


def test_f03_d_more_than_2_31_elements() -> None:
    """320000 rows of 7168: permuted and brought back, every row is its own."""
    t, k, h = 40000, 8, 7168
    x = jnp.broadcast_to((jnp.arange(t) % 251).astype(jnp.bfloat16)[:, None], (t, h))
    ids = jax.random.permutation(
        jax.random.key(0), jnp.tile(jnp.arange(k, dtype=jnp.int32), (t, 1)), axis=1, independent=True
    )

    @jax.jit
    def there_and_back(x: jax.Array, ids: jax.Array) -> jax.Array:
        grouping = group_tokens(ids, k, alignment=128)
        rows = permute(x, grouping)
        return unpermute(rows.values, grouping.slots, jnp.full(ids.shape, 0.125, jnp.float32))

    y = there_and_back(x, ids)
    for row in (0, 37449, 37450, 39999):
        np.testing.assert_array_equal(np.asarray(y[row]), np.asarray(x[row]))
    assert bool(jnp.all(y == x))


def test_f24_d_memory_follows_rows() -> None:
    temp = {}
    for e in (16, 64, 128):
        args = (
            jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16),
            jax.ShapeDtypeStruct((e, 512, 256), jnp.bfloat16),
            jax.ShapeDtypeStruct((e,), jnp.int32),
        )

        def forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
            return ragged_gemm(x, w, sizes, backend="deepgemm")

        def loss(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
            return jnp.sum(forward(x, w, sizes).astype(jnp.float32))

        for name, f in (("forward", forward), ("both", jax.grad(loss, (0, 1)))):
            memory = jax.jit(f).lower(*args).compile().memory_analysis()
            assert memory is not None
            temp[name, e] = memory.temp_size_in_bytes
    assert temp["forward", 64] <= 32 << 20
    assert temp["both", 64] <= 96 << 20


def big_layer(fmt: WeightFormat, tokens: int) -> tuple[MoEConfig, MoEParams, jax.Array]:
    router = RouterConfig(num_experts=16, top_k=4, score="sigmoid", num_groups=4, top_groups=2, correction_bias=True)
    config = MoEConfig(
        hidden=1024, intermediate=512, router=router, weights=fmt, shared=SharedExperts(intermediate=512, gate=True)
    )
    return config, random_params(config), jax.random.normal(jax.random.key(5), (tokens, 1024), jnp.bfloat16)


@pytest.mark.parametrize("tokens", [96, 700])
@pytest.mark.parametrize("fmt", [BF16, FP8Block], ids=repr)
def test_a_thousand_times_the_same_bits(fmt: WeightFormat, tokens: int) -> None:
    config, params, x = big_layer(fmt, tokens)

    @jax.jit
    def differing(params: MoEParams, x: jax.Array) -> jax.Array:
        first = moe(params, x, config, Execution(backend="deepgemm"))

        def again(i: int, count: jax.Array) -> jax.Array:
            x_i, _ = jax.lax.optimization_barrier((x, i))
            y = moe(params, x_i, config, Execution(backend="deepgemm"))
            return count + jnp.any(y.view(jnp.int16) != first.view(jnp.int16)).astype(jnp.int32)

        return jax.lax.fori_loop(0, 1000, again, jnp.int32(0))

    assert int(differing(params, x)) == 0


@pytest.mark.parametrize("fmt", [BF16, FP8Block], ids=repr)
def test_a_token_has_the_same_bits_in_every_batch_and_place(fmt: WeightFormat) -> None:
    config, params, x = big_layer(fmt, 700)
    run = jax.jit(functools.partial(moe, config=config, execution=Execution(backend="deepgemm", deterministic=True)))

    def bits(x: jax.Array) -> np.ndarray:
        return np.asarray(run(params, x).view(jnp.int16))

    whole = bits(x)
    order = np.random.default_rng(0).permutation(700)
    np.testing.assert_array_equal(bits(x[order]), whole[order])
    for t in (1, 7, 64, 129, 512):
        for start in (0, 700 - t):
            np.testing.assert_array_equal(bits(x[start : start + t]), whole[start : start + t], err_msg=f"{t} {start}")


def test_peak_memory_is_the_plans() -> None:
    for tokens in (128, 2048):
        config, params, x = big_layer(FP8Block, tokens)
        compiled = jax.jit(lambda p, x: moe(p, x, config)).lower(params, x).compile()  # noqa: B023
        memory = compiled.memory_analysis()
        used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        assert used == pytest.approx(plan(config, tokens).memory.peak, rel=0.05)
