"""Random routings of random layers against the float64 formula: what no hand-made case thought of."""

from __future__ import annotations

import functools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.config import Execution, Layout, MoEConfig, RouterConfig
from jaxmoe.layer.build import make_params
from jaxmoe.layer.params import MoEParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.quant.formats import FORMATS
from jaxmoe.router import Routing
from jaxmoe.testing import dense_moe

# format, layout, (H, I, E), T, K: few, because each is compiled; every format and layout, one token, one expert,
# K = E, sizes on and off the blocks.
CASES: list[tuple[str, Layout, tuple[int, int, int], int, int]] = [
    ("BF16", "psum", (24, 40, 6), 17, 3),
    ("BF16", "masked", (24, 40, 1), 5, 1),
    ("FP8Block", "psum", (72, 136, 4), 9, 4),
    ("FP8BlockUE8M0", "contiguous", (128, 128, 3), 1, 2),
    ("MXFP8", "masked", (96, 64, 5), 9, 2),
    ("MXFP4", "psum", (64, 96, 7), 9, 2),
]


@functools.cache
def layer(name: str, sizes: tuple[int, int, int], top_k: int) -> tuple[MoEConfig, MoEParams]:
    rng = np.random.default_rng(sum(sizes))
    h, i, e = sizes
    router = RouterConfig(num_experts=e, top_k=top_k)
    config = MoEConfig(hidden=h, intermediate=i, router=router, weights=FORMATS[name], partial_blocks=True)
    shapes = {"gate": (e, i, h), "up": (e, i, h), "down": (e, h, i)}
    arrays = {part: (rng.normal(size=s) / np.sqrt(s[-1])).astype(np.float32) for part, s in shapes.items()}
    return config, make_params(config, **arrays)


@functools.cache
def compiled(layout: Layout, quantize: bool):
    execution = Execution(layout=layout, quantize_activations=quantize)
    return functools.partial(jax.jit(moe, static_argnames=("config", "execution")), execution=execution)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(CASES), st.integers(0, 2**32 - 1))
def test_any_routing(data: st.DataObject, case: tuple, seed: int) -> None:
    """Ids -1, repeated in a row, all the same and none at all; weights of any sign, NaN where there is no expert."""
    name, layout, sizes, t, k = case
    config, params = layer(name, sizes, k)
    ids = data.draw(hnp.arrays(np.int32, (t, k), elements=st.integers(-1, sizes[2] - 1), fill=st.integers(-1, 0)))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(t, sizes[0])).astype(np.float32)
    w = rng.normal(size=(t, k)).astype(np.float32)
    want = dense_moe(params, x, config, ids, w)
    routing = Routing(jnp.asarray(ids), jnp.asarray(np.where(ids >= 0, w, np.nan)))
    got = np.asarray(compiled(layout, False)(params, jnp.asarray(x), config=config, routing=routing))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(np.abs(want).max(), 1e-3))
    assert (got[(ids < 0).all(1)] == 0).all()
    if config.weights.quantized:
        got = np.asarray(compiled(layout, True)(params, jnp.asarray(x), config=config, routing=routing))
        # Repeated ids may cancel what was quantised; then the terms, not their sum, are the measure.
        terms = sum(np.square(dense_moe(params, x, config, ids[:, [j]], w[:, [j]])).sum() for j in range(k))
        assert np.square(got - want).sum() <= 8 * config.weights.max_diff * max(terms, 1e-12)
