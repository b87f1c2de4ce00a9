"""F12 B, D: a TP shard holds matching slices of gate and up; I must divide by TP, not 2·I."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxmoe.config import Execution, MoEConfig, RouterConfig
from jaxmoe.errors import ShapeError
from jaxmoe.layer.build import make_params
from jaxmoe.layer.pipeline import experts
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.testing.ranks import whole

GATE, UP, DOWN = [[[1], [2], [3], [4]]], [[[10], [20], [30], [40]]], [[[1, 1, 1, 1]]]


def layer(inter: int) -> tuple:
    config = MoEConfig(hidden=1, intermediate=inter, router=RouterConfig(num_experts=1, top_k=1))
    arrays = (np.float32(GATE)[:, :inter], np.float32(UP)[:, :inter], np.float32(DOWN)[:, :, :inter])
    return config, make_params(config, gate=arrays[0], up=arrays[1], down=arrays[2])


@pytest.mark.devices(2)
def test_b_partial_sums() -> None:
    config, params = layer(4)
    mesh, layout = Mesh(np.array(jax.devices()[:2]), "t"), ParallelLayout(intermediate="t")
    sharded = shard_params(params, config, layout, mesh)
    one, none = jnp.ones((1, 1), jnp.float32), jnp.zeros((1, 1), jnp.int32)
    for rank, want in enumerate((42.5424689, 242.853878)):
        shard = jax.tree.map(lambda a, rank=rank: jnp.asarray(a[rank : rank + 1]), whole(sharded.experts))
        np.testing.assert_allclose(experts(shard, one, none, one, config, Execution()), want, rtol=1e-5)
    np.testing.assert_allclose(whole(moe_parallel(sharded, one, config, layout, mesh)), 285.396347, rtol=1e-5)


@pytest.mark.devices(2)
def test_d_intermediate_must_divide() -> None:
    config, params = layer(3)
    mesh = Mesh(np.array(jax.devices()[:2]), "t")
    with pytest.raises(ShapeError, match=r"intermediate 3 does not divide by the 2 devices.*divides 3"):
        shard_params(params, config, ParallelLayout(intermediate="t"), mesh)
