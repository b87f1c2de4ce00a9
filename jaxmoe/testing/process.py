"""What each process of :mod:`jaxmoe.testing.test_many_devices` runs, with one device each."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.config import Execution
from jaxmoe.layer.pipeline import moe
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.testing.layers import random_layer
from jaxmoe.testing.ranks import join


def main() -> None:
    """Compares this process's rows of a layer cut over all processes with the layer on one device."""
    join()
    assert jax.local_device_count() == 1 and jax.device_count() == jax.process_count() > 1
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
    main()
