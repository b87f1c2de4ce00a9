"""What each process of :mod:`jaxmoe.testing.test_many_devices` runs: ``process PORT COUNT RANK``, one device each."""

from __future__ import annotations

import os
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.config import Execution
from jaxmoe.layer.pipeline import moe
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.testing.layers import random_layer


def main(port: str, count: int, rank: int) -> None:
    """Compares this process's rows of a layer cut over all processes with the layer on one device."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, local_device_ids=[rank], initialization_timeout=120)
    assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (count, 1, count)
    config, params, x = random_layer(dtype="float32")
    execution, x = Execution(backend="reference"), np.asarray(x)
    want = np.asarray(jax.jit(moe, static_argnums=(2, 3))(params, x, config, execution))
    mesh, layout = Mesh(np.array(jax.devices()), "d"), ParallelLayout(tokens=PartitionSpec("d"), experts="d")
    rows = jax.make_array_from_callback(x.shape, NamedSharding(mesh, layout.tokens), x.__getitem__)
    y = moe_parallel(shard_params(params, config, layout, mesh), rows, config, layout, mesh, execution)
    for shard in y.addressable_shards:
        np.testing.assert_allclose(shard.data, want[shard.index], rtol=0, atol=1e-5 * np.abs(want).max())
    print("equal")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
