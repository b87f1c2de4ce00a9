"""Gradients through the Pallas kernels on devices of a mesh: those of the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from jaxmoe.ops import mosaic
from jaxmoe.ops.permute import group_tokens, permute, unpermute


@pytest.mark.skipif(not mosaic.LOWERS, reason="Mosaic GPU of this JAX refuses the kernels, and so do the backends")
def test_moves_in_the_interpreter(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mesh axis with one device, for the interpreter keeps the books of one; types are those of any number."""
    monkeypatch.setattr(mosaic, "require_gpu", lambda: None)
    x, weights = jnp.asarray(rng.normal(size=(8, 64)), jnp.float32), jnp.asarray(rng.random((8, 2)), jnp.float32)
    ids = jnp.asarray(rng.integers(-1, 3, (8, 2)), jnp.int32)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(backend: str) -> list[jax.Array]:
        def there_and_back(x: jax.Array, weights: jax.Array, factor: jax.Array, ids: jax.Array) -> jax.Array:
            grouping = group_tokens(ids, 3, backend="reference")
            rows = permute(x * factor, grouping, backend=backend)
            return unpermute(rows.values**2, grouping.slots, weights, backend=backend)

        on_mesh = jax.shard_map(there_and_back, mesh=mesh, in_specs=(P("x"), P("x"), P(), P("x")), out_specs=P("x"))

        @jax.jit
        def gradients(*args: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(
                jax.value_and_grad(lambda *args: jnp.sin(on_mesh(*args, ids)).sum(), argnums=(0, 1, 2))(*args)
            )

        return gradients(x, weights, jnp.float32(1.5))

    want = run("reference")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = run("pallas")
    for found, wanted in zip(got, want, strict=True):
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
