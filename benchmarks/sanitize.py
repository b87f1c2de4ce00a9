"""Small shapes of every Hopper kernel, to be run under compute-sanitizer:

compute-sanitizer --tool memcheck  --kernel-name kernel_substring=impl python -m benchmarks.sanitize
compute-sanitizer --tool racecheck --kernel-name kernel_substring=impl python -m benchmarks.sanitize
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.grouped_gemm import make_rows
from jaxmoe.ops.dense_gemm import dense_gemm
from jaxmoe.ops.grouped_gemm import grouped_gemm
from jaxmoe.quant import quantize_weight
from jaxmoe.quant.formats import BF16, FP8Block
from jaxmoe.quant.tensors import GroupedWeight


def main() -> None:
    """Runs each kernel once and checks that its rows are finite."""
    counts = np.array([3, 0, 130, 1], np.int32)
    tight = jax.random.normal(jax.random.key(0), (int(counts.sum()), 512), jnp.bfloat16)
    dense = jax.random.normal(jax.random.key(1), (4, 264, 512), jnp.bfloat16)
    for fmt in (BF16, FP8Block):
        if fmt.name not in (sys.argv[1:] or (BF16.name, FP8Block.name)):
            continue
        weight = (
            GroupedWeight(dense, None, BF16, 512)
            if fmt is BF16
            else jax.jit(quantize_weight, static_argnums=1)(dense, fmt)
        )
        for layout in ("psum", "contiguous", "masked"):
            rows = make_rows(tight, counts, layout, fmt)
            y = grouped_gemm(rows, weight, backend="deepgemm")
            flat = y.reshape(-1, y.shape[-1])
            assert bool(jnp.isfinite(flat[:3].astype(jnp.float32)).all())
            print(fmt, layout)
    one = GroupedWeight(dense[:1], None, BF16, 512)
    for dtype in (jnp.bfloat16, jnp.float32):
        dense_gemm(tight, one, out_dtype=dtype, backend="deepgemm").block_until_ready()
        print("dense", jnp.dtype(dtype))


if __name__ == "__main__":
    main()
