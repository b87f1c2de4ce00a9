"""F05: NaN or infinite router rows give the same expert K times."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import RouterConfig, Score
from jaxmoe.layer.params import RouterParams
from jaxmoe.router import Routing, route

PARAMS = RouterParams(kernel=jnp.zeros((4, 8)))
NAN, INF = np.nan, np.inf
ROWS = np.array([range(8), [NAN] * 8, [INF, -INF, 0, 0, 0, 0, 0, 0], [-INF] * 8], np.float32)


def _route(logits: np.ndarray, k: int, score: Score = "softmax", valid: np.ndarray | None = None) -> Routing:
    config = RouterConfig(num_experts=logits.shape[1], top_k=k, score=score)
    return jax.jit(lambda lg, v: route(PARAMS, None, config, logits=lg, valid=v))(logits, valid)


def _distinct(ids: jax.Array, e: int) -> bool:
    return all(len(set(row)) == len(row) and 0 <= min(row) and max(row) < e for row in np.asarray(ids).tolist())


def test_a_bad_rows_leave_a_good_row_alone() -> None:
    batch, alone = _route(ROWS, 4), _route(ROWS[:1], 4)
    assert np.asarray(batch.ids[0]).tolist() == [7, 6, 5, 4]
    np.testing.assert_allclose(batch.weights[0], [0.64391426, 0.23688282, 0.08714432, 0.03205860], rtol=2e-6)
    np.testing.assert_array_equal(batch.weights[:1], alone.weights)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_b_ids_are_distinct(score: Score) -> None:
    assert _distinct(_route(ROWS, 4, score).ids, 8)


def test_c_masked_rows_go_nowhere() -> None:
    got = _route(ROWS, 4, valid=np.array([True, False, False, False]))
    assert (np.asarray(got.ids)[1:] == -1).all()
    assert (np.asarray(got.weights)[1:] == 0).all()
    assert int((got.ids >= 0).sum()) == 4
    np.testing.assert_array_equal(got.weights[:1], _route(ROWS[:1], 4).weights)


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_d_many_experts(score: Score) -> None:
    rows = np.zeros((4, 1024), np.float32)
    rows[0] = np.arange(1024) / 128
    rows[1], rows[2, :2], rows[3] = NAN, (INF, -INF), -INF
    got = _route(rows, 16, score)
    assert np.asarray(got.ids[0]).tolist() == list(range(1023, 1007, -1))
    assert _distinct(got.ids, 1024)
    np.testing.assert_array_equal(got.weights[:1], _route(rows[:1], 16, score).weights)
    masked = _route(rows, 16, score, np.array([True, False, False, False]))
    assert int((masked.ids >= 0).sum()) == 16
    np.testing.assert_array_equal(masked.weights, np.where(np.arange(4)[:, None] == 0, got.weights, 0))
