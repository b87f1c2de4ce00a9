"""Small shapes of every Hopper kernel but DeepEP's, to be run under compute-sanitizer, without XLA on the GPU:

compute-sanitizer --tool memcheck  python -m benchmarks.sanitize
compute-sanitizer --tool racecheck python -m benchmarks.sanitize [BF16 | FP8Block | gradients | rows ...]

Every result is compared with the reference's on the CPU. DeepEP's kernels run the same way by
``JAX_PLATFORMS=cpu python tests/gpu/virtual_ranks.py --ranks 1``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.grouped_gemm import grouping, make_rows
from jaxmoe.config import Layout
from jaxmoe.cuda import cubin_cache, ffi
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.deepgemm.call import GemmCall
from jaxmoe.cuda.deepgemm.zero import plan_between
from jaxmoe.cuda.driver import driver
from jaxmoe.cuda.launch import LaunchSpec
from jaxmoe.cuda.source import KernelSource
from jaxmoe.ops.dense_gemm import dense_gemm
from jaxmoe.ops.grouped_gemm import grouped_gemm
from jaxmoe.ops.grouped_gemm.deepgemm import gemm_call, input_gradient, weight_gradient
from jaxmoe.ops.permute import group_tokens, permute
from jaxmoe.ops.permute.cuda import choose_tiles, plan_copies, plan_places
from jaxmoe.ops.quantize import quantize
from jaxmoe.quant import quantize_weight
from jaxmoe.quant.formats import BF16, FP8Block, WeightFormat
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows
from jaxmoe.testing import calc_diff
from jaxmoe.testing.program import Program

ARCH = Arch("sm_90a", 132)
COUNTS = np.array([3, 0, 130, 1], np.int32)
LAYOUTS: tuple[Layout, ...] = ("psum", "contiguous", "masked")


def launch(
    planned: Sequence[tuple[KernelSource, LaunchSpec]], arguments: Sequence[Any], results: Sequence[Any]
) -> list[np.ndarray]:
    """Runs them on device 0 as one call; its results, in the shapes and dtypes of those given."""
    cuda, library = driver(), ffi.library()
    keys = cubin_cache.ensure([source for source, _ in planned])
    specs = [dataclasses.replace(spec, cubin=keys[source]) for source, spec in planned]
    library.set_cubin_directory(cubin_cache.directory())

    def put(array: np.ndarray) -> tuple[int, int]:
        address = cuda.allocate(0, array.nbytes)
        cuda.write(0, address, array.tobytes())
        return address, array.nbytes

    given = [put(np.asarray(a)) for a in arguments]
    made = [put(np.ones(r.shape, r.dtype)) for r in results]
    with cuda.current(0):
        program = Program(library, specs)
        program.prepare(0)
        program.launch(given, made)
    cuda.synchronize(0)
    raw = [cuda.read(0, *memory) for memory in made]
    for address, _ in (*given, *made):
        cuda.free(0, address)
    return [np.frombuffer(b, r.dtype).reshape(r.shape) for b, r in zip(raw, results, strict=True)]


def check_gemm(what: str, call: GemmCall, operands: list[jax.Array], want: jax.Array, real: Any) -> None:
    """One GEMM; ``real`` are the rows that count."""
    (got,) = launch(call.plan(operands), operands, call.results(operands))
    got, expected = (a.reshape(-1, a.shape[-1])[real].astype(np.float32) for a in (got, np.asarray(want)))
    difference = float(calc_diff(got, expected))
    print(f"{what}: differs by {difference:.1e}", flush=True)
    assert difference < 1e-5


def check_gemms(fmt: WeightFormat) -> None:
    """Grouped in every layout, and dense."""
    tight = jax.random.normal(jax.random.key(0), (int(COUNTS.sum()), 512), jnp.bfloat16)
    weight = GroupedWeight(jax.random.normal(jax.random.key(1), (len(COUNTS), 264, 512), jnp.bfloat16), None, BF16, 512)
    if fmt.activation is not None:
        weight = quantize_weight(weight.values, fmt)
    for layout in LAYOUTS:
        rows = make_rows(tight, COUNTS, layout, fmt)
        call = gemm_call(fmt, layout, ARCH, expected_m=4)
        want = grouped_gemm(rows, weight, backend="reference")
        operands = [*jax.tree.leaves(rows.rows), *jax.tree.leaves(weight), rows.group]
        check_gemm(f"{fmt.name} {layout}", call, operands, want, grouping(COUNTS, layout)[2])
    one = jax.tree.map(lambda a: a[:1], weight)
    x = tight if fmt.activation is None else quantize(tight, fmt.activation)
    for dtype in (jnp.bfloat16, jnp.float32):
        call = gemm_call(fmt, "dense", ARCH, d="f32" if dtype == jnp.float32 else "bf16")
        if fmt.activation is None or dtype == jnp.bfloat16:
            want = dense_gemm(x, one, out_dtype=dtype, backend="reference")
            operands = [*jax.tree.leaves(x), *(a[0] for a in jax.tree.leaves(one))]
            check_gemm(f"{fmt.name} dense to {jnp.dtype(dtype)}", call, operands, want, slice(None))


def check_gradients() -> None:
    """Of bf16 experts, psum: by the rows, by the weights, 0 for experts without rows; and rows of no expert made 0."""
    n, k = 192, 512
    tight = [
        jax.random.normal(jax.random.key(i), (int(COUNTS.sum()), width), jnp.bfloat16) for i, width in ((4, n), (5, k))
    ]
    dy, rows = (make_rows(a, COUNTS, "psum", BF16) for a in tight)
    weight = jax.random.normal(jax.random.key(6), (len(COUNTS), n, k), jnp.bfloat16)
    call = gemm_call(BF16, "psum", ARCH)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return grouped_gemm(rows.with_rows(x), GroupedWeight(w, None, BF16, k), backend="reference")

    want_rows, want_weight = jax.vjp(product, rows.values, weight)[1](dy.values)
    extents, places = jnp.asarray(-(-COUNTS // 128) * 128), grouping(COUNTS, "psum")[2]
    planned = plan_between(ARCH.name, rows.values.shape, 2, len(COUNTS), 128)
    (cleared,) = launch([planned], [rows.values, rows.group], [rows.values])
    want = np.isin(np.arange(rows.values.shape[0]), places)[:, None] * np.ones(k)
    np.testing.assert_array_equal(cleared.astype(np.float32), want)
    check_gemm("by the rows", input_gradient(call), [dy.values, weight, dy.group], want_rows, places)
    check_gemm("by the weights", weight_gradient(call), [dy.values, rows.values, extents], want_weight, slice(None))


def check_rows() -> None:
    """Places of choices, and quantised rows with their scales."""
    experts, alignment = 8, 128
    ids = jax.random.randint(jax.random.key(2), (70, 3), -1, experts, jnp.int32)
    x = quantize(jax.random.normal(jax.random.key(3), (70, 512), jnp.bfloat16), FP8Block.activation)
    for layout in LAYOUTS:
        made = group_tokens(ids, experts, layout=layout, alignment=alignment, backend="reference")
        rows = made.source.size
        planned = plan_places(ARCH.name, ids.shape, experts, layout=layout, alignment=alignment, num_rows=rows)
        wanted = [np.asarray(a) for a in (made.group, made.slots, made.source.reshape(-1))]
        for got, want in zip(launch([planned], [ids], wanted), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
        want = permute(x, made, backend="reference").rows
        assert isinstance(want, QuantizedRows)
        tiles = choose_tiles(x.values.shape, x.scales.shape, ids.shape[1], made.row_shape)
        planned = plan_copies(ARCH.name, ids.shape, 512, x.scales.shape, made.row_shape, x.quant, tiles)
        values, scales = launch([planned], [x.values, x.scales, *wanted[1:]], jax.tree.leaves(want))
        real = wanted[2] >= 0
        for got, expected in ((values, want.values), (scales, want.scales)):
            got, expected = (np.asarray(a).view(np.uint8) for a in (got, expected))
            picked = (a.reshape(rows, -1)[real] if got.shape == want.values.shape else a for a in (got, expected))
            np.testing.assert_array_equal(*picked)
        print(f"places and quantised rows, {layout}: the same", flush=True)


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = {BF16.name: lambda: check_gemms(BF16), FP8Block.name: lambda: check_gemms(FP8Block)}
    runs |= {"gradients": check_gradients, "rows": check_rows}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(runs)}; all if none is given")
    names = parser.parse_args().names or list(runs)
    for name in names:
        if name not in runs:
            parser.error(f"{name!r} is none of {', '.join(runs)}")
        runs[name]()


if __name__ == "__main__":
    main()
