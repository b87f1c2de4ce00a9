"""F22 A to C with experts on two ranks: what lies in unused rows of the receive buffer never matters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxmoe.dispatch.all_to_all import AllToAll
from jaxmoe.dispatch.base import Dispatched
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.router import Routing
from jaxmoe.testing import marker_layer
from jaxmoe.testing.ranks import whole

VALID = np.arange(8) < 3


@dataclasses.dataclass(frozen=True)
class Poisoned(AllToAll):
    """What no token was put in holds ``poison``, on arrival and on the way back."""

    poison: float = 0.0

    def dispatch(self, x: Any, ids: Any, weights: Any, num_experts: int) -> Dispatched:
        sent = super().dispatch(x, ids, weights, num_experts)
        unused = (sent.ids < 0).all(1, keepdims=True)
        fill = jnp.float32(self.poison)
        return dataclasses.replace(
            sent, x=jnp.where(unused, fill, sent.x), weights=jnp.where(sent.ids < 0, fill, sent.weights)
        )

    def combine(self, y: Any, dispatched: Dispatched) -> Any:
        unused = (dispatched.ids < 0).all(1, keepdims=True)
        return super().combine(jnp.where(unused, jnp.float32(self.poison), y), dispatched)


@pytest.mark.devices(2)
@pytest.mark.parametrize("capacity", [None, 2])
def test_a_b_c(capacity: int | None) -> None:
    """Expert 0 of two, one on each rank; its bias 0.5. Five of eight tokens go nowhere and hold the poison too."""
    config, params = marker_layer(2, 1, dtype=jnp.float32)
    config = dataclasses.replace(config, expert_bias=True)
    bias = {"gate_up_bias": jnp.zeros((2, 256), jnp.float32), "down_bias": jnp.full((2, 128), 0.5, jnp.float32)}
    params = dataclasses.replace(params, experts=dataclasses.replace(params.experts, **bias))
    mesh = Mesh(np.array(jax.devices()[:2]), "e")
    layout = ParallelLayout(tokens=PartitionSpec("e"), experts="e")
    sharded = shard_params(params, config, layout, mesh)
    ids = jnp.asarray(np.where(VALID, 0, -1)[:, None], jnp.int32)
    results = {}
    for poison in (np.nan, 0.0, 7.0):
        transport = Poisoned("e", capacity, poison)

        def column(experts, x, w, router, transport=transport):
            given = dataclasses.replace(sharded, experts=experts, router=router)
            routing = Routing(ids, w[:, None])
            return moe_parallel(given, x, config, layout, mesh, routing=routing, transport=transport)[:, 0].sum()

        run = jax.jit(jax.value_and_grad(column, argnums=(0, 1, 2)))
        x = jnp.asarray(np.where(VALID, 1.0, poison)[:, None] * np.ones(128), jnp.float32)
        for w, want, d_bias in ((np.ones(8), 3.69317574, 3.0), ([0.5, 0.25, 0.25, *[np.nan] * 5], 1.23105858, 1.0)):
            value, grads = whole(run(sharded.experts, x, jnp.asarray(w, jnp.float32), sharded.router))
            np.testing.assert_allclose(value, want, rtol=1e-5)
            assert float(grads[0].down_bias[0, 0]) == d_bias and (np.asarray(grads[0].down_bias[1]) == 0).all()
            assert (np.asarray(grads[1])[~VALID] == 0).all() and (np.asarray(grads[2])[~VALID] == 0).all()
            for a, b in zip(*(jax.tree.leaves(g) for g in (grads, results.setdefault(want, grads))), strict=True):
                assert np.isfinite(a).all()
                np.testing.assert_array_equal(a, b)
