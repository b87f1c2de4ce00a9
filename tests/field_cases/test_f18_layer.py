"""F18 B and C: padding rows and old memory do not reach real rows."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.layer.buckets import Bucketed
from jaxmoe.quant.formats import FORMATS
from jaxmoe.router import Routing
from jaxmoe.testing import marker, marker_layer

C = np.array([1.0, 2.0, 3.0])
IDS, W = np.array([[0, 1], [2, 0], [1, 2]]), np.array([[0.5, 0.5], [0.25, 0.75], [1, 0.5]])
CALL = """
import jax, jax.numpy as jnp, numpy as np
from jaxmoe.layer.buckets import Bucketed
from jaxmoe.quant.formats import FORMATS
from jaxmoe.router import Routing
from jaxmoe.testing import marker_layer
config, params = marker_layer(3, 2, weights=FORMATS["FP8Block"])
serve = Bucketed(config, max_tokens=128)
def call(c, ids, w):
    x = np.broadcast_to(np.asarray(c, np.float32)[:, None], (len(c), 128)).astype(jnp.bfloat16)
    return serve(params, x, routing=Routing(jnp.asarray(ids, jnp.int32), jnp.asarray(w, jnp.float32)))
def small():
    y = call([1, 2, 3], [[0, 1], [2, 0], [1, 2]], [[0.5, 0.5], [0.25, 0.75], [1, 0.5]])
    return np.asarray(y).tobytes().hex()
"""


def test_b_after_nan_as_in_a_fresh_process() -> None:
    names: dict = {}
    exec(CALL, names)
    nan = names["call"](np.full(128, np.nan), np.tile([[0, 2]], (128, 1)), np.ones((128, 2)))
    assert np.isnan(np.float32(nan)).all()
    here = names["small"]()
    fresh = subprocess.run([sys.executable, "-c", CALL + "print(small())"], capture_output=True, text=True, check=True)
    assert fresh.stdout.strip() == here


@pytest.mark.parametrize("name", FORMATS)
def test_c_three_tokens_in_a_buffer_for_128(name: str) -> None:
    config, params = marker_layer(3, 2, weights=FORMATS[name])
    serve = Bucketed(config, max_tokens=128)
    serve.sizes = (128,)
    x = jnp.broadcast_to(jnp.asarray(C, jnp.bfloat16)[:, None], (3, 128))
    y = serve(params, x, routing=Routing(jnp.asarray(IDS, jnp.int32), jnp.asarray(W, jnp.float32)))
    jax.block_until_ready(y)
    quant = FORMATS[name].activation
    coarse = quant is not None and quant.scale == "ue8m0"  # constant rows: see F10's note on e4m3
    want = marker(C) * (W * (IDS + 1)).sum(1)
    np.testing.assert_allclose(np.float32(y), np.broadcast_to(want[:, None], (3, 128)), rtol=1 / 16 if coarse else 2e-2)
