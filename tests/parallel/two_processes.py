"""What each of two processes runs; says "equal" if all is as in one process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.config import MoEConfig, RouterConfig, SharedExperts
from jaxmoe.layer.build import make_params
from jaxmoe.layer.pipeline import moe
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.testing.ranks import join

E, H, INTER, T = 8, 24, 16, 12


def main() -> None:
    join()
    assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 2, 4)

    rng = np.random.default_rng(5)
    shapes = {"gate": (E, INTER, H), "up": (E, INTER, H), "down": (E, H, INTER), "router_kernel": (H, E)}
    shapes |= {"shared_gate": (INTER, H), "shared_up": (INTER, H), "shared_down": (H, INTER)}
    arrays = {name: (rng.normal(size=s) / np.sqrt(s[-1])).astype(np.float32) for name, s in shapes.items()}
    router = RouterConfig(num_experts=E, top_k=3)
    config = MoEConfig(hidden=H, intermediate=INTER, router=router, shared=SharedExperts(intermediate=INTER))
    params = make_params(config, **arrays)
    x, c = (rng.normal(size=(T, H)).astype(np.float32) for _ in range(2))

    mesh, layout = Mesh(np.array(jax.devices()), "d"), ParallelLayout(tokens=PartitionSpec("d"), experts="d")
    sharded = shard_params(params, config, layout, mesh)
    cut = NamedSharding(mesh, layout.tokens)
    global_x, global_c = (jax.make_array_from_callback((T, H), cut, a.__getitem__) for a in (x, c))

    def loss(layer, params, x, c):
        y = layer(params, x)
        return jnp.sum(c * y), y

    def many(params, x):
        return moe_parallel(params, x, config, layout, mesh)

    def one(params, x):
        return moe(params, x, config)

    gradient = [
        jax.jit(jax.value_and_grad(lambda *a, f=f: loss(f, *a), argnums=(0, 1), has_aux=True)) for f in (many, one)
    ]
    (_, y), (d_params, dx) = gradient[0](sharded, global_x, global_c)
    (_, want_y), (want_params, want_dx) = gradient[1](params, jnp.asarray(x), jnp.asarray(c))
    pairs = [(y, want_y), (dx, want_dx), *zip(jax.tree.leaves(d_params), jax.tree.leaves(want_params), strict=True)]
    for got, want in pairs:
        assert got.shape == want.shape and not np.array_equal(want, np.zeros_like(want))
        for shard in got.addressable_shards:
            part = np.asarray(want)[shard.index]
            np.testing.assert_allclose(shard.data, part, rtol=0, atol=1e-5 * np.abs(want).max())
    print("equal", len(pairs))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
