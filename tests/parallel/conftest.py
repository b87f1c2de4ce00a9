"""Random layers of every router kind and format, and meshes of virtual devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxmoe.config import Activation, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.layer.build import make_params
from jaxmoe.layer.params import MoEParams
from jaxmoe.quant.formats import BF16, WeightFormat

VOCABULARY = 11
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "grouped": {
        "score": "sigmoid",
        "num_groups": 4,
        "top_groups": 2,
        "correction_bias": True,
        "scaling_factor": 2.5,
    },
    "hash": {"score": "sqrtsoftplus", "hash_routing": True},
    "gpt_oss": {"softmax_after_topk": True, "logit_bias": True},
}


@pytest.fixture
def mesh() -> Callable[..., Mesh]:
    """``mesh(d=2, e=4)``: the first 8 virtual devices as a mesh of these axes."""

    def make(**sizes: int) -> Mesh:
        devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
        return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))

    return make


@pytest.fixture
def layer(rng: np.random.Generator) -> Callable[..., tuple[MoEConfig, MoEParams]]:
    """``layer(fmt, router="softmax", shared=SharedExperts(...), oai=False)``, E = 8, K = 3, H = 72, I = 40."""

    def make(
        fmt: WeightFormat = BF16,
        *,
        router: str = "softmax",
        shared: SharedExperts | None = None,
        oai: bool = False,
        hidden: int = 72,
        inter: int = 40,
    ) -> tuple[MoEConfig, MoEParams]:
        e, k = 8, 3
        config = MoEConfig(
            hidden=hidden,
            intermediate=inter,
            router=RouterConfig(num_experts=e, top_k=k, **ROUTERS[router]),
            weights=fmt,
            activation=Activation(kind="oai", limit=1.5) if oai else Activation(),
            expert_bias=oai,
            shared=shared,
            partial_blocks=True,
        )
        shapes = {"gate": (e, inter, hidden), "up": (e, inter, hidden), "down": (e, hidden, inter)}
        shapes["router_kernel"] = (hidden, e)
        if oai:
            shapes |= {"gate_bias": (e, inter), "up_bias": (e, inter), "down_bias": (e, hidden)}
        for name, wanted in (
            ("logit_bias", config.router.logit_bias),
            ("correction_bias", config.router.correction_bias),
        ):
            if wanted:
                shapes[name] = (e,)
        if shared is not None:
            width = shared.intermediate
            shapes |= {"shared_gate": (width, hidden), "shared_up": (width, hidden), "shared_down": (hidden, width)}
            if shared.gate:
                shapes["shared_gate_vector"] = (hidden,)
        arrays = {n: (rng.normal(size=s) / np.sqrt(s[-1])).astype(np.float32) for n, s in shapes.items()}
        if config.router.hash_routing:
            arrays["tid2eid"] = np.stack([rng.permutation(e)[:k] for _ in range(VOCABULARY)]).astype(np.int32)
        return config, make_params(config, **{n: jnp.asarray(a) for n, a in arrays.items()})

    return make
