"""The list of a layer's kernels, and that it is what the layer launches, forward and differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.config import Execution, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.cuda import ffi
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.deepgemm import call, zero
from jaxmoe.cuda.source import KernelSource
from jaxmoe.cuda.target import target
from jaxmoe.errors import FormatError
from jaxmoe.layer.kernels import kernels_for
from jaxmoe.layer.params import ExpertWeights, MoEParams, RouterParams, SharedParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.ops import grouped_gemm
from jaxmoe.ops.grouped_gemm import deepgemm
from jaxmoe.ops.permute import cuda as places
from jaxmoe.quant.formats import BF16, MXFP4, MXFP8, FP8Block
from jaxmoe.quant.tensors import GroupedWeight, scales_like

H200, B200 = Arch("sm_90a", 132), Arch("sm_100f", 148)


def config(**changes) -> MoEConfig:
    sizes = {"hidden": 512, "intermediate": 256, "router": RouterConfig(num_experts=8, top_k=2), "weights": FP8Block}
    return MoEConfig(**(sizes | changes))


def gemms(kernels) -> list:
    """Those among a layer's kernels that multiply; the others move rows."""
    return [kernel for kernel in kernels if "grouped" in kernel.name or "dense" in kernel.name]


def shapes(kernels) -> list[tuple[int, int, int]]:
    """(groups, n, k) of sm90_fp8_gemm_1d2d sources."""
    found = []
    for kernel in gemms(kernels):
        arguments = kernel.code.split("<")[2].split(", ")
        found.append((int(arguments[4]), int(arguments[2]), int(arguments[3])))
    return found


def test_a_layer_has_two_gemms():
    assert shapes(kernels_for(config(), H200, [128])) == [(8, 512, 512), (8, 512, 256)]


def test_shared_experts_add_a_dense_kernel_for_any_size_or_widen_the_stack():
    apart = config(shared=SharedExperts(intermediate=384))
    assert shapes(kernels_for(apart, H200, [128])) == [(8, 512, 512), (8, 512, 256), (1, 0, 0)]
    fused = config(shared=SharedExperts(intermediate=256, fused=True))
    assert shapes(kernels_for(fused, H200, [128])) == [(9, 512, 512), (9, 512, 256)]


def test_partial_blocks_are_padded_as_they_are_stored():
    odd = config(hidden=2880, intermediate=2880, partial_blocks=True)
    assert shapes(kernels_for(odd, H200, [128])) == [(8, 5888, 2944), (8, 2880, 2944)]
    (up, _) = gemms(kernels_for(config(hidden=2880, intermediate=2880, weights=BF16), H200, [128]))
    assert "0, 5760, 2880, 8," in up.code


def test_no_kernel_is_listed_twice_and_no_tokens_need_none():
    once = kernels_for(config(), H200, [4096])
    assert kernels_for(config(), H200, [4096, 4096]) == once
    assert kernels_for(config(), H200, [0]) == []


@pytest.mark.parametrize(
    "layout, name", [("psum", "PsumLayout"), ("masked", "Masked"), ("contiguous", "MGroupedContiguous,")]
)
def test_the_layout_is_compiled_in(layout, name):
    kernels = gemms(kernels_for(config(), H200, [64], Execution(layout=layout)))
    assert len(kernels) == 2 and all(name in kernel.code and kernel.arch == "sm_90a" for kernel in kernels)


def weight(fmt, e: int, n: int, k: int) -> GroupedWeight:
    """A stack of matrices without numbers."""
    stored = -(-k // fmt.k_multiple) * fmt.k_multiple
    values = jax.ShapeDtypeStruct(
        (e, n, stored * fmt.bits // 8 if fmt.bits == 4 else stored),
        {16: jnp.bfloat16, 8: jnp.float8_e4m3fn, 4: jnp.uint8}[fmt.bits],
    )
    return GroupedWeight(values, scales_like(fmt, e, n, stored), fmt, k)  # type: ignore[arg-type]


def experts(fmt, e: int, hidden: int, inter: int) -> ExpertWeights:
    stored = -(-inter // fmt.k_multiple) * fmt.k_multiple
    return ExpertWeights(weight(fmt, e, 2 * stored, hidden), weight(fmt, e, hidden, inter))


@pytest.fixture
def launched(monkeypatch) -> Callable[..., set[KernelSource]]:
    """Traces a layer of 200 tokens for a GPU, differentiated or not; the kernels that it asks for."""
    asked = []

    def run_kernels(planned, args, results, **options):
        asked.extend(source for source, _ in planned)
        return tuple(jnp.zeros(result.shape, result.dtype) for result in results)

    monkeypatch.setattr(call, "run_kernels", run_kernels)
    monkeypatch.setattr(zero, "run_kernels", run_kernels)
    monkeypatch.setattr(places, "run_kernel", lambda planned, *operands: run_kernels([planned], *operands))
    monkeypatch.setattr(ffi, "library", lambda: None)
    monkeypatch.setitem(grouped_gemm.BACKENDS, "deepgemm", deepgemm.grouped_gemm)

    def trace(layer: MoEConfig, gpu: Arch, gradients: bool, **options: Any) -> set[KernelSource]:
        jax.clear_caches()  # a GEMM traced before would not be seen again
        asked.clear()
        assert layer.shared is not None
        # On a CPU the alignment must be asked for; on a GPU it is this one.
        execution, e, h = Execution(row_alignment=128, **options), layer.router.num_experts, layer.hidden
        shared = SharedParams(experts(layer.shared_format, 1, h, layer.shared.intermediate))
        stack = experts(layer.weights, e, h, layer.intermediate)
        params = MoEParams(RouterParams(jax.ShapeDtypeStruct((h, e), jnp.float32)), stack, shared)

        def loss(p: MoEParams, x: jax.Array) -> jax.Array:
            return moe(p, x, layer, execution).astype(jnp.float32).sum()

        def of_rows(p: MoEParams, x: jax.Array) -> Any:
            return jax.grad(loss, argnums=1 if layer.weights.quantized else (0, 1))(p, x)

        with target(gpu):
            jax.eval_shape(of_rows if gradients else loss, params, jax.ShapeDtypeStruct((200, h), jnp.bfloat16))
        return set(asked)

    return trace


@pytest.mark.parametrize("layout", ["psum", "masked", "contiguous"])
@pytest.mark.parametrize(
    "fmt, gpu, hidden", [(BF16, H200, 2880), (FP8Block, H200, 2880), (BF16, B200, 512), (MXFP4, B200, 512)]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_list_is_what_the_layer_launches(launched, fmt, gpu, hidden, layout, deterministic):
    layer = config(hidden=hidden, weights=fmt, shared=SharedExperts(intermediate=384), partial_blocks=True)
    found = launched(layer, gpu, False, layout=layout, deterministic=deterministic)
    assert len(gemms(found)) >= (2 if deterministic else 3)
    assert found == set(kernels_for(layer, gpu, [200], Execution(layout=layout, deterministic=deterministic)))


@pytest.mark.parametrize("layout", ["psum", "masked", "contiguous"])
@pytest.mark.parametrize(
    "fmt, forward, gpu, intermediate",
    [
        (BF16, None, H200, 256),
        (BF16, FP8Block, H200, 256),
        (BF16, FP8Block, H200, 192),
        (FP8Block, FP8Block, H200, 192),
        (BF16, MXFP4, B200, 256),
        (MXFP4, MXFP8, B200, 192),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_list_is_what_training_launches(launched, fmt, forward, gpu, intermediate, layout, deterministic):
    """FP8 forward and bf16 backward: kernels of both, and forward alone where nothing is differentiated."""
    shared = SharedExperts(intermediate=384)
    layer = config(weights=fmt, intermediate=intermediate, shared=shared, partial_blocks=True)
    options = {"layout": layout, "deterministic": deterministic, "forward_format": forward}
    for gradients in (False, True):
        listed = kernels_for(layer, gpu, [200], Execution(**options), gradients=gradients)
        assert launched(layer, gpu, gradients, **options) == set(listed)


def test_a_forward_format_is_for_training():
    straight, layer = Execution(forward_format=FP8Block), config(weights=BF16)
    both = kernels_for(layer, H200, [64], straight)
    assert both == kernels_for(layer, H200, [64], straight, gradients=True)
    names = [kernel.name for kernel in gemms(both)]
    assert names == ["sm90_fp8_1d2d_m_grouped_masked"] * 2 + ["sm90_bf16_m_grouped_masked"] * 4
    assert set(kernels_for(layer, H200, [64])) < set(kernels_for(layer, H200, [64], gradients=True))
    with pytest.raises(FormatError, match=r"FP8Block have no gradient; train with Execution\(forward_format"):
        kernels_for(config(), H200, [64], gradients=True)


def test_a_format_without_kernels_is_refused():
    with pytest.raises(NotImplementedError, match="MXFP4"):
        kernels_for(config(weights=MXFP4), H200, [64])
