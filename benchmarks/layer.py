"""The whole layer on one GPU beside its floor, its plan, and the same layer made of ``jax.lax.ragged_dot``.

    python -m benchmarks.layer [--tokens 4096 128] [--torch] [--json FILE] [--png FILE]

DeepSeek-V3's layer with the 32 experts that one of 8 ranks holds, every token choosing 8 of them, in FP8.
"""

from __future__ import annotations

import argparse
import functools
import json
import os

import jax

from benchmarks import peers, torch_layer
from jaxmoe.bench import report, timing
from jaxmoe.bench.layer import measure, random_params
from jaxmoe.config import Execution, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.cuda import cubin_cache, target
from jaxmoe.layer.kernels import kernels_for
from jaxmoe.layer.pipeline import moe
from jaxmoe.quant.formats import BF16, FP8Block, WeightFormat


def deepseek_v3(weights: WeightFormat, experts: int = 32) -> MoEConfig:
    """Published sizes, with the experts of one rank."""
    router = RouterConfig(
        num_experts=experts,
        top_k=8,
        score="sigmoid",
        num_groups=8,
        top_groups=4,
        correction_bias=True,
        scaling_factor=2.5,
    )
    shared = SharedExperts(intermediate=2048)
    return MoEConfig(hidden=7168, intermediate=2048, router=router, weights=weights, shared=shared)


def deterministic_cost(config: MoEConfig, tokens: int) -> tuple[float, float]:
    """Seconds without and with the deterministic mode."""
    params = random_params(config)
    x = jax.random.normal(jax.random.key(1), (tokens, config.hidden), jax.numpy.bfloat16)
    run = [
        jax.jit(functools.partial(moe, config=config, execution=Execution(deterministic=on))) for on in (False, True)
    ]
    plain, fixed = (timing.seconds(f, params, x) for f in run)
    return plain, fixed


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 128])
    parser.add_argument("--experts", type=int, default=32, help="on this GPU; the published layer has 256 on 8")
    parser.add_argument("--torch", action="store_true", help="the same layer of torch with sgl-deep-gemm as well")
    parser.add_argument("--kernels", action="store_true", help="list every kernel of the trace")
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--png", help="draw where the time goes into this file")
    options = parser.parse_args()
    if options.torch:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both have their memory in one process
        torch_layer.require()
    config = deepseek_v3(FP8Block, options.experts)
    sources = kernels_for(config, target.current(), options.tokens)
    sources += kernels_for(config, target.current(), options.tokens, Execution(layout="psum"))
    cubin_cache.ensure(list(dict.fromkeys(sources)))
    print(timing.machine())
    print(f"copy rate {timing.copy_rate() / 1e9:.0f} GB/s")
    figures, of_torch = [], []
    for tokens in options.tokens:
        figures.append(measure(config, tokens))
        print(report.text(figures[-1], kernels=options.kernels), flush=True)
        peer = peers.ragged_layer(random_params(deepseek_v3(BF16, options.experts)), config, tokens)
        print(f"the same layer of ragged_dot in bf16: {peer * 1e6:.0f} us, {peer / figures[-1].seconds:.1f} x as long")
        if options.torch:
            of_torch.append(torch_layer.compare(config, tokens))
            print(torch_layer.text(of_torch[-1]))
        plain, fixed = deterministic_cost(config, tokens)
        print(f"deterministic: {fixed * 1e6:.0f} us, {fixed / plain:.2f} x\n", flush=True)
    if options.png:
        report.picture(figures, options.png)
    if options.json:
        with open(options.json, "w") as file:
            torch = [{"torch": f} for f in of_torch] or [{}] * len(figures)
            json.dump([report.as_json(f) | t for f, t in zip(figures, torch, strict=True)], file, indent=1)


if __name__ == "__main__":
    main()
