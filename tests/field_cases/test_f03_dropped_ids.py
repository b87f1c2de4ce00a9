"""F03 A to C: expert id -1 means "dropped", but it lands on a real expert or shifts the rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import Execution
from jaxmoe.layer.pipeline import moe
from jaxmoe.ops.permute import expert_counts, group_tokens
from jaxmoe.quant.formats import BF16, FP8Block, WeightFormat
from jaxmoe.router import Routing
from jaxmoe.testing import marker_layer

IDS = jnp.array([[0, 1], [-1, 2], [3, -1], [-1, -1]], jnp.int32)
LAYOUTS = ("psum", "masked", "contiguous")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_counts(layout: str) -> None:
    assert expert_counts(IDS, 4).tolist() == [1, 1, 1, 1]
    g = group_tokens(IDS, 4, layout=layout)  # type: ignore[arg-type]
    assert int((g.source >= 0).sum()) == 4 and int(g.source[0]) == 0
    want = {"psum": [1, 9, 17, 25], "masked": [1] * 4, "contiguous": [0, 1, 2, 3]}[layout]
    group = np.asarray(g.group)
    assert (group[group >= 0]).tolist() == want


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("fmt", "dtype"), [(BF16, jnp.float32), (BF16, jnp.bfloat16), (FP8Block, jnp.bfloat16)])
def test_b_c_layer(fmt: WeightFormat, dtype: jnp.dtype, layout: str) -> None:
    config, params = marker_layer(4, 2, weights=fmt, dtype=dtype)
    x = jnp.broadcast_to(jnp.arange(1, 5).astype(dtype)[:, None], (4, 128))
    execution = Execution(layout=layout, quantize_activations=False)  # type: ignore[arg-type]

    def run(x: jax.Array, w: jax.Array, execution: Execution = execution) -> jax.Array:
        return moe(params, x, config, execution, routing=Routing(IDS, w)).astype(jnp.float32)

    w = jnp.full((4, 2), 0.5, jnp.float32)
    y, vjp = jax.vjp(jax.jit(run), x, w)
    want = np.array([1.09658787, 5.28478247, 17.1463343, 0])[:, None]
    np.testing.assert_allclose(y, np.broadcast_to(want, y.shape), rtol=1e-5 if dtype == jnp.float32 else 2e-2)
    assert (np.asarray(y[3]) == 0).all()
    dx, dw = vjp(jnp.ones_like(y))
    assert (np.asarray(dw)[np.asarray(IDS) < 0] == 0).all() and (np.asarray(dw)[np.asarray(IDS) >= 0] > 0).all()
    assert (np.asarray(dx[3]) == 0).all() and (np.asarray(dx[:3]) != 0).all()
    if fmt.quantized:
        y = jax.jit(run, static_argnums=2)(x, w, Execution(layout=layout))  # type: ignore[arg-type]
        np.testing.assert_allclose(y, np.broadcast_to(want, y.shape), rtol=2e-2)
        assert (np.asarray(y[3]) == 0).all()
