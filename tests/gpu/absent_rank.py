"""One of several processes of an exchange that the last never takes part in: ``absent_rank.py FORMAT``.

The others say what their error says. All compile the program, because XLA does so together.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxmoe.dispatch.deepep import DeepEP, EpContext
from jaxmoe.errors import EpFailure
from jaxmoe.testing.ranks import join, spread

E, K, H, T = 16, 4, 512, 24
ABSENT_SECONDS = 15


def main(format: Any) -> None:
    join()
    mesh, cut = Mesh(np.array(jax.devices()), "d"), PartitionSpec("d")
    rows = mesh.size * T
    ids = np.broadcast_to(np.arange(K, dtype=np.int32), (rows, K))
    args = [spread(a, mesh, cut) for a in (np.ones((rows, H), jnp.bfloat16), ids, np.ones((rows, K), np.float32))]
    context = EpContext(mesh, "d", tokens=T, hidden=H, num_experts=E, top_k=K, num_sms=16, timeout_seconds=3)

    def exchange(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        return DeepEP(context, format).dispatch(x, ids, weights, E).ids

    run = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=cut, out_specs=cut)).lower(*args).compile()
    if jax.process_index() == jax.process_count() - 1:
        time.sleep(ABSENT_SECONDS)
        os._exit(0)
    start = time.time()
    try:
        with context:
            jax.block_until_ready(run(*args))
        print("no error", flush=True)
    except EpFailure as failure:
        print(f"failed after {time.time() - start:.0f} s: {failure}", flush=True)
    os._exit(0)  # the CUDA context is lost: nothing can be shut down in order


if __name__ == "__main__":
    main(sys.argv[1])
