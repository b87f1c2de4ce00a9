"""Deterministic mode on a mesh: no tolerance at all."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.config import Execution, SharedExperts
from jaxmoe.parallel import DeepEP, EpContext, ParallelLayout, moe_parallel, shard_params
from jaxmoe.quant.formats import BF16, FP8Block
from jaxmoe.testing.ranks import whole

LAYOUTS = {
    "dp_tp": ({"d": 2}, ParallelLayout(tokens=P("d"), intermediate="d", shared="d")),
    "dp_ep": ({"d": 2}, ParallelLayout(tokens=P("d"), experts="d")),
    "tp_ep": ({"d": 4}, ParallelLayout(experts="d", shared="d")),
}


def check_bits(rng, run, x, counts):
    """Other batch sizes, the other rank, other neighbours; ``counts`` of tokens are run from the start, middle, end."""

    def bits(x: np.ndarray) -> np.ndarray:
        return whole(run(jnp.asarray(x))).view(np.uint8)

    all_of_them, n = bits(x), len(x)
    assert np.isfinite(np.float32(x)).all() and all_of_them.any(axis=1).all()
    for order in (rng.permutation(n), np.roll(np.arange(n), n // 2)):
        np.testing.assert_array_equal(bits(x[order]), all_of_them[order])
    assert (bits(np.broadcast_to(x[:1], x.shape)) == all_of_them[0]).all()
    for t in counts:
        for start in (0, 13, n - t):
            np.testing.assert_array_equal(bits(x[start : start + t]), all_of_them[start : start + t])


@pytest.mark.parametrize("name", LAYOUTS)
def test_bits_of_a_token(rng, mesh, layer, name):
    """Tokens whose experts are here, there and on both."""
    sizes, layout = LAYOUTS[name]
    config, params = layer(router="grouped", shared=SharedExperts(intermediate=40, gate=True))
    devices, execution = mesh(**sizes), Execution(deterministic=True)
    sharded = shard_params(params, config, layout, devices)
    x = rng.normal(size=(34, config.hidden)).astype(np.float32)

    def run(x):
        return moe_parallel(sharded, x, config, layout, devices, execution)

    check_bits(rng, run, x, (2, 9) if name == "dp_ep" else (2,))


@pytest.mark.devices(2)
@pytest.mark.parametrize("fmt", [BF16, FP8Block], ids=repr)
@pytest.mark.parametrize("name", ["dp_tp", "dp_ep", pytest.param("deepep", marks=pytest.mark.multigpu(2))])
def test_bits_of_a_token_through_kernels(request, rng, mesh, layer, name, fmt):
    """In the dtypes that GPUs have kernels for, the exchange by XLA and by DeepEP."""
    _, layout = LAYOUTS["dp_ep" if name == "deepep" else name]
    sizes = {"hidden": 256, "inter": 128}
    config, params = layer(fmt, router="grouped", shared=SharedExperts(intermediate=128, gate=True), **sizes)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim == 3 and fmt is BF16 else a, params)
    devices, execution = mesh(d=2), Execution(deterministic=True)
    sharded = shard_params(params, config, layout, devices)
    x = rng.normal(size=(34, config.hidden)).astype(jnp.bfloat16)
    with contextlib.ExitStack() as stack:
        transport = None
        if name == "deepep":
            request.getfixturevalue("deep_ep_toolchain")
            most = {"tokens": 17, "hidden": 256, "num_experts": 8, "top_k": 3, "weights": fmt}
            transport = DeepEP(stack.enter_context(EpContext(devices, "d", timeout_seconds=10, **most)))

        def run(x):
            return moe_parallel(sharded, x, config, layout, devices, execution, transport=transport)

        check_bits(rng, run, x, (2, 9))
