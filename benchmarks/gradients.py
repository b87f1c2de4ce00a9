"""Gradients of bf16 experts on one GPU, beside what a JAX user would differentiate instead.

    python -m benchmarks.gradients [--models deepseek-v3 ...] [--no-layer] [--json FILE]

Per case: time and TFLOP/s of the input gradient and of the weight gradient over 4096 tokens' rows, to hold beside the
machine's rate for one large product, and other weight gradients' times over ours. Then a layer, forward and backward.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.8")

import jax
import jax.numpy as jnp

from benchmarks import peers
from benchmarks.grouped_gemm import GEMMS, Case, attempt, label, make_rows
from benchmarks.layer import deepseek_v3
from jaxmoe.bench import timing
from jaxmoe.bench.layer import random_params
from jaxmoe.config import Execution
from jaxmoe.cuda import cubin_cache, target
from jaxmoe.layer.kernels import kernels_for
from jaxmoe.layer.params import MoEParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.ops.grouped_gemm import grouped_gemm
from jaxmoe.ops.grouped_gemm.deepgemm import gemm_call, gradient_gemms
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.ops.shapes import MODELS, Spread
from jaxmoe.quant.formats import BF16, FP8Block
from jaxmoe.quant.tensors import GroupedWeight

Array = jax.Array
SPREADS: tuple[Spread, ...] = ("even", "skewed")


@functools.cache
def gradient(of: str, backend: str = "deepgemm") -> Callable[[Array, GroupedRows, Array], Array]:
    """The gradient of a grouped GEMM's ``rows`` or ``weight`` as a function of dL/dy, jitted."""

    def run(dy: Array, rows: GroupedRows, weight: Array) -> Array:
        def product(values: Array, weight: Array) -> Array:
            stack = GroupedWeight(weight, None, BF16, weight.shape[2])
            return grouped_gemm(rows.with_rows(values), stack, backend=backend)

        pull = jax.vjp(product, rows.values, weight)[1]
        return pull(dy)[0 if of == "rows" else 1]

    return jax.jit(run)


def run_case(case: Case) -> dict[str, Any]:
    """Both gradients of one GEMM, and each peer's weight gradient."""
    e, n, k = case.sizes
    tight, weight = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i, shape in enumerate([(int(case.counts.sum()), k), (e, n, k)])
    )
    tight_dy = jax.random.normal(jax.random.key(2), (tight.shape[0], n), jnp.bfloat16)
    rows, dy = (make_rows(a, case.counts, "psum", BF16) for a in (tight, tight_dy))
    flops = 2 * tight.shape[0] * n * k
    found: dict[str, Any] = {"case": label(vars(case))}
    for of in ("rows", "weight"):
        found[of] = timing.kernel_seconds(gradient(of), dy.values, rows, weight, inner=2)
        found[f"{of} TFLOP/s"] = flops / found[of] / 1e12
    sizes = jnp.asarray(case.counts)
    for peer in (peers.ragged_weight_gradient, peers.mosaic_weight_gradient):
        found[peer.__name__] = attempt(peer, tight_dy, tight, sizes)
    loop = functools.partial(timing.kernel_seconds, gradient("weight", "reference"), inner=1, repeats=3)
    found["loop"] = loop(dy.values, rows, weight)
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """One line a case."""
    names = {"ragged_dot": "ragged_weight_gradient", "Mosaic": "mosaic_weight_gradient", "loop over experts": "loop"}
    header = ("case", "d rows µs", "TFLOP/s", "d weight µs", "TFLOP/s", *(f"{name} / ours" for name in names))
    cells = []
    for r in rows:
        ours = [value for of in ("rows", "weight") for value in (r[of] * 1e6, r[f"{of} TFLOP/s"])]
        others = (None if r[name] is None else r[name] / r["weight"] for name in names.values())
        cells.append((r["case"], *ours, *others))
    return timing.table(header, cells)


def compile_kernels(cases: list[Case]) -> None:
    """Compiles what the cases need, side by side, before anything is timed."""
    call = gemm_call(BF16, "psum", target.current())
    found = set()
    for case in cases:
        (e, n, k), m = case.sizes, int((-(-case.counts // 128) * 128).sum())
        x, w, y = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (e, n, k), (m, n)))
        for gemm, operands in [(call, (x, w)), *gradient_gemms(call, x, w, y)]:
            found |= {source for source, _ in gemm.plan(operands)}
    cubin_cache.ensure(list(found), progress=sys.stderr.isatty())


def forward_and_backward(layer: Callable[[MoEParams, Array], Array], params: MoEParams, tokens: int) -> float:
    """Seconds of a value and its gradients by all parameters and x."""
    x = jax.random.normal(jax.random.key(1), (tokens, params.experts.gate_up.k), jnp.bfloat16)

    def loss(params: MoEParams, x: Array) -> Array:
        return jnp.sum(layer(params, x).astype(jnp.float32))

    return timing.seconds(jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), params, x, repeats=3)


def whole_layer(tokens: int) -> str:
    """Forward and backward of DeepSeek-V3's layer with 32 experts, in bf16 and with an FP8 forward pass."""
    config = deepseek_v3(BF16)
    params = random_params(config)
    found = {}
    for name, execution in {"bf16": Execution(), "FP8 forward": Execution(forward_format=FP8Block)}.items():
        cubin_cache.ensure(kernels_for(config, target.current(), [tokens], execution, gradients=True))
        layer = functools.partial(moe, config=config, execution=execution)
        found[name] = forward_and_backward(layer, params, tokens)
    ragged = attempt(forward_and_backward, peers.ragged_dot_layer(config), params, tokens)
    header = ("DeepSeek-V3, 32 experts", "forward and backward ms", "ragged_dot / ours")
    cells = [(f"{name}, {tokens} tokens", s * 1e3, ragged and ragged / s) for name, s in found.items()]
    return timing.table(header, cells)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--no-layer", action="store_true", help="single GEMMs only")
    parser.add_argument("--json", help="write every figure to this file")
    options = parser.parse_args()
    cases = [Case(m, g, "prefill", s) for m in options.models for g in GEMMS for s in SPREADS]
    print(timing.machine())
    print(f"XLA bf16 matmul {timing.matmul_rate() / 1e12:.0f} TFLOP/s", flush=True)
    compile_kernels(cases)
    found = [run_case(case) for case in cases]
    print(table(found), flush=True)
    if not options.no_layer:
        print(whole_layer(4096))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
