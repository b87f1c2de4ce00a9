"""One of two processes that make an EpContext on the recording driver: ``deepep_handshake.py TOKENS TOKENS``.

Its tokens are the first or the second number, by its rank. Prints what it allocated and what its table of peers
holds.
"""

from __future__ import annotations

import json
import os
import struct
import sys

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmoe.cuda import arch, cubin_cache, driver, ffi
from jaxmoe.cuda.deepep.sizes import TABLE_OFFSET
from jaxmoe.dispatch.deepep import EpContext
from jaxmoe.testing.ranks import join


def main(tokens: list[int]) -> None:
    join()
    library = ffi.Library(os.environ["JAXMOE_FFI_LIBRARY"], platform="cpu")
    ffi.library = lambda: library  # pyright: ignore[reportAttributeAccessIssue]
    arch.detect = lambda device=None: arch.Arch("sm_90a", 132)
    cubin_cache.ensure = lambda sources, **_: dict.fromkeys(sources, "none")

    mesh = Mesh(np.array(jax.devices()), "d")
    made: dict[str, object] = {"error": None}
    first = EpContext(mesh, "d", tokens=8, hidden=256, num_experts=8, top_k=2)
    try:
        with EpContext(mesh, "d", tokens=tokens[jax.process_index()], hidden=256, num_experts=8, top_k=2) as context:
            buffers = context._buffers
            assert buffers is not None
            own = {d.id: address for d, address in buffers._own.items()}
            tables = {i: struct.unpack("<4Q", driver.driver().read(0, a + TABLE_OFFSET, 32)) for i, a in own.items()}
            made |= {"own": own, "tables": tables, "context": context.calls.context}
    except Exception as error:
        made["error"] = f"{type(error).__name__}: {error}"
    first.close()
    print(json.dumps(made), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main([int(tokens) for tokens in sys.argv[1:]])
