"""F10 on two devices: routed_scaling_factor once, never on the shared expert, however the layer is cut."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxmoe.config import Execution
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.quant.formats import FORMATS
from jaxmoe.testing import marker_layer
from jaxmoe.testing.ranks import whole

LAYOUTS = {
    "ep": ParallelLayout(tokens=PartitionSpec("d"), experts="d"),
    "tp": ParallelLayout(intermediate="d", shared="d"),
}


@pytest.mark.devices(2)
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("cut", LAYOUTS)
@pytest.mark.parametrize("name", ["BF16", "FP8Block", "MXFP8", "MXFP4"])
def test_every_format_on_two_devices(name: str, cut: str, fused: bool) -> None:
    """As on one device: quantised constant rows with power-of-two scales may be 1/16 off."""
    fmt, layout = FORMATS[name], LAYOUTS[cut]
    config, params = marker_layer(4, 2, weights=fmt, shared=4.0, fused=fused, scaling=2.5)
    config = dataclasses.replace(config, router=dataclasses.replace(config.router, softmax_after_topk=True))
    kernel = jnp.asarray(np.broadcast_to(np.log([0.6, 0.4, 0.01, 0.01]) / 128, (128, 4)), jnp.float32)
    params = dataclasses.replace(params, router=dataclasses.replace(params.router, kernel=kernel))
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    sharded = shard_params(params, config, layout, mesh)
    y = moe_parallel(sharded, jnp.ones((2, 128), jnp.bfloat16), config, layout, mesh, Execution())
    coarse = fmt.activation is not None and fmt.activation.scale == "ue8m0"
    np.testing.assert_allclose(np.float32(whole(y)), 5.48293934, rtol=1 / 16 if coarse else 2e-2)
