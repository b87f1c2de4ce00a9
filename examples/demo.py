"""Runs the MoE layers of a small DeepSeek-V4-format checkpoint and compares them with recorded outputs.

The checkpoint's experts are MXFP4 and stay packed, unless the GPU at hand has no kernels for them. Layer 0 routes by a
table of token ids, layer 1 by a learned router. Exits with 1 if a layer disagrees with its recorded output.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxmoe
from jaxmoe.testing import calc_diff

DATA = Path(__file__).parent / "data" / "deepseek_v4_fp4"
EXACT_LIMIT = 1e-5
ROUNDED_LIMIT = 5e-3  # rows are rounded to e4m3 before both GEMMs, which makes about 3e-3

forward = jax.jit(jaxmoe.nn.MoE.__call__)
route = jax.jit(jaxmoe.route, static_argnames="config")


def main() -> int:
    recorded = np.load(DATA / "moe_io.npz")
    token_ids = jnp.asarray(recorded["input_ids"], jnp.int32)
    device = jax.devices()[0]
    print(f"{DATA.name}: {token_ids.size} tokens on {device.device_kind} ({device.platform}), JAX {jax.__version__}")
    agreed = True
    for number in (0, 1):
        stored = jaxmoe.checkpoint.load_config(DATA, number)
        loaded = jaxmoe.checkpoint.load_moe(DATA, number, weights="auto", progress=False)
        x, y = (jnp.asarray(recorded[f"model.layers.{number}.mlp|{name}"]) for name in "xy")
        layer = jaxmoe.nn.MoE.from_params(loaded.config, loaded.params)
        ids = token_ids if loaded.config.router.hash_routing else None
        print(f"\nLayer {number}: {describe(loaded.config, stored.weights.name)}")
        show_routing(layer, x, token_ids, ids)
        agreed &= show_agreement(layer, x, y, ids)
        show_cost(layer, x, ids)
    print(f"\nPlan of layer {number} for these tokens on this machine\n{indent(layer.plan(tokens=token_ids.size))}")
    plan = layer.plan(tokens=4096, device="B200")
    print(f"  4096 tokens on a B200 would take {1e6 * (plan.seconds or 0.0):.1f} µs at best, bound by {plan.bound}.")
    print(f"\n{'Both layers agree with' if agreed else 'DISAGREEMENT with'} the recorded outputs.")
    return 0 if agreed else 1


def describe(config: jaxmoe.MoEConfig, stored: str) -> str:
    router, name = config.router, config.weights.name
    weights = f"{name} weights, kept packed" if name == stored else f"{stored} weights, converted to {name}"
    how = "a table of token ids" if router.hash_routing else f"the best {router.score} scores"
    return f"{router.top_k} of {router.num_experts} experts by {how}; {weights}"


def show_routing(layer: jaxmoe.nn.MoE, x: jax.Array, token_ids: jax.Array, ids: jax.Array | None) -> None:
    """Who went where: rows per expert, and the first tokens' experts with their weights."""
    config = layer.config.router
    flat = None if ids is None else ids.reshape(-1)
    routing = route(layer.params.router, x.reshape(-1, x.shape[-1]), config=config, token_ids=flat)
    counts = np.bincount(np.asarray(routing.ids).ravel(), minlength=config.num_experts)
    for expert, count in enumerate(counts):
        print(f"  expert {expert} {'█' * count} {count}")
    for t in range(3):
        chosen = zip(np.asarray(routing.ids[t]), np.asarray(routing.weights[t]), strict=True)
        print(f"  token {int(token_ids.ravel()[t]):3d} → " + ", ".join(f"expert {e} × {w:.3f}" for e, w in chosen))


def show_agreement(layer: jaxmoe.nn.MoE, x: jax.Array, y: jax.Array, ids: jax.Array | None) -> bool:
    """Compares both ways of running with the recorded output."""
    execution = jaxmoe.Execution(quantize_activations=False, backend="reference")
    exact = jaxmoe.nn.MoE.from_params(layer.config, layer.params, execution)
    error = float(jnp.abs(forward(exact, x, token_ids=ids) - y).max() / jnp.abs(y).max())
    quantized = forward(layer, x.astype(jnp.bfloat16), token_ids=ids)
    difference = calc_diff(quantized, y)
    print(f"  exact, f32 rows:    largest error {error:.1e} of the largest output (limit {EXACT_LIMIT:.0e})")
    print(f"  quantised, e4m3:    1 - similarity {difference:.1e} (limit {ROUNDED_LIMIT:.0e})")
    return error <= EXACT_LIMIT and difference <= ROUNDED_LIMIT


def show_cost(layer: jaxmoe.nn.MoE, x: jax.Array, ids: jax.Array | None) -> None:
    """Time of a compiled call, and what the experts' weights take."""
    x = x.astype(jnp.bfloat16)
    jax.block_until_ready(forward(layer, x, token_ids=ids))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(forward(layer, x, token_ids=ids))
        times.append(time.perf_counter() - start)
    experts, config = layer.params.experts, layer.config
    packed = experts.gate_up.nbytes + experts.down.nbytes
    plain = 2 * 3 * config.router.num_experts * config.hidden * config.intermediate
    print(f"  time per call:      {statistics.median(times) * 1e3:.2f} ms, compiled, median of {len(times)}")
    print(f"  experts' weights:   {packed / 1e3:.0f} kB with scales, {plain / 1e3:.0f} kB as bf16")


def indent(text: object) -> str:
    return "\n".join("  " + line for line in str(text).splitlines())


if __name__ == "__main__":
    sys.exit(main())
