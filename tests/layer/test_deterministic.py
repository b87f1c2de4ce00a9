"""Deterministic mode: a token's bits do not depend on how many tokens there are, on its place or on its neighbours."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import Execution, MoEConfig, RouterConfig, Score, SharedExperts
from jaxmoe.layer.build import make_params
from jaxmoe.layer.pipeline import moe
from jaxmoe.quant.formats import BF16, FP8Block, WeightFormat

run = jax.jit(moe, static_argnames=("config", "execution"))


@pytest.mark.parametrize(("weights", "score"), [(BF16, "sqrtsoftplus"), (FP8Block, "sigmoid")])
def test_bits_of_a_token(rng: np.random.Generator, weights: WeightFormat, score: Score) -> None:
    """In f32, so that no rounding of the output hides a bit; with a gated shared expert."""
    h, i, e = 72, 40, 7
    config = MoEConfig(
        hidden=h,
        intermediate=i,
        router=RouterConfig(num_experts=e, top_k=3, score=score, scaling_factor=2.5),
        weights=weights,
        shared=SharedExperts(intermediate=i, gate=True),
        partial_blocks=True,
    )
    shapes = {"gate": (e, i, h), "up": (e, i, h), "down": (e, h, i), "router_kernel": (h, e)}
    shapes |= {"shared_gate": (i, h), "shared_up": (i, h), "shared_down": (h, i), "shared_gate_vector": (h,)}
    arrays = {name: (rng.normal(size=s) / np.sqrt(s[-1])).astype(np.float32) for name, s in shapes.items()}
    params = make_params(config, **arrays)
    x = rng.normal(size=(97, h)).astype(np.float32)

    def bits(x: np.ndarray) -> np.ndarray:
        y = run(params, jnp.asarray(x), config=config, execution=Execution(deterministic=True))
        return np.asarray(y).view(np.uint32)

    whole = bits(x)
    order = rng.permutation(97)
    np.testing.assert_array_equal(bits(x[order]), whole[order])
    crowd = x.copy()
    crowd[1:] = x[0]
    assert (bits(crowd) == whole[0]).all()
    for t in (1, 6, 65):
        for start in (0, 13, 97 - t):
            np.testing.assert_array_equal(bits(x[start : start + t]), whole[start : start + t])
