"""F21: exchanges between ranks of which some send nothing and some receive nothing; on the padded transport.

Its buffers have fixed places for each pair of ranks, so that there are no offsets to mix up (A); B to E are as stated.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxmoe.config import Execution
from jaxmoe.dispatch.all_to_all import AllToAll
from jaxmoe.layer.pipeline import moe
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.router import Routing
from jaxmoe.testing import marker_layer
from jaxmoe.testing.ranks import whole

R, T = 4, 6
SENT = np.array([[2, 0, 1, 0], [0, 0, 0, 0], [1, 3, 0, 1], [0, 1, 0, 2]])
OVER = PartitionSpec("r")

pytestmark = pytest.mark.devices(R)


def single_entry(i: int, j: int) -> np.ndarray:
    sent = np.zeros((R, R), int)
    sent[i, j] = 3
    return sent


MATRICES = {"case": SENT, "zeros": 0 * SENT, "one": single_entry(2, 1), "to itself": single_entry(3, 3)}


def tokens(sent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rank i's row k holds 100·i + k, in order of destination; rows nobody wants hold NaN."""
    x, ids = np.full((R, T, 2), np.nan, np.float32), np.full((R, T, 1), -1, np.int32)
    for i in range(R):
        to = np.repeat(np.arange(R), sent[i])
        x[i, : len(to)] = (100 * i + np.arange(len(to)))[:, None]
        ids[i, : len(to), 0] = to
    return x.reshape(-1, 2), ids.reshape(-1, 1)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:R]), "r")


@pytest.mark.parametrize("capacity", [None, 2])
def test_b_c_d_round_trip(mesh: Mesh, capacity: int | None) -> None:
    """Identity experts; there and back, and the same way for the gradient; in one exchange and in several."""
    transport = AllToAll("r", capacity)

    def rank(x, ids):
        weights = jnp.ones(ids.shape, jnp.float32)
        sent = transport.dispatch(x, ids, weights, R)
        unused = (sent.ids < 0).all(1)[:, None]
        return transport.combine(jnp.where(unused, jnp.nan, sent.x), sent), jnp.where(unused, -1.0, sent.x)

    over = jax.shard_map(rank, mesh=mesh, in_specs=OVER, out_specs=OVER)
    run = jax.jit(jax.value_and_grad(lambda x, ids: (jnp.sum(over(x, ids)[0] * 3), over(x, ids)), has_aux=True))
    for name, sent in MATRICES.items():
        x, ids = tokens(sent)
        (_, (y, received)), dx = whole(run(x, ids))
        used = ids[:, 0] >= 0
        np.testing.assert_array_equal(y[used], x[used], err_msg=name)
        np.testing.assert_array_equal(y[~used], 0, err_msg=name)
        np.testing.assert_array_equal(dx, np.where(used[:, None], 3, np.zeros(2)), err_msg=name)
        rows = [[int(v) for v in part[:, 0] if v >= 0] for part in np.split(received, R)]
        start = [np.repeat(np.arange(R), s) for s in sent]
        want = [[100 * i + k for i in range(R) for k in np.flatnonzero(start[i] == j)] for j in range(R)]
        assert rows == want, name
        if name == "case":
            assert rows == [[0, 1, 200], [201, 202, 203, 300], [2], [204, 301, 302]]


def test_d_e_gradients_of_a_layer(mesh: Mesh) -> None:
    """x, experts, router: E = 4, K = 2; then with routings that leave ranks without tokens, or all of them."""
    config, params = marker_layer(4, 2, dtype=jnp.float32)
    rng = np.random.default_rng(21)

    def random(a: jax.Array) -> jax.Array:
        return jnp.asarray(rng.normal(size=a.shape) / np.sqrt(a.shape[-1]), a.dtype)

    kernel = dataclasses.replace(params.router, kernel=random(params.router.kernel))
    params = dataclasses.replace(params, router=kernel, experts=jax.tree.map(random, params.experts))
    x, c = (jnp.asarray(rng.normal(size=(R * T, 128)), jnp.float32) for _ in range(2))
    layout = ParallelLayout(tokens=OVER, experts="r")

    def parallel(params, x, routing=None):
        return moe_parallel(params, x, config, layout, mesh, routing=routing)

    def single(params, x, routing=None):
        return moe(params, x, config, Execution(), routing=routing)

    def gradients(layer):
        def loss(params, x, weights, ids):
            return jnp.sum(c * layer(params, x, None if ids is None else Routing(ids, weights)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))

    one, many = gradients(single), gradients(parallel)
    patterns = [None, *(np.repeat(tokens(sent)[1], 2, 1) for sent in (SENT, 0 * SENT, single_entry(2, 1)))]
    for ids in patterns:
        weights = jnp.asarray(rng.random((R * T, 2)), jnp.float32)
        args = x, weights, None if ids is None else jnp.asarray(ids)
        want, got = one(params, *args), whole(many(shard_params(params, config, layout, mesh), *args))
        for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
            scale = max(float(np.abs(b).max()), 1e-6)
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))
