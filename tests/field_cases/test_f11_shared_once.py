"""F11: the shared expert counted once per rank, or only 1/n of it. The output does not depend on the mesh."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxmoe.layer.pipeline import moe
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.router import Routing
from jaxmoe.testing import marker_layer
from jaxmoe.testing.ranks import whole

MESHES = [(1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8), (1, 2, 1), (1, 4, 1), (1, 2, 2), (1, 4, 2), (2, 2, 2)]
ROUTING = Routing(jnp.array([[0, 1]] * 2, jnp.int32), jnp.array([[0.6, 0.4]] * 2, jnp.float32))
COTANGENT = jnp.asarray(np.random.default_rng(11).normal(size=(2, 128)), jnp.float32)


def with_gradients(layer, params, x):
    """Output, dL/dx, dL/d(shared weights)."""

    def loss(x, shared, params):
        y = layer({"params": params, "shared": shared}, x)
        return jnp.sum(COTANGENT * y), y

    (_, y), (dx, d_shared) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, params.shared, params)
    return y, dx, d_shared


@functools.cache
def one_device():
    config, params = marker_layer(4, 2, dtype=jnp.float32, shared=4.0)
    x = jnp.ones((2, 128), jnp.float32)

    def layer(given, x):
        return moe(_with_shared(**given), x, config, routing=ROUTING)

    return config, params, x, with_gradients(layer, params, x)


def _with_shared(params, shared):
    return type(params)(params.router, params.experts, shared)


@pytest.mark.parametrize("cut", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(s, id="dp{}-ep{}-tp{}".format(*s), marks=pytest.mark.devices(math.prod(s))) for s in MESHES],
)
def test_every_mesh(sizes: tuple[int, int, int], cut: bool) -> None:
    """Sharded: over the axis that cuts I where there is one alone, else over that and the experts' together."""
    config, params, x, (y, dx, d_shared) = one_device()
    mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), ("d", "e", "t"))
    over = () if not cut else "t" if sizes[1] == 1 else ("t", "e")
    layout = ParallelLayout(tokens=PartitionSpec("d"), experts="e", intermediate="t", shared=over)

    def layer(given, x):
        return moe_parallel(_with_shared(**given), x, config, layout, mesh, routing=ROUTING)

    got = whole(with_gradients(layer, shard_params(params, config, layout, mesh), x))
    np.testing.assert_allclose(got[0], np.full((2, 128), 3.94771632), rtol=1e-5)
    np.testing.assert_allclose(got[0], y, rtol=1e-5)
    np.testing.assert_allclose(got[1], dx, rtol=0, atol=1e-5 * np.abs(dx).max())
    want = whole(shard_params(_with_shared(params, d_shared), config, layout, mesh).shared)
    for a, b in zip(jax.tree.leaves(got[2]), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
