"""DeepGEMM's kernels on a GPU against the reference, over hostile shapes, and what may go wrong around them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import Layout
from jaxmoe.errors import ShapeError
from jaxmoe.ops.dense_gemm import dense_gemm, prenorm_gemm
from jaxmoe.ops.grouped_gemm import grouped_gemm, ragged_gemm
from jaxmoe.ops.quantize import quantize
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant import quantize_weight
from jaxmoe.quant.formats import BF16, FP8Block, WeightFormat
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows
from jaxmoe.testing import calc_diff

pytestmark = pytest.mark.gpu

LAYOUTS: tuple[Layout, ...] = ("psum", "contiguous", "masked")
COUNTS = {
    "mixed": [3, 0, 130, 1, 70],
    "empty": [0, 0, 0, 0, 0],
    "one": [0, 0, 256, 0, 0],
    "ones": [1, 1, 1, 1, 1],
    "tile edges": [64, 65, 0, 127, 129],
}


def make_rows(
    rng: np.random.Generator, counts: list[int], k: int, layout: Layout, fmt: WeightFormat, alignment: int = 128
) -> tuple[GroupedRows, np.ndarray]:
    """Random rows with NaN in every row that belongs to no expert, and which rows do."""
    count = np.asarray(counts)
    if layout == "masked":
        capacity = max(-(-int(count.max()) // 128) * 128, 128)
        valid = np.arange(capacity) < count[:, None]
        group = count
    else:
        padded = -(-count // alignment) * alignment
        starts = np.cumsum(padded) - padded
        rows = int(padded.sum()) + 2 * alignment
        labels = np.full(rows, -1)
        for e, (start, c) in enumerate(zip(starts, count, strict=True)):
            labels[start : start + c] = e
        valid = labels >= 0
        group = labels if layout == "contiguous" else starts + count
    values = np.where(valid[..., None], rng.standard_normal((*valid.shape, k)), np.nan)
    x = jnp.asarray(values, jnp.bfloat16)
    if fmt.activation is not None:
        x = quantize(x, fmt.activation, valid=jnp.asarray(valid))
    return GroupedRows(x, jnp.asarray(group, jnp.int32), layout, alignment), valid


def make_weight(rng: np.random.Generator, e: int, n: int, k: int, fmt: WeightFormat) -> GroupedWeight:
    dense = jnp.asarray(rng.standard_normal((e, n, k)), jnp.bfloat16)
    return GroupedWeight(dense, None, BF16, k) if fmt is BF16 else quantize_weight(dense, fmt)


def dirty_memory() -> None:
    """Fills much of the free memory with NaN and frees it, so that fresh buffers hold NaN."""
    jax.block_until_ready(jnp.full((1 << 28,), jnp.nan, jnp.float32))


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", [BF16, FP8Block], ids=repr)
def test_against_the_reference(rng: np.random.Generator, fmt: WeightFormat, layout: Layout, name: str) -> None:
    rows, valid = make_rows(rng, COUNTS[name], 640, layout, fmt)
    weight = make_weight(rng, 5, 264, 640, fmt)
    dirty_memory()
    got = np.asarray(jax.jit(lambda r, w: grouped_gemm(r, w, backend="deepgemm"))(rows, weight), np.float32)[valid]
    want = np.asarray(grouped_gemm(rows, weight, backend="reference"), np.float32)[valid]
    assert not np.isnan(got).any()
    assert calc_diff(got, want) < 1e-6
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2 * np.sqrt(640) if got.size else 0)


@pytest.mark.parametrize("k", [128, 384, 896])
@pytest.mark.parametrize("alignment", [64, 128])
def test_alignments_and_odd_scale_groups(rng: np.random.Generator, k: int, alignment: int) -> None:
    for fmt in (BF16, FP8Block):
        rows, valid = make_rows(rng, COUNTS["mixed"], k, "psum", fmt, alignment)
        weight = make_weight(rng, 5, 136, k, fmt)
        got = grouped_gemm(rows, weight, backend="deepgemm")
        want = grouped_gemm(rows, weight, backend="reference")
        assert calc_diff(np.asarray(got)[valid], np.asarray(want)[valid]) < 1e-6


def test_results_do_not_depend_on_the_rows_around_nor_on_repeats(rng: np.random.Generator) -> None:
    weight = make_weight(rng, 5, 512, 512, FP8Block)
    rows, valid = make_rows(rng, COUNTS["mixed"], 512, "masked", FP8Block)
    run = jax.jit(lambda r, w: grouped_gemm(r, w, backend="deepgemm"))
    first = np.asarray(run(rows, weight))[valid]
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(run(rows, weight))[valid], first)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_gradients(rng: np.random.Generator, layout: Layout) -> None:
    rows, valid = make_rows(rng, COUNTS["mixed"], 256, layout, BF16)
    weight = make_weight(rng, 5, 384, 256, BF16)
    ct = jnp.asarray(rng.standard_normal((*valid.shape, 384)), jnp.float32)

    def loss(values: jax.Array, matrices: jax.Array, backend: str) -> jax.Array:
        grouped = rows.with_rows(values)
        y = grouped_gemm(grouped, GroupedWeight(matrices, None, BF16, 256), backend=backend)
        return jnp.sum(jnp.where(jnp.asarray(valid)[..., None], y.astype(jnp.float32) * ct, 0))

    grads = [
        jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(rows.rows, weight.values, b)
        for b in ("deepgemm", "reference")
    ]
    for got, want in zip(*grads, strict=True):
        assert not np.isnan(np.asarray(got)).any()
        assert calc_diff(got, want) < 1e-6
    np.testing.assert_array_equal(np.asarray(grads[0][1])[1], 0)  # expert 1 has no rows


@pytest.mark.parametrize("fmt", [BF16, FP8Block], ids=repr)
@pytest.mark.parametrize("m", [1, 100, 300])
def test_dense(rng: np.random.Generator, fmt: WeightFormat, m: int) -> None:
    weight = make_weight(rng, 1, 256, 640, fmt)
    x = jnp.asarray(rng.standard_normal((m, 640)), jnp.bfloat16)
    x = x if fmt.activation is None else quantize(x, fmt.activation)
    got = jax.jit(lambda x, w: dense_gemm(x, w, backend="deepgemm"))(x, weight)
    assert calc_diff(got, dense_gemm(x, weight, backend="reference")) < 1e-6


def test_dense_float32_result_and_gradient(rng: np.random.Generator) -> None:
    weight = make_weight(rng, 1, 256, 640, BF16)
    x = jnp.asarray(rng.standard_normal((100, 640)), jnp.bfloat16)

    def loss(x: jax.Array, w: jax.Array, backend: str) -> jax.Array:
        y = dense_gemm(x, GroupedWeight(w[None], None, BF16, 640), out_dtype=jnp.float32, backend=backend)
        return jnp.sum(jnp.sin(y))

    for got, want in zip(
        *(jax.grad(loss, (0, 1))(x, weight.values[0], b) for b in ("deepgemm", "reference")), strict=True
    ):
        assert calc_diff(got, want) < 1e-4


def test_prenorm_falls_back_to_plain_jax(rng: np.random.Generator) -> None:
    """On Hopper the kernel is reported racy: auto takes the reference, a named kernel is refused."""
    x, w = (
        jnp.asarray(rng.standard_normal((65, 512)), jnp.bfloat16),
        jnp.asarray(rng.standard_normal((24, 512)), jnp.float32),
    )
    with pytest.warns(RuntimeWarning, match="prenorm"):
        product, squares = prenorm_gemm(x, w)
    x64 = np.asarray(x, np.float64)
    np.testing.assert_allclose(product, x64 @ np.asarray(w, np.float64).T, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(squares, (x64 * x64).sum(1), rtol=1e-5)
    with pytest.raises(NotImplementedError, match="prenorm"):
        prenorm_gemm(x, w, backend="deepgemm")


def test_inside_scan_vmap_and_shard_map(rng: np.random.Generator) -> None:
    rows, valid = make_rows(rng, COUNTS["mixed"], 256, "masked", BF16)
    weight = make_weight(rng, 5, 256, 256, BF16)
    zeros = jnp.where(jnp.asarray(valid)[..., None], rows.values, 0)

    def once(x: jax.Array, w: jax.Array = weight.values) -> jax.Array:
        y = grouped_gemm(rows.with_rows(x), GroupedWeight(w, None, BF16, 256), backend="deepgemm")
        return jnp.where(jnp.asarray(valid)[..., None], y, 0)

    twice = once(once(zeros))
    scanned = jax.jit(lambda x: jax.lax.scan(lambda c, _: (once(c), None), x, length=2)[0])(zeros)
    np.testing.assert_array_equal(scanned, twice)
    batched = jax.jit(jax.vmap(once))(jnp.stack([zeros, once(zeros)]))
    np.testing.assert_array_equal(batched, jnp.stack([once(zeros), twice]))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("ep",))
    spec = jax.sharding.PartitionSpec("ep")
    sharded = jax.jit(jax.shard_map(once, mesh=mesh, in_specs=(spec, spec), out_specs=spec))(zeros, weight.values)
    np.testing.assert_array_equal(sharded, once(zeros))


def test_the_context_survives_every_refusal(rng: np.random.Generator, tmp_path: Any) -> None:
    rows, valid = make_rows(rng, COUNTS["mixed"], 256, "psum", BF16)
    weight = make_weight(rng, 5, 256, 256, BF16)
    good = np.asarray(grouped_gemm(rows, weight, backend="deepgemm"))[valid]
    with pytest.raises(ShapeError, match="96"):
        grouped_gemm(GroupedRows(rows.values[:768], rows.group, "psum", 96), weight, backend="deepgemm")
    with pytest.raises(NotImplementedError, match="float32"):
        grouped_gemm(rows.with_rows(rows.values.astype(jnp.float32)), weight, backend="deepgemm")
    with pytest.raises(ValueError, match="even"):
        grouped_gemm(rows, weight, num_sms=7, backend="deepgemm")
    np.testing.assert_array_equal(np.asarray(grouped_gemm(rows, weight, backend="deepgemm"))[valid], good)


def test_fewer_sms_give_the_same_bits(rng: np.random.Generator) -> None:
    rows, valid = make_rows(rng, COUNTS["mixed"], 512, "psum", FP8Block)
    weight = make_weight(rng, 5, 512, 512, FP8Block)
    whole, capped, pdl = (
        np.asarray(grouped_gemm(rows, weight, backend="deepgemm", **options))[valid]
        for options in ({}, {"num_sms": 64}, {"pdl": True})
    )
    np.testing.assert_array_equal(whole, capped)
    np.testing.assert_array_equal(whole, pdl)


@pytest.mark.parametrize("fmt", [BF16, FP8Block], ids=repr)
def test_layouts_and_tiles_give_the_same_bits(fmt: WeightFormat) -> None:
    """What the deterministic mode stands on: a row's bits come from the row and the weight, whatever tile holds it."""
    counts, n, k = COUNTS["mixed"], 1024, 1024
    rng = np.random.default_rng(0)
    weight = make_weight(rng, 5, n, k, fmt)
    tight = rng.standard_normal((sum(counts), k))

    def quantised(x: np.ndarray) -> jax.Array | QuantizedRows:
        rows = jnp.asarray(x, jnp.bfloat16)
        return rows if fmt.activation is None else quantize(rows, fmt.activation)

    def bits(y: jax.Array) -> np.ndarray:
        return np.asarray(y.view(jnp.int16))

    seen = []
    for layout in LAYOUTS:
        rows, valid = make_rows(rng, counts, k, layout, fmt)
        values = np.zeros((*valid.shape, k))
        values[valid] = tight
        rows = rows.with_rows(quantised(values))
        for expected in (1, 16, 64, 200, 1000):
            seen.append(bits(grouped_gemm(rows, weight, expected_m=expected, backend="deepgemm"))[valid])
    for other in seen[1:]:
        np.testing.assert_array_equal(other, seen[0])
    scales = None if weight.scales is None else weight.scales[2:3]
    start = sum(counts[:2])
    for m in (1, 7, 64, counts[2]):
        one = GroupedWeight(weight.values[2:3], scales, fmt, k)
        y = bits(dense_gemm(quantised(tight[start : start + m]), one, backend="deepgemm"))
        np.testing.assert_array_equal(y, seen[0][start : start + m], err_msg=f"dense {m}")


GRAPH_PROGRAM = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jaxmoe.ops.grouped_gemm import grouped_gemm
    from jaxmoe.ops.rows import GroupedRows
    from jaxmoe.quant.formats import BF16
    from jaxmoe.quant.tensors import GroupedWeight

    weight = jax.random.normal(jax.random.key(1), (4, 256, 256), jnp.bfloat16) / 16
    group = jnp.array([3, 129, 256, 384], jnp.int32)

    @jax.jit
    def step(x, weight, group):
        for _ in range(6):
            stack = GroupedWeight(weight, None, BF16, 256)
            x = grouped_gemm(GroupedRows(x, group, "psum", 128), stack, backend="deepgemm")
            x = jnp.where(jnp.isnan(x), 0, x) * jnp.bfloat16(1.5)
        return x

    outputs = []
    for c in (1, 2, 3, 1):
        x = jax.random.normal(jax.random.key(c), (512, 256), jnp.bfloat16)
        outputs.append(np.asarray(step(x, weight, group).view(jnp.int16))[:3])
    assert (outputs[0] == outputs[3]).all() and (outputs[0] != outputs[1]).any()
    np.save(sys.argv[1], np.stack(outputs))
"""


def test_f23_c_same_with_command_buffers_on_and_off(tmp_path: Any) -> None:
    """Fresh inputs to a captured program give fresh results, equal to those without capture."""
    results = []
    for kinds in ("", "FUSION,CUBLAS,CUSTOM_CALL"):
        path = tmp_path / f"{len(kinds)}.npy"
        flags = f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1"
        env = os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        subprocess.run([sys.executable, "-c", textwrap.dedent(GRAPH_PROGRAM), str(path)], env=env, check=True)
        results.append(np.load(path))
    np.testing.assert_array_equal(*results)


def test_f01_empty_groups(rng: np.random.Generator) -> None:
    lhs, rhs = jnp.ones((16, 64), jnp.bfloat16), jnp.asarray(rng.standard_normal((4, 64, 64)), jnp.bfloat16)

    def loss(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(ragged_gemm(lhs, rhs, sizes, backend="deepgemm").astype(jnp.float32))

    grad = jax.jit(jax.grad(loss, (0, 1)))
    for _ in range(2):
        dirty_memory()
        d_lhs, d_rhs = grad(lhs, rhs, jnp.array([8, 0, 8, 0], jnp.int32))
        np.testing.assert_array_equal(np.asarray(d_rhs, np.float32)[[0, 2]], 8)
        np.testing.assert_array_equal(np.asarray(d_rhs, np.float32)[[1, 3]], 0)
        want = np.repeat(np.asarray(rhs, np.float32)[[0, 2]].sum(1), 8, axis=0)
        np.testing.assert_allclose(np.asarray(d_lhs, np.float32), want, rtol=1e-2, atol=2e-2)
        for grads in grad(lhs, rhs, jnp.zeros(4, jnp.int32)):
            np.testing.assert_array_equal(np.asarray(grads, np.float32), 0)
        tail = ragged_gemm(lhs, rhs, jnp.array([3, 0, 4, 0], jnp.int32), backend="deepgemm")
        np.testing.assert_array_equal(np.asarray(tail, np.float32)[7:], 0)


@pytest.mark.parametrize("counts", [[3, 0, 130, 1, 70], [64, 65, 0, 127, 129], [1] * 37])
def test_f02_any_counts(counts: list[int]) -> None:
    e, m = len(counts), sum(counts)
    rhs = jnp.broadcast_to((jnp.arange(e, dtype=jnp.float32) + 1)[:, None, None] / 128, (e, 128, 128)).astype(
        jnp.bfloat16
    )
    y = ragged_gemm(jnp.ones((m, 128), jnp.bfloat16), rhs, jnp.array(counts, jnp.int32), backend="deepgemm")
    np.testing.assert_array_equal(
        np.asarray(y, np.float32), np.repeat(np.arange(1, e + 1), counts)[:, None] * np.ones(128)
    )


@pytest.mark.parametrize("k", [128, 384, 640, 896, 1152])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 127, 129])
def test_f17_scale_groups(k: int, m: int) -> None:
    """Scale 2^(g + 3r) on row r, group g: y[r] = 8^r · (2^G − 1)."""
    groups = k // 128
    row = np.minimum(np.arange(m), 6) % 6
    scales = 2.0 ** (np.arange(groups)[:, None] - 7 + 3 * row[None])
    padded = np.pad(scales, [(0, 0), (0, -m % 4)], constant_values=1)
    assert FP8Block.activation is not None
    x = QuantizedRows(jnp.ones((m, k), jnp.float8_e4m3fn), jnp.asarray(padded, jnp.float32), FP8Block.activation)
    weight = GroupedWeight(jnp.ones((1, 128, k), jnp.float8_e4m3fn), jnp.ones((1, 1, groups), jnp.float32), FP8Block, k)
    y = dense_gemm(x, weight, backend="deepgemm")
    want = jnp.asarray((8.0**row * (2**groups - 1))[:, None] * np.ones(128), jnp.bfloat16)
    np.testing.assert_array_equal(y, want)


@pytest.mark.multigpu(2)
def test_two_gpus_in_one_process(rng: np.random.Generator) -> None:
    """Both give the same bits while they run at the same time."""
    rows, valid = make_rows(rng, COUNTS["mixed"], 2048, "psum", FP8Block)
    weight = make_weight(rng, 5, 2048, 2048, FP8Block)
    run = jax.jit(lambda r, w: grouped_gemm(r, w, backend="deepgemm"))
    placed = [jax.device_put((rows, weight), device) for device in jax.devices()[:2]]
    outs = [[run(*args) for args in placed] for _ in range(50)]
    first = np.asarray(outs[0][0])[valid]
    for pair in outs:
        for out in pair:
            np.testing.assert_array_equal(np.asarray(out)[valid], first)
