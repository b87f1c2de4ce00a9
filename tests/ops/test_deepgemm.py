"""GEMMs on DeepGEMM's kernels as JAX operations: what is lowered, transformations, options, and every refusal."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jaxmoe
from jaxmoe import ops
from jaxmoe.config import Activation, Execution, MoEConfig, RouterConfig
from jaxmoe.cuda import cubin_cache, jit
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.target import current, target
from jaxmoe.errors import BackendUnavailable, FormatError, ShapeError
from jaxmoe.layer.build import make_params
from jaxmoe.ops.dense_gemm import dense_gemm, prenorm_gemm
from jaxmoe.ops.grouped_gemm import grouped_gemm, row_alignment
from jaxmoe.ops.quantize import quantize
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.formats import BF16, MXFP4, MXFP8, FP8Block, FP8BlockUE8M0, WeightFormat
from jaxmoe.quant.tensors import GroupedWeight
from jaxmoe.quant.weights import quantize_weight

HOPPER, BLACKWELL = Arch("sm_90a", 132), Arch("sm_100f", 148)
E, N, K = 4, 256, 128


def bf16(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


def weight(fmt: WeightFormat = BF16, e: int = E, n: int = N, k: int = K) -> GroupedWeight:
    return quantize_weight(bf16(e, n, k), fmt)


def rows(layout: Any = "psum", fmt: WeightFormat = BF16, m: int = 256, k: int = K, alignment: int = 128) -> GroupedRows:
    """No real rows at all: the driver records, nothing is computed."""
    x = bf16(E, m, k) if layout == "masked" else bf16(m, k)
    group = jnp.full(m, -1, jnp.int32) if layout == "contiguous" else jnp.zeros(E, jnp.int32)
    return GroupedRows(x if fmt.activation is None else quantize(x, fmt.activation), group, layout, alignment)


def gemm(rows: GroupedRows, weight: GroupedWeight, **options: Any) -> jax.Array:
    return grouped_gemm(rows, weight, backend="deepgemm", **options)


def lowered(f: Any, *args: Any) -> str:
    """StableHLO for CUDA."""
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def calls(text: str) -> list[str]:
    return re.findall(r"custom_call @(jaxmoe_\w+)\(", text)


@pytest.mark.parametrize(
    ("arch", "fmt", "kernel"),
    [
        (HOPPER, BF16, "sm90_bf16_m_grouped"),
        (HOPPER, FP8Block, "sm90_fp8_1d2d_m_grouped"),
        (BLACKWELL, BF16, "sm100_bf16_m_grouped"),
        (BLACKWELL, FP8BlockUE8M0, "sm100_fp8_1d1d_m_grouped"),
        (BLACKWELL, MXFP8, "sm100_fp8_1d1d_m_grouped"),
        (BLACKWELL, MXFP4, "sm100_fp8_fp4_1d1d_m_grouped"),
    ],
    ids=lambda value: value.name if isinstance(value, WeightFormat) else None,
)
@pytest.mark.parametrize("layout", ["psum", "contiguous", "masked"])
def test_a_gemm_is_one_custom_call_and_nothing_else(kernels, arch, fmt, kernel, layout):
    with target(arch):
        text = lowered(gemm, rows(layout, fmt), weight(fmt))
    assert calls(text) == [f"jaxmoe_{kernel}_{layout}"]
    entry = text[: text.index("return")]
    assert re.findall(r"stablehlo\.(\w+)", entry) == ["custom_call"]


@pytest.mark.parametrize(
    ("arch", "fmt", "kernel"), [(HOPPER, FP8Block, "sm90_fp8_1d2d"), (BLACKWELL, MXFP4, "sm100_fp8_fp4_1d1d")]
)
def test_both_gemms_of_a_layer_are_kernels(kernels, arch, fmt, kernel):
    """Also that the scales go from the quantiser to the kernel as they are: no transposition in compiled code."""
    config = MoEConfig(hidden=256, intermediate=128, router=RouterConfig(num_experts=4, top_k=2), weights=fmt)
    params = make_params(config, gate=bf16(4, 128, 256), up=bf16(4, 128, 256), down=bf16(4, 256, 128))
    with target(arch):
        text = lowered(lambda p, x: jaxmoe.moe(p, x, config, Execution(layout="psum")), params, bf16(8, 256))
    assert [name for name in calls(text) if "grouped" in name] == [f"jaxmoe_{kernel}_m_grouped_psum"] * 2
    first, second = re.findall(r"= stablehlo\.custom_call @jaxmoe_\w+_grouped_\w+\((.*?)\)", text)
    for operands in (first, second):
        weights = operands.split(", ")[2:4]
        assert all(operand.startswith("%arg") for operand in weights), "weights are not touched before the kernel"


def test_scan_over_layers(kernels, launches):
    with target(HOPPER):

        @jax.jit
        def run(x, stack):
            return lax.scan(lambda x, w: (gemm(rows().with_rows(x), GroupedWeight(w, None, BF16, K)), None), x, stack)[
                0
            ]

        jax.block_until_ready(run(bf16(256, K), bf16(3, E, K, K)))
    assert len(launches()) == 3


def test_vmap_launches_one_after_another(kernels, launches):
    x = rows().rows
    with target(HOPPER):
        y = jax.vmap(lambda x, w: gemm(rows().with_rows(x), GroupedWeight(w, None, BF16, K)), in_axes=(0, None))(
            jnp.stack([x, x]), weight().values
        )
        jax.block_until_ready(y)
    assert y.shape == (2, 256, N) and len(launches()) == 2


def test_export_for_cuda_and_back(kernels):
    name = "jaxmoe_sm90_fp8_1d2d_m_grouped_psum"
    with target(HOPPER):
        exported = export.export(
            jax.jit(gemm),
            platforms=["cuda"],
            disabled_checks=[export.DisabledSafetyCheck.custom_call(name)],
        )(rows(fmt=FP8Block), weight(FP8Block))
    assert exported.platforms == ("cuda",) and calls(exported.mlir_module()) == [name]


def gradients_of(layout: Any, arch: Arch, w: jax.Array) -> tuple[list[str], jax.Array, jax.Array]:
    """What is called for both gradients of 384 rows, none of them real, and the gradients."""

    def loss(x, w, group):
        y = gemm(GroupedRows(x, group, layout, 128), GroupedWeight(w, None, BF16, K))
        return y.astype(jnp.float32).sum()

    args = (rows(layout, m=384).rows, w, rows(layout, m=384).group)
    run = jax.value_and_grad(loss, argnums=(0, 1))
    with target(arch):
        _, (dx, dw) = jax.block_until_ready(jax.jit(run)(*args))
        return calls(lowered(run, *args)), dx, dw


def is_zeroing(launch: dict[str, Any]) -> bool:
    return "map" not in launch["params"][-1]


@pytest.mark.parametrize("layout", ["psum", "contiguous", "masked"])
@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL], ids=["sm90", "sm100"])
def test_gradient_reads_the_same_weights_the_other_way(kernels, launches, arch, layout):
    """dgrad is the same kernel over B as [G, k, n]."""
    w = weight().values
    names, dx, dw = gradients_of(layout, arch, w)
    assert names.count(f"jaxmoe_{arch.family}_bf16_m_grouped_{layout}") == 2
    by_shape = {tuple(p["u32"] for p in one["params"][1:4]): one for one in launches() if not is_zeroing(one)}
    assert (384, N, K) in by_shape
    backward = by_shape[384, K, N]
    # The weight is not copied: B's map runs over the caller's [E, N, K], its rows K wide.
    assert backward["params"][5]["map"][1] == [K, E * N] and backward["addresses"][1] == w.unsafe_buffer_pointer()
    if layout != "psum":
        # No row is real: its undefined output and cotangent must not leak.
        np.testing.assert_array_equal(np.asarray(dx.astype(jnp.float32)), 0)
        np.testing.assert_array_equal(np.asarray(dw.astype(jnp.float32)), 0)


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL], ids=["sm90", "sm100"])
def test_weight_gradient_sums_over_the_rows_of_each_expert(kernels, launches, arch):
    """Over dL/dy [384, N] and the rows [384, K] as they lie, to [E, N, K]; what nothing writes is zeroed behind it."""
    names, _, _ = gradients_of("psum", arch, weight().values)
    gemms = [name for name in names if "zero" not in name]
    assert gemms.count(f"jaxmoe_{arch.family}_bf16_k_grouped") == 1 and len(gemms) == 3
    found = [one for one in launches() if [p.get("u32") for p in one["params"][1:4]] == [N, K, 384]]
    assert [p["map"][1] for p in found[0]["params"][4:]] == [[N, 384], [K, 384], [K, E * N]]
    zeroed = [[p["u32"] for p in one["params"][2:]] for one in launches() if is_zeroing(one)]
    # Rows of no expert in dL/dy, in the rows and in dL/drows; then experts without rows in the result.
    assert sorted(zeroed) == [[E, 0, N, K // 8], *[[E, 128, 384, K // 8]] * 2, [E, 128, 384, N // 8]]
    assert is_zeroing(launches()[-1])


@pytest.mark.parametrize("layout", ["psum", "contiguous", "masked"])
def test_rows_of_no_expert_stay_out_of_the_bias_gradient(kernels, layout):
    """F22: their cotangent may be anything, NaN too."""
    r, bias = rows(layout), jnp.zeros((E, N), jnp.float32)
    dy = jnp.full((*r.values.shape[:-1], N), jnp.nan, jnp.bfloat16)
    if layout == "masked":
        dy, group = dy.at[2, :3].set(1), r.group.at[2].set(3)
    elif layout == "psum":
        dy, group = dy.at[:3].set(1), jnp.array([0, 0, 3, 3], jnp.int32)
    else:
        dy, group = dy.at[:3].set(1), r.group.at[:3].set(2)
    r = GroupedRows(r.rows, group, layout, 128)
    with target(HOPPER):
        _, pull = jax.vjp(lambda bias: gemm(r, weight(), bias=bias), bias)
        (d_bias,) = pull(dy)
    np.testing.assert_array_equal(np.asarray(d_bias), np.array([0, 0, 3, 0], np.float32)[:, None] * np.ones((1, N)))


def test_quantised_operands_have_no_gradient(kernels):
    w = weight(FP8Block)
    with (
        target(HOPPER),
        pytest.raises(NotImplementedError, match="quantised rows have no gradient; for gradients of x"),
    ):
        jax.grad(lambda x: gemm(rows().with_rows(quantize(x, FP8Block.activation)), w).astype(jnp.float32).sum())(
            rows().rows
        )


def test_a_gradient_without_kernel_is_refused_where_auto_can_still_fall_back(kernels, launches):
    """n = 136 runs forward; read the other way it is k, which must be a multiple of 64."""
    w = weight(n=136).values

    def loss(x, backend):
        y = grouped_gemm(rows().with_rows(x), GroupedWeight(w, None, BF16, K), backend=backend)
        return y.astype(jnp.float32).sum()

    with target(HOPPER):
        loss(rows().rows, "deepgemm")
        with pytest.raises(BackendUnavailable, match="k is 136, not a multiple of 64"):
            jax.grad(loss)(rows().rows, "deepgemm")
        np.testing.assert_array_equal(np.asarray(jax.grad(loss)(rows().rows, "auto").astype(jnp.float32)), 0)


def test_options_reach_the_launch_and_change_no_result(launches):
    with target(HOPPER):
        jax.block_until_ready(jax.jit(lambda r, w: gemm(r, w, num_sms=40, pdl=True))(rows(), weight()))
        jax.block_until_ready(jax.jit(lambda r, w: gemm(r, w, num_sms=1000))(rows(), weight()))
    assert [(launch["grid"], launch["pdl"]) for launch in launches()] == [([40, 1, 1], True), ([132, 1, 1], False)]
    options = {"expected_m": 3, "num_sms": 40, "pdl": True}
    plain, hinted = (grouped_gemm(rows(), weight(), backend="reference", **o) for o in ({}, options))
    np.testing.assert_array_equal(np.asarray(plain.astype(jnp.float32)), np.asarray(hinted.astype(jnp.float32)))


def test_one_jitted_function_serves_several_targets(kernels, launches):
    run = jax.jit(gemm)
    for arch in (HOPPER, BLACKWELL, HOPPER):
        with target(arch):
            assert current() == arch
            jax.block_until_ready(run(rows(), weight()))
    assert [launch["grid"][0] for launch in launches()] == [132, 148, 132]


@pytest.mark.parametrize("layout", ["psum", "contiguous", "masked"])
def test_no_rows_is_no_launch(launches, layout):
    with target(HOPPER):
        y = gemm(rows(layout, m=0), weight())
    assert y.shape == ((E, 0, N) if layout == "masked" else (0, N)) and launches() == []


REFUSALS = {
    "f32 rows": (
        HOPPER,
        lambda: gemm(rows().with_rows(jnp.zeros((256, K), jnp.float32)), weight(), out_dtype=jnp.bfloat16),
        BackendUnavailable,
        "DeepGEMM takes bfloat16 rows, not float32; cast them",
    ),
    "f32 weights": (
        HOPPER,
        lambda: gemm(rows(), GroupedWeight(jnp.zeros((E, N, K), jnp.float32), None, BF16, K)),
        BackendUnavailable,
        "DeepGEMM takes bfloat16 weights, not float32",
    ),
    "f32 output": (
        HOPPER,
        lambda: gemm(rows(), weight(), out_dtype=jnp.float32),
        BackendUnavailable,
        "grouped DeepGEMM kernels give bfloat16, not float32",
    ),
    "unquantised rows": (HOPPER, lambda: gemm(rows(), weight(FP8Block)), BackendUnavailable, "quantise the rows"),
    "MXFP8 on Hopper": (
        HOPPER,
        lambda: gemm(rows(fmt=MXFP8), weight(MXFP8)),
        BackendUnavailable,
        r"sm_90a has no DeepGEMM kernel for MXFP8 weights.*load_moe\(..., weights=jaxmoe.FP8Block\)",
    ),
    "FP8Block on Blackwell": (
        BLACKWELL,
        lambda: gemm(rows(fmt=FP8Block), weight(FP8Block)),
        BackendUnavailable,
        r"load_moe\(..., weights=jaxmoe.FP8BlockUE8M0\)",
    ),
    "capacity": (
        HOPPER,
        lambda: gemm(rows("masked", m=96, alignment=32), weight()),
        BackendUnavailable,
        "capacity m of an expert is 96, not a multiple of BLOCK_M (64|128).*; pad m to 128",
    ),
    "alignment 96": (
        HOPPER,
        lambda: gemm(rows(m=192, alignment=96), weight()),
        BackendUnavailable,
        "BLOCK_M is 96; .* 64 or 128",
    ),
    "alignment 8": (HOPPER, lambda: gemm(rows(alignment=8), weight()), BackendUnavailable, "mk_alignment is 8"),
    "odd SMs": (HOPPER, lambda: gemm(rows(), weight(), num_sms=131), ShapeError, "num_sms is 131; .* even"),
    "no SMs": (HOPPER, lambda: gemm(rows(), weight(), num_sms=0), ShapeError, "num_sms is 0"),
    "negative expected_m": (HOPPER, lambda: gemm(rows(), weight(), expected_m=-1), ShapeError, "expected_m is -1"),
    "K": (
        HOPPER,
        lambda: gemm(rows(k=96), weight(k=96)),
        BackendUnavailable,
        "k is 96, not a multiple of 64 .* pad k to 128",
    ),
    "N": (
        HOPPER,
        lambda: gemm(rows(), weight(n=100)),
        BackendUnavailable,
        "n is 100, not a multiple of 8 .* pad n to 104",
    ),
    "large coordinates": (
        HOPPER,
        lambda: jax.eval_shape(
            lambda x, w: gemm(rows().with_rows(x), GroupedWeight(w, None, BF16, 64)),
            jax.ShapeDtypeStruct((2**31, 64), jnp.bfloat16),
            jax.ShapeDtypeStruct((E, 64, 64), jnp.bfloat16),
        ),
        BackendUnavailable,
        "rows of a: 2147483648 is not below",
    ),
    "f32 output of dense fp8 on Hopper": (
        HOPPER,
        lambda: dense_gemm(rows(fmt=FP8Block).rows, weight(FP8Block, e=1), out_dtype=jnp.float32, backend="deepgemm"),
        BackendUnavailable,
        "float32 output is for dense bf16, and dense on sm_100; take bf16",
    ),
    "prenorm on Hopper": (
        HOPPER,
        lambda: prenorm_gemm(bf16(8, 64), jnp.zeros((24, 64), jnp.float32), backend="deepgemm"),
        BackendUnavailable,
        "SM90 prenorm kernel .* use plain JAX",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_and_the_next_call_works(launches, case):
    arch, call, error, message = REFUSALS[case]
    with target(arch):
        with pytest.raises(error, match=message):
            call()
        assert launches() == []
        jax.block_until_ready(jax.jit(gemm)(rows(), weight()))
    assert len(launches()) == 1


def test_missing_kernel_and_no_compiler_names_warmup(standin, monkeypatch):
    def find_toolchain(memo_dir=None, package="deep_gemm"):
        raise BackendUnavailable("libnvrtc cannot be loaded (not there); run: pip install it")

    monkeypatch.setattr(jit, "find_toolchain", find_toolchain)
    assert cubin_cache.records() == []
    with (
        target(HOPPER),
        pytest.raises(BackendUnavailable, match=r"(?s)cannot be compiled here: libnvrtc.*`jaxmoe warmup`"),
    ):
        gemm(rows(k=192), weight(k=192))


def test_alignment_that_users_ask_for():
    assert row_alignment("deepgemm") == row_alignment(("deepgemm", "reference")) == 128
    assert row_alignment() == row_alignment("reference") == 8
    with target(HOPPER):
        assert row_alignment() == ops.mk_alignment() == ops.mk_alignment(theoretical=True) == 128
    assert ops.mk_alignment(BLACKWELL) == 128
    asked = [ops.mk_alignment(BLACKWELL, m, theoretical=True) for m in (0, 1, 33, 128, 1000)]
    assert asked == [224, 32, 64, 128, 224]
    with pytest.raises(BackendUnavailable, match="platform 'cpu'"):
        ops.mk_alignment()


def test_formats_to_load_weights_in():
    every = (BF16, FP8Block, FP8BlockUE8M0, MXFP8, MXFP4)
    assert [ops.kernel_format(fmt, HOPPER) for fmt in every] == [BF16, *[FP8Block] * 4]
    assert [ops.kernel_format(fmt, BLACKWELL) for fmt in every] == [BF16, *[FP8BlockUE8M0] * 2, MXFP8, MXFP4]
    with target(HOPPER):
        assert ops.kernel_format(MXFP4) == FP8Block
    assert ops.kernel_format(MXFP4) == MXFP4, "the reference takes what there is"


@pytest.mark.parametrize("layout", ["psum", "contiguous"])
@pytest.mark.parametrize("alignment", [32, 64, 96, 128, 160, 192, 224])
def test_theoretical_alignments_run_on_blackwell(kernels, launches, layout, alignment):
    with target(BLACKWELL):
        jax.block_until_ready(gemm(rows(layout, MXFP4, m=2 * alignment, alignment=alignment), weight(MXFP4)))
    assert len(launches()) == 1


def test_layer_activations_reach_the_kernels(kernels):
    """A clamped, biased layer of gpt-oss's kind lowers to two kernels as well."""
    router = RouterConfig(num_experts=4, top_k=2)
    config = MoEConfig(
        hidden=128,
        intermediate=128,
        router=router,
        weights=BF16,
        activation=Activation(kind="oai", limit=7.0),
        expert_bias=True,
    )
    zeros = jnp.zeros((4, 128), jnp.float32)
    params = make_params(
        config,
        gate=bf16(4, 128, 128),
        up=bf16(4, 128, 128),
        down=bf16(4, 128, 128),
        gate_bias=zeros,
        up_bias=zeros,
        down_bias=zeros,
    )
    with target(HOPPER):
        text = lowered(lambda p, x: jaxmoe.moe(p, x, config, Execution(layout="masked")), params, bf16(8, 128))
    assert [name for name in calls(text) if "grouped" in name] == ["jaxmoe_sm90_bf16_m_grouped_masked"] * 2


def test_formats_that_do_not_fit_together_are_wrong_input(kernels):
    with target(HOPPER), pytest.raises(FormatError, match="quantise them as"):
        gemm(rows(fmt=MXFP8), weight(FP8Block))
