"""Deterministic mode on a mesh: no tolerance at all."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.config import Execution, SharedExperts
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params

LAYOUTS = {
    "dp_tp": ({"d": 2}, ParallelLayout(tokens=P("d"), intermediate="d", shared="d")),
    "dp_ep": ({"d": 2}, ParallelLayout(tokens=P("d"), experts="d")),
    "tp_ep": ({"d": 4}, ParallelLayout(experts="d", shared="d")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bits_of_a_token(rng, mesh, layer, name):
    """Other batch sizes, the other rank, other neighbours; tokens whose experts are here, there and on both."""
    sizes, layout = LAYOUTS[name]
    config, params = layer(router="grouped", shared=SharedExperts(intermediate=40, gate=True))
    devices, execution = mesh(**sizes), Execution(deterministic=True)
    sharded = shard_params(params, config, layout, devices)
    x = rng.normal(size=(34, config.hidden)).astype(np.float32)

    def bits(x: np.ndarray) -> np.ndarray:
        y = moe_parallel(sharded, jnp.asarray(x), config, layout, devices, execution)
        return np.asarray(y).view(np.uint32)

    whole = bits(x)
    for order in (rng.permutation(34), np.roll(np.arange(34), 17)):
        np.testing.assert_array_equal(bits(x[order]), whole[order])
    crowd = np.broadcast_to(x[:1], x.shape)
    assert (bits(crowd) == whole[0]).all()
    for t in (2, 9) if name == "dp_ep" else (2,):
        for start in (0, 13, 34 - t):
            np.testing.assert_array_equal(bits(x[start : start + t]), whole[start : start + t])
