"""The layer that the tests of an installation run, small and random."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import MoEConfig, RouterConfig
from jaxmoe.layer.build import make_params
from jaxmoe.layer.params import MoEParams
from jaxmoe.quant.formats import BF16, WeightFormat

TOKENS = 64


def random_layer(fmt: WeightFormat = BF16, dtype: str = "bfloat16") -> tuple[MoEConfig, MoEParams, jax.Array]:
    """Eight experts, two of them for each of ``TOKENS`` tokens, H = I = 128; always the same numbers.

    Args:
      fmt: of the weights. dtype: of x, and of the weights if they are BF16.

    Returns:
      config, parameters, x [TOKENS, 128].
    """
    e, h, i = 8, 128, 128
    config = MoEConfig(hidden=h, intermediate=i, router=RouterConfig(num_experts=e, top_k=2), weights=fmt)
    rng = np.random.default_rng(0)
    shapes = {"gate": (e, i, h), "up": (e, i, h), "down": (e, h, i)}
    arrays = {n: jnp.asarray(rng.normal(size=s) / np.sqrt(h), dtype) for n, s in shapes.items()}
    kernel = jnp.asarray(rng.normal(size=(h, e)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(TOKENS, h)), dtype)
    return config, make_params(config, router_kernel=kernel, **arrays), x
