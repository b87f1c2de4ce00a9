"""Layers cut over devices are the layer on one: virtual CPU devices everywhere, GPUs and processes where there are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxmoe.config import Execution
from jaxmoe.layer.pipeline import moe
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.quant.formats import BF16, FP8Block
from jaxmoe.testing.layers import random_layer
from jaxmoe.testing.oracles import calc_diff
from jaxmoe.testing.ranks import run_ranks

LAYOUTS = {
    "tokens × experts": ParallelLayout(tokens=PartitionSpec("d"), experts="d"),
    "all × experts": ParallelLayout(experts="d"),
    "tokens × widths": ParallelLayout(tokens=PartitionSpec("d"), intermediate="d"),
}
SECONDS = 300
Record = Callable[[str, str, str, str], None]


def _on(devices: Sequence[Any], layout: ParallelLayout, execution: Execution, fmt: object = BF16) -> float:
    config, params, x = random_layer(FP8Block if fmt is FP8Block else BF16)
    mesh = Mesh(np.array(devices), "d")
    with jax.default_device(devices[0]):
        want = jax.jit(moe, static_argnums=(2, 3))(params, x, config, execution)
        sharded = shard_params(params, config, layout, mesh)
        y = moe_parallel(sharded, jax.device_get(x), config, layout, mesh, execution)
    assert {shard.device for shard in y.addressable_shards} == set(devices)
    return calc_diff(y, want)


@pytest.mark.parametrize("name", LAYOUTS)
def test_virtual_devices(name: str, record: Record) -> None:
    """XLA's collectives between devices of one CPU."""
    devices = jax.devices("cpu")[:4]
    if len(devices) < 2:
        pytest.skip("JAX has one CPU device: it was started with other XLA_FLAGS")
    record("many devices", name, f"{len(devices)} virtual", "ok")
    assert _on(devices, LAYOUTS[name], Execution(backend="reference")) <= BF16.max_diff


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("fmt", [BF16, FP8Block], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_gpus(name: str, fmt: object, record: Record) -> None:
    """All GPUs of this machine up to eight, with kernels where there are."""
    devices = jax.devices()[: 2 ** (min(jax.device_count(), 8).bit_length() - 1)]
    record("many devices", name, f"{len(devices)} GPUs {fmt}", "ok")
    assert _on(devices, LAYOUTS[name], Execution(), fmt) <= FP8Block.max_diff


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients(name: str, record: Record) -> None:
    """Those of every parameter and of x, on virtual devices."""
    devices = jax.devices("cpu")[:2]
    if len(devices) < 2:
        pytest.skip("JAX has one CPU device: it was started with other XLA_FLAGS")
    record("many devices", name, "gradients", "ok")
    config, params, x = random_layer(dtype="float32")
    mesh, layout, execution = Mesh(np.array(devices), "d"), LAYOUTS[name], Execution(backend="reference")

    def loss(layer: Callable[..., jax.Array]) -> Callable[..., object]:
        return jax.jit(jax.grad(lambda params, x: jnp.sum(jnp.sin(layer(params, x))), argnums=(0, 1)))

    with jax.default_device(devices[0]):
        params, x = jax.device_put((params, x), devices[0])
        want_params, want_x = loss(lambda p, x: moe(p, x, config, execution))(params, x)  # type: ignore[misc]
        many = loss(lambda p, x: moe_parallel(p, x, config, layout, mesh, execution))
        got_params, got_x = many(shard_params(params, config, layout, mesh), jax.device_get(x))  # type: ignore[misc]
        want_params = shard_params(want_params, config, layout, mesh)
    pairs = zip(jax.tree.leaves((got_params, got_x)), jax.tree.leaves((want_params, want_x)), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_processes(platform: str, record: Record) -> None:
    """A process for each device, or two that share a GPU, which exchange tokens by jax.distributed."""
    count = 2 if platform == "cpu" else min(max(jax.device_count(), 2), 8)
    record("many devices", "tokens × experts", f"{count} {platform} processes", "ok")
    env = {"JAX_PLATFORMS": platform, "XLA_FLAGS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    for rank in run_ranks(("-m", "jaxmoe.testing.process"), count, env=env, seconds=SECONDS):
        assert rank.code == 0 and "equal" in rank.out, rank.out + rank.err
