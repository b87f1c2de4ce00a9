"""F10, one device: routed_scaling_factor once, and never on the shared expert."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import Execution
from jaxmoe.layer.pipeline import moe
from jaxmoe.quant.formats import FORMATS, WeightFormat
from jaxmoe.router import Routing
from jaxmoe.testing import marker_layer

WANT = 5.48293934
jitted = jax.jit(moe, static_argnames=("config", "execution"))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str, fused: bool) -> None:
    """Through the router: logits log .6 and log .4 after top-k, scaling 2.5; and with the routing given.

    E4M3 has three mantissa bits, so a power-of-two activation scale leaves a constant row (all 0.731 here) up to
    1/16 off, the same way in every column; there the bound is 1/16, and 2 % holds with unquantised activations.
    """
    fmt: WeightFormat = FORMATS[name]
    config, params = marker_layer(4, 2, weights=fmt, shared=4.0, fused=fused, scaling=2.5)
    router = dataclasses.replace(config.router, softmax_after_topk=True)
    config = dataclasses.replace(config, router=router)
    logits = np.log([0.6, 0.4, 0.01, 0.01])
    kernel = jnp.asarray(np.broadcast_to(logits / 128, (128, 4)), jnp.float32)
    params = dataclasses.replace(params, router=dataclasses.replace(params.router, kernel=kernel))
    given = Routing(jnp.array([[0, 1]], jnp.int32), jnp.array([[1.5, 1.0]], jnp.float32))
    x = jnp.ones((1, 128), jnp.bfloat16)
    coarse = fmt.activation is not None and fmt.activation.scale == "ue8m0"
    runs: list[tuple[Execution, Routing | None]] = [(Execution(), None)]
    if not fused:
        runs.append((Execution(layout="masked"), given))
    if fmt.quantized and not fused:
        runs.append((Execution(quantize_activations=False), None))
    for execution, routing in runs:
        tolerance = 1 / 16 if coarse and execution.quantize_activations else 2e-2
        y = jitted(params, x, config=config, execution=execution, routing=routing)
        np.testing.assert_allclose(np.float32(y), WANT, rtol=tolerance)


@pytest.mark.parametrize("fused", [False, True])
def test_f32_reference(fused: bool) -> None:
    config, params = marker_layer(4, 2, dtype=jnp.float32, shared=4.0, fused=fused)
    given = Routing(jnp.array([[0, 1]], jnp.int32), jnp.array([[1.5, 1.0]], jnp.float32))
    y = jitted(params, jnp.ones((1, 128), jnp.float32), config=config, routing=given)
    np.testing.assert_allclose(y, np.full((1, 128), WANT), rtol=1e-5)
