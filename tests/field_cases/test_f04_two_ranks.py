"""F04 B: a token with several experts on one rank: rows received are not assignments; local ids on every rank."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxmoe.config import Execution
from jaxmoe.dispatch.all_to_all import AllToAll
from jaxmoe.layer.pipeline import experts
from jaxmoe.ops.permute import expert_counts
from jaxmoe.testing import marker_layer
from jaxmoe.testing.ranks import whole

IDS, WEIGHTS = [[2, 2], [1, 3]], [[0.25, 0.75], [0.5, 0.5]]
OVER = PartitionSpec("r")


@pytest.mark.devices(2)
@pytest.mark.parametrize("capacity", [None, 1])
def test_b_two_ranks(capacity: int | None) -> None:
    """Both tokens are rank 0's; rank 1 has two that go nowhere."""
    config, params = marker_layer(4, 2, dtype=jnp.float32)
    transport = AllToAll("r", capacity)

    def rank(weights, x, ids, combine_weights):
        sent = transport.dispatch(x, ids, combine_weights, 4)
        partial = experts(weights, sent.x, sent.ids, sent.weights, config, Execution())
        return expert_counts(sent.ids, 2), sent.ids, partial, transport.combine(partial, sent)

    run = jax.shard_map(rank, mesh=Mesh(np.array(jax.devices()[:2]), "r"), in_specs=OVER, out_specs=OVER)
    x = jnp.asarray(np.repeat([1.0, 1.0, np.nan, np.nan], 128).reshape(4, 128), jnp.float32)
    ids = jnp.asarray([*IDS, [-1, -1], [-1, -1]], jnp.int32)
    weights = jnp.asarray([*WEIGHTS, [np.nan, np.nan], [np.nan, np.nan]], jnp.float32)
    counts, received, partial, y = whole(jax.jit(run)(params.experts, x, ids, weights))

    assert counts.tolist() == [0, 1, 2, 1]
    first, second = np.split(received, 2)
    assert first[(first >= 0).any(1)].tolist() == [[1, -1]]
    assert second[(second >= 0).any(1)].tolist() == [[0, 0], [-1, 1]]
    first, second = np.split(partial[:, 0], 2)
    np.testing.assert_allclose(first[first != 0], [0.73105858], rtol=1e-5)
    np.testing.assert_allclose(second[second != 0], [2.19317574, 1.46211716], rtol=1e-5)
    np.testing.assert_allclose(y[:, 0], [2.19317574, 2.19317574, 0, 0], rtol=1e-5)
