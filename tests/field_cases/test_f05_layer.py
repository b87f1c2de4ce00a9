"""F05 C: degenerate router rows through a whole layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import MoEConfig, RouterConfig
from jaxmoe.layer.build import make_params
from jaxmoe.layer.params import MoEParams
from jaxmoe.layer.pipeline import moe

E, K, H = 8, 4, 8
CONFIG = MoEConfig(hidden=H, intermediate=H, router=RouterConfig(num_experts=E, top_k=K))
# With the identity as router kernel a token is its own row of logits.
ROWS = jnp.stack(
    [
        jnp.arange(E, dtype=jnp.float32),
        jnp.full(E, jnp.nan),
        jnp.array([jnp.inf, -jnp.inf, 0, 0, 0, 0, 0, 0]),
        jnp.full(E, -jnp.inf),
    ]
)


def layer(rng: np.random.Generator) -> MoEParams:
    gate, up, down = (jnp.asarray(rng.standard_normal((E, H, H)), jnp.float32) for _ in range(3))
    return make_params(CONFIG, gate=gate, up=up, down=down, router_kernel=jnp.eye(H, dtype=jnp.float32))


def test_c_padding_rows_come_out_as_zero(rng: np.random.Generator) -> None:
    params = layer(rng)
    run = jax.jit(lambda x, valid: moe(params, x, CONFIG, valid=valid))
    y = np.asarray(run(ROWS, jnp.array([True, False, False, False])))
    np.testing.assert_array_equal(y[1:], 0)
    clean = run(jnp.broadcast_to(ROWS[0], ROWS.shape), jnp.array([True, False, False, False]))
    np.testing.assert_array_equal(y[0], clean[0])
    assert np.isfinite(y[0]).all() and y[0].any()


def test_a_bad_row_spoils_only_itself(rng: np.random.Generator) -> None:
    params = layer(rng)
    run = jax.jit(lambda x: moe(params, x, CONFIG))
    good = jnp.stack([ROWS[0], ROWS[0] / 2, -ROWS[0], ROWS[0]])
    want = np.asarray(run(good))
    for bad in (1, 2, 3):
        y = np.asarray(run(good.at[1].set(ROWS[bad])))
        np.testing.assert_array_equal(y[[0, 2, 3]], want[[0, 2, 3]])
