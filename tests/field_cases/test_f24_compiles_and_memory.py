"""F24: routing changes never recompile, lengths map to a few sizes, temporary memory follows the rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import Execution, RouterConfig
from jaxmoe.layer import buckets
from jaxmoe.layer.buckets import Bucketed, bucket_sizes
from jaxmoe.layer.params import MoEParams, RouterParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.ops.grouped_gemm import grouped_gemm
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.formats import BF16, FORMATS
from jaxmoe.quant.tensors import GroupedWeight
from jaxmoe.router import Routing
from jaxmoe.testing import dense_moe, marker_layer


@pytest.mark.parametrize("layout", ["psum", "masked"])
def test_a_one_compile_for_all_routings(rng: np.random.Generator, layout: str) -> None:
    config, params = marker_layer(8, 2)
    run = jax.jit(functools.partial(moe, config=config, execution=Execution(layout=layout)))  # type: ignore[arg-type]
    x, w = jnp.ones((64, 128), jnp.bfloat16), jnp.full((64, 2), 0.5, jnp.float32)
    balanced = np.stack([np.arange(64) % 8, (np.arange(64) + 1) % 8], 1)
    patterns = [balanced, np.tile([[3, 5]], (64, 1)), np.full((64, 2), -1), np.where(balanced < 4, balanced, -1)]
    patterns += [np.argsort(rng.random((64, 8)), axis=1)[:, :2] for _ in range(6)]
    for ids in patterns:
        y = run(params, x, routing=Routing(jnp.asarray(ids, jnp.int32), w))
        want = 0.73105858 * np.where(ids >= 0, 0.5 * (ids + 1), 0).sum(1)
        np.testing.assert_allclose(np.float32(y[:, 0]), want, rtol=2e-2)
    assert len(patterns) == 10 and run._cache_size() == 1


def test_b_few_compiles_for_many_lengths(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy and JAX inputs, with the router; each result is right, and bit-equal to the unpadded layer's."""
    traced = []

    @functools.wraps(moe)
    def counted(params, x, **options):
        traced.append(x.shape[0])
        return moe(params, x, **options)

    monkeypatch.setattr(buckets, "moe", counted)
    config, params = marker_layer(4, 2, dtype=jnp.float32, shared=2.0)
    serve = Bucketed(config, max_tokens=89)
    lengths = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)
    for i, t in enumerate(lengths):
        x = rng.normal(size=(t, 128)).astype(np.float32)
        y = np.asarray(serve(params, x if i % 2 else jnp.asarray(x)))
        assert y.shape == (t, 128)
        # A router kernel of zeros ties every score: experts 0 and 1 with weight 1/2 each.
        ids, w = np.tile([[0, 1]], (t, 1)), np.full((t, 2), 0.5)
        np.testing.assert_allclose(y, dense_moe(params, x, config, ids, w), rtol=1e-5, atol=1e-6)
        if t in (3, 89):
            np.testing.assert_array_equal(y, jax.jit(functools.partial(moe, config=config))(params, jnp.asarray(x)))
    assert traced == [8, 16, 32, 64, 89]


def test_c_a_maximum_that_is_no_bucket() -> None:
    config, params = marker_layer(4, 2)
    serve = Bucketed(config, max_tokens=301)
    assert serve.sizes == bucket_sizes(301) == (8, 16, 32, 64, 128, 256, 301)
    for t in (300, 301, 63):
        y = serve(params, jnp.ones((t, 128), jnp.bfloat16))
        np.testing.assert_allclose(np.float32(y), np.full((t, 128), 0.73105858 * 1.5), rtol=2e-2)
    with pytest.raises(ValueError, match="302 tokens are above max_tokens 301"):
        serve(params, jnp.ones((302, 128), jnp.bfloat16))
    assert serve(params, jnp.ones((0, 128), jnp.bfloat16)).shape == (0, 128)


@pytest.mark.parametrize("layout", ["psum", "masked", "contiguous"])
def test_c_an_odd_share_per_rank(layout: str) -> None:
    """T = 1008 over 16 ranks is 63 tokens on each."""
    config, params = marker_layer(4, 2)
    run = jax.jit(functools.partial(moe, config=config, execution=Execution(layout=layout)))  # type: ignore[arg-type]
    y = run(params, jnp.ones((63, 128), jnp.bfloat16))
    np.testing.assert_allclose(np.float32(y), np.full((63, 128), 0.73105858 * 1.5), rtol=2e-2)


def _temp_bytes(num_experts: int) -> tuple[int, int]:
    """Of one grouped matmul, and of forward plus backward; 4096 rows, H = 256, I = 512, BF16."""
    rows, h, i = 4096, 256, 512

    def forward(x: jax.Array, values: jax.Array, ends: jax.Array) -> jax.Array:
        return grouped_gemm(GroupedRows(x, ends, "psum", 8), GroupedWeight(values, None, BF16, h))

    def both(x: jax.Array, values: jax.Array, ends: jax.Array, dy: jax.Array):
        y, vjp = jax.vjp(lambda x, values: forward(x, values, ends), x, values)
        return y, vjp(dy)

    shapes = [((rows, h), jnp.bfloat16), ((num_experts, i, h), jnp.bfloat16), ((num_experts,), jnp.int32)]
    args = [jax.ShapeDtypeStruct(*s) for s in shapes]
    dy = jax.ShapeDtypeStruct((rows, i), jnp.bfloat16)
    compiled = jax.jit(forward).lower(*args).compile(), jax.jit(both).lower(*args, dy).compile()
    sizes = [c.memory_analysis() for c in compiled]
    assert sizes[0] is not None and sizes[1] is not None
    return sizes[0].temp_size_in_bytes, sizes[1].temp_size_in_bytes


def test_d_memory_follows_rows_not_experts() -> None:
    forward, both = _temp_bytes(64)
    assert forward <= 32 << 20
    assert both <= 96 << 20
    few, many = _temp_bytes(16), _temp_bytes(128)
    for a, b in zip(few, many, strict=True):
        assert abs(a - b) < 0.25 * max(a, b)


@pytest.mark.parametrize("name", ["BF16", "MXFP4"])
def test_d_layer_memory_follows_routed_rows(name: str) -> None:
    """The whole layer behind a given routing: as many rows take as much with 128 experts as with 16, twice the rows
    twice as much, and that is far below a row for every token and expert."""
    execution = Execution(row_alignment=1)

    def temp(tokens: int, e: int) -> int:
        config, params = marker_layer(1, 1, weights=FORMATS[name])
        config = dataclasses.replace(config, router=RouterConfig(num_experts=e, top_k=2))
        stacks = jax.tree.map(lambda a: jax.ShapeDtypeStruct((e, *a.shape[1:]), a.dtype), params.experts)
        params = MoEParams(RouterParams(jax.ShapeDtypeStruct((128, e), jnp.float32)), stacks)  # type: ignore[arg-type]
        x = jax.ShapeDtypeStruct((tokens, 128), jnp.bfloat16)
        routing = Routing(*(jax.ShapeDtypeStruct((tokens, 2), t) for t in (jnp.int32, jnp.float32)))  # type: ignore[arg-type]
        run = jax.jit(functools.partial(moe, config=config, execution=execution))
        size = run.lower(params, x, routing=routing).compile().memory_analysis()
        assert size is not None
        return size.temp_size_in_bytes

    few, many, twice = temp(512, 16), temp(512, 128), temp(1024, 16)
    assert abs(many - few) <= 0.05 * few
    assert few < twice <= 2.1 * few
    assert many < 512 * 128 * 128 * 2 / 4
