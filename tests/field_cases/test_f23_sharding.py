"""F23 A, B: GPU kernels are custom calls in sharded programs; XLA must not gather their operands to full size.

On 8 virtual CPU devices with the driver that records; C and D need a GPU.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmoe
from jaxmoe.config import Execution
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.target import target
from jaxmoe.errors import BackendUnavailable
from jaxmoe.ops.dense_gemm import dense_gemm, prenorm_gemm
from jaxmoe.ops.grouped_gemm import grouped_gemm
from jaxmoe.ops.permute import padded_rows
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.formats import BF16, FP8Block
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows
from jaxmoe.testing import marker_layer

HOPPER, BLACKWELL = Arch("sm_90a", 132), Arch("sm_100f", 148)
ALL, SPREAD = PartitionSpec(), PartitionSpec("d")
COLLECTIVES = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), "d")


def bf16_gemm(layout: Any, x: jax.Array, w: jax.Array, group: jax.Array) -> jax.Array:
    rows = GroupedRows(x, group, layout, 128)
    return grouped_gemm(rows, GroupedWeight(w, None, BF16, w.shape[-1]), backend="deepgemm")


def bf16(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


def calls(text: str) -> list[tuple[str, str]]:
    """(operand shapes, target) of our custom calls in compiled text."""
    found = []
    for line in text.splitlines():
        target_name = re.search(r'custom_call_target="(jaxmoe_\w+)"', line)
        if target_name:
            layouts = re.search(r"operand_layout_constraints=\{(.*?)\}, api", line)
            assert layouts
            found.append((re.sub(r"\{[\d,]*\}", "", layouts[1]), target_name[1]))
    return found


def test_a_layer_on_sharded_tokens_runs_locally(mesh):
    """x [64, 128] sharded on tokens, experts replicated: no all-gather; equal to one device."""
    config, params = marker_layer(4, 2)
    x = jax.random.normal(jax.random.key(0), (64, 128), jnp.bfloat16)
    execution = Execution(backend="reference")

    def layer(params, x):
        return jaxmoe.moe(params, x, config, execution)

    run = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=(ALL, SPREAD), out_specs=SPREAD))
    compiled = run.lower(params, x).compile()
    assert not COLLECTIVES.search(compiled.as_text())
    np.testing.assert_array_equal(np.asarray(run(params, x)), np.asarray(jax.jit(layer)(params, x)))


def test_a_gradients_are_summed_over_devices(mesh):
    """Parameters that are the same on all devices get the gradient of all tokens, as on one device."""
    config, params = marker_layer(4, 2, dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(1), (16, 128), jnp.float32)
    execution = Execution(backend="reference")

    def layer(params, x):
        return jaxmoe.moe(params, x, config, execution)

    def loss(layer):
        return jax.jit(jax.grad(lambda params, x: jnp.sum(layer(params, x) ** 2), argnums=(0, 1)))

    sharded = jax.shard_map(layer, mesh=mesh, in_specs=(ALL, SPREAD), out_specs=SPREAD)
    for a, b in zip(*(jax.tree.leaves(loss(f)(params, x)) for f in (layer, sharded)), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-4, atol=1e-4 * np.abs(a).max())


def test_a_layer_launches_kernels_over_local_rows(mesh, launches):
    """The same on kernels: 8 tokens with 2 experts each are rows for 8 tokens on each device, not for 64."""
    config, params = marker_layer(4, 2)
    execution = Execution(row_alignment=64, layout="psum")
    x = jax.device_put(bf16(64, 128), NamedSharding(mesh, SPREAD))
    layer = jax.shard_map(
        lambda params, x: jaxmoe.moe(params, x, config, execution),
        mesh=mesh,
        in_specs=(ALL, SPREAD),
        out_specs=SPREAD,
    )
    with target(HOPPER):
        compiled = jax.jit(layer).lower(params, x).compile()
        jax.block_until_ready(compiled(params, x))
    text = compiled.as_text()
    assert not COLLECTIVES.search(text)
    ran = [(operands, name) for operands, name in calls(text) if "grouped" in name]
    assert [name for _, name in ran] == ["jaxmoe_sm90_bf16_m_grouped_psum"] * 2
    rows = [int(re.match(r"bf16\[(\d+),128\]", operands)[1]) for operands, _ in ran]
    assert rows == [padded_rows(8 * 2, 4, 64)] * 2 and rows[0] < padded_rows(64 * 2, 4, 64)
    assert len(launches()) == 3 * 8  # the tokens' places, and two GEMMs


@pytest.mark.parametrize("fmt", [BF16, FP8Block], ids=lambda fmt: fmt.name)
def test_b_experts_sharded(mesh, launches, fmt):
    """EP = 8 by sharding alone: every device multiplies its own expert, nothing travels."""
    e, c, n, k = 8, 128, 256, 128
    if fmt is BF16:
        rows, weight = bf16(e, c, k), GroupedWeight(bf16(e, n, k), None, fmt, k)
        expected = "bf16[1,128,128], bf16[1,256,128], s32[1]"
    else:
        f8 = jnp.float8_e4m3fn
        rows = QuantizedRows(jnp.zeros((e, c, k), f8), jnp.ones((e, 1, c), jnp.float32), fmt.activation)
        weight = GroupedWeight(jnp.zeros((e, n, k), f8), jnp.ones((e, 2, 1), jnp.float32), fmt, k)
        expected = "f8e4m3fn[1,128,128], f32[1,1,128], f8e4m3fn[1,256,128], f32[1,2,1], s32[1]"
    spread = NamedSharding(mesh, SPREAD)
    args = jax.device_put((GroupedRows(rows, jnp.zeros(e, jnp.int32), "masked", 128), weight), spread)
    with target(HOPPER):
        compiled = jax.jit(lambda *args: grouped_gemm(*args, backend="deepgemm")).lower(*args).compile()
        y = jax.block_until_ready(compiled(*args))
    kind = "bf16" if fmt is BF16 else "fp8_1d2d"
    assert calls(compiled.as_text()) == [(expected, f"jaxmoe_sm90_{kind}_m_grouped_masked")]
    assert not COLLECTIVES.search(compiled.as_text())
    assert y.sharding.is_equivalent_to(spread, 3) and len(launches()) == 8


def test_b_vmap_over_a_leading_axis_of_two(mesh, launches):
    """vmap runs the launches one after another, also inside shard_map."""
    x, w, group = bf16(2, 8 * 128, 128), bf16(4, 256, 128), jnp.zeros((2, 8 * 4), jnp.int32)
    batched = jax.vmap(lambda x, w, group: bf16_gemm("psum", x, w, group), in_axes=(0, None, 0))
    spread = PartitionSpec(None, "d")
    run = jax.shard_map(batched, mesh=mesh, in_specs=(spread, ALL, spread), out_specs=spread)
    with target(HOPPER):
        compiled = jax.jit(run).lower(x, w, group).compile()
        y = jax.block_until_ready(compiled(x, w, group))
    assert y.shape == (2, 1024, 256) and len(launches()) == 2 * 8
    assert not COLLECTIVES.search(compiled.as_text())
    assert [operands for operands, _ in calls(compiled.as_text())] == ["bf16[128,128], bf16[4,256,128], s32[4]"]


@pytest.mark.parametrize(
    ("layout", "specs", "message"),
    [
        ("psum", (SPREAD, ALL, ALL), r"psum GEMM .* \[1024, 512\] .* mesh axis 'd' along dimension 'm'"),
        ("psum", (ALL, SPREAD, SPREAD), r"psum GEMM .* \[8, 256, 512\] .* dimension 'g'"),
        ("contiguous", (SPREAD, ALL, SPREAD), r"contiguous GEMM .* dimension 'm'"),
        ("psum", (PartitionSpec(None, "d"), ALL, ALL), r"psum GEMM .* dimension 'k'"),
        ("masked", (PartitionSpec(None, "d"), ALL, ALL), r"masked GEMM .* \[8, 1024, 512\] .* dimension 'm'"),
    ],
)
def test_a_sharding_that_would_need_a_gather_is_refused(mesh, launches, layout, specs, message):
    x = bf16(8, 1024, 512) if layout == "masked" else bf16(1024, 512)
    group = jnp.zeros(1024 if layout == "contiguous" else 8, jnp.int32)
    args = [
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, bf16(8, 256, 512), group), specs, strict=True)
    ]
    run = jax.jit(lambda *args: bf16_gemm(layout, *args))
    with target(HOPPER):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s)ValueError: a {message}.*inside jax.shard_map"):
            run(*args)
        assert launches() == []
        jax.block_until_ready(run(*jax.device_put(args, NamedSharding(mesh, ALL))))
    assert len(launches()) == 8


def test_rows_sharded_are_fine_inside_shard_map(mesh, launches):
    x, w, group = bf16(1024, 128), bf16(4, 256, 128), jnp.zeros(8 * 4, jnp.int32)
    local = jax.shard_map(
        lambda x, w, group: bf16_gemm("psum", x, w, group),
        mesh=mesh,
        in_specs=(SPREAD, ALL, SPREAD),
        out_specs=SPREAD,
    )
    with target(HOPPER):
        compiled = jax.jit(local).lower(x, w, group).compile()
        jax.block_until_ready(compiled(x, w, group))
    assert calls(compiled.as_text()) == [("bf16[128,128], bf16[4,256,128], s32[4]", "jaxmoe_sm90_bf16_m_grouped_psum")]
    assert len(launches()) == 8 and all(launch["params"][1] == {"u32": 128} for launch in launches())


def test_dense_gemms_are_cut_along_tokens(mesh, launches):
    x = jax.device_put(bf16(64, 128), NamedSharding(mesh, SPREAD))
    weight = GroupedWeight(bf16(1, 256, 128), None, BF16, 128)
    with target(BLACKWELL):
        dense = jax.jit(lambda x, w: dense_gemm(x, w, backend="deepgemm")).lower(x, weight).compile()
        prenorm = jax.jit(lambda x, w: prenorm_gemm(x, w, backend="deepgemm"))
        prenorm = prenorm.lower(x, jnp.zeros((24, 128), jnp.float32)).compile()
    assert calls(dense.as_text()) == [("bf16[8,128], bf16[256,128]", "jaxmoe_sm100_bf16_dense")]
    assert calls(prenorm.as_text()) == [("bf16[8,128], f32[24,128]", "jaxmoe_sm100_tf32_hc_prenorm")]
    assert not COLLECTIVES.search(dense.as_text() + prenorm.as_text())


def test_one_mesh_axis_along_two_dimensions_is_refused(mesh, kernels):
    """Rows and outputs over the same axis: one of them would have to be gathered."""
    x = jax.device_put(bf16(64, 128), NamedSharding(mesh, SPREAD))
    w = jax.device_put(bf16(256, 128), NamedSharding(mesh, SPREAD))
    run = jax.jit(lambda x, w: dense_gemm(x, GroupedWeight(w[None], None, BF16, 128), backend="deepgemm"))
    with target(HOPPER), pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)ValueError: a dense GEMM .*'n'"):
        run(x, w)


def test_the_default_device_has_no_kernels():
    """Without a target, the default device is asked, and says why not."""
    cpu = jax.default_device(jax.devices("cpu")[0])
    with cpu, pytest.raises(BackendUnavailable, match="platform 'cpu'"):
        bf16_gemm("psum", bf16(128, 128), bf16(1, 128, 128), jnp.zeros(1, jnp.int32))
