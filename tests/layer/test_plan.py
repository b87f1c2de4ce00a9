from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.config import Execution, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.cuda.arch import Arch
from jaxmoe.layer.kernels import kernels_for
from jaxmoe.layer.layout import choose_layout
from jaxmoe.layer.plan import Plan, plan
from jaxmoe.layer.roofline import GPUS, weight_bytes
from jaxmoe.ops import grouped_gemm
from jaxmoe.ops.permute import buffer_rows, group_tokens
from jaxmoe.ops.quantize import quantize
from jaxmoe.quant.formats import BF16, FORMATS, MXFP4, MXFP8, FP8Block
from jaxmoe.quant.weights import quantize_weight

DEEPSEEK_V3 = MoEConfig(
    hidden=7168,
    intermediate=2048,
    router=RouterConfig(num_experts=256, top_k=8),
    weights=FP8Block,
    shared=SharedExperts(intermediate=2048),
)


def stages(p: Plan) -> dict:
    return {stage.name: stage for stage in p.stages}


def test_layout_is_the_one_the_pipeline_takes():
    p = plan(DEEPSEEK_V3, 4096, device="H200")
    assert (p.layout, p.layout_reason) == choose_layout(Execution(), 4096, 8, 256, alignment=128)
    assert p.layout_reason != "asked for"
    p = plan(DEEPSEEK_V3, 4096, Execution(layout="contiguous"), device="H200")
    assert (p.layout, p.layout_reason) == ("contiguous", "asked for")


def test_rows_hold_the_worst_routing():
    # Brute force: whatever way the assignments fall to the experts, aligned starts fit into the capacity.
    for experts, assignments, alignment in itertools.product((1, 2, 3), range(7), (1, 2, 4)):
        worst = 0
        for counts in itertools.product(range(assignments + 1), repeat=experts):
            if sum(counts) == assignments:
                worst = max(worst, sum(-(-c // alignment) * alignment for c in counts))
        capacity = buffer_rows("psum", 1, assignments, experts, alignment, None)
        assert worst <= capacity < assignments + (min(experts, assignments) + 1) * alignment
        assert capacity % alignment == 0


def test_masked_rows_are_tokens_per_expert():
    masked = functools.partial(Execution, layout="masked")
    assert plan(DEEPSEEK_V3, 100, masked(), device="H200").capacity == 256 * 128
    assert plan(DEEPSEEK_V3, 100, masked(masked_capacity=200), device="H200").capacity == 256 * 256
    with pytest.raises(ValueError, match="masked_capacity 99 is below the 100 tokens"):
        plan(DEEPSEEK_V3, 100, masked(masked_capacity=99))


@pytest.mark.parametrize("layout", ["psum", "contiguous", "masked"])
def test_capacity_is_that_of_the_grouped_rows(layout):
    ids = jnp.zeros((13, 3), jnp.int32)
    grouping = group_tokens(ids, 5, layout=layout, alignment=8)
    assert grouping.source.shape[0] == buffer_rows(layout, 13, 39, 5, 8, None)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_weight_bytes_are_those_of_the_stored_arrays(fmt):
    w = jnp.ones((2, 130 if not fmt.quantized or fmt.block_n == 1 else 256, 256), jnp.float32)
    stored = quantize_weight(w.astype(jnp.bfloat16), fmt)
    values, scales = weight_bytes(fmt, *w.shape)
    assert values == stored.values.nbytes
    assert scales == (0 if stored.scales is None else stored.scales.nbytes)


@pytest.mark.parametrize("fmt", [FP8Block, MXFP8, MXFP4], ids=str)
def test_row_bytes_are_those_of_the_quantised_rows(fmt):
    config = MoEConfig(hidden=384, intermediate=128, router=RouterConfig(num_experts=8, top_k=2), weights=fmt)
    p = plan(config, 16)
    rows = jax.eval_shape(lambda: quantize(jnp.zeros((p.capacity, 384), jnp.bfloat16), fmt.activation))
    assert p.memory.rows == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(rows))


def test_known_counts_of_deepseek_v3():
    p = plan(DEEPSEEK_V3, 4096, device="H200")
    routed, shared = 6 * 4096 * 8 * 7168 * 2048, 6 * 4096 * 7168 * 2048
    s = stages(p)
    assert s["gemm1"].flops + s["gemm2"].flops == routed
    assert s["shared"].flops == shared
    assert s["router"].flops == 2 * 4096 * 7168 * 256
    assert p.memory.weights == 257 * 3 * 7168 * 2048
    assert p.memory.scales == 257 * 3 * 4 * 7168 * 2048 // 128**2
    assert p.memory.peak > p.memory.weights + p.memory.scales + p.memory.router


def test_time_is_the_longer_of_arithmetic_and_traffic():
    p = plan(DEEPSEEK_V3, 32768, device="H200")
    gemm1 = stages(p)["gemm1"]
    assert gemm1.bound == "compute" and gemm1.seconds == pytest.approx(gemm1.flops / 1320e12)
    gather = stages(p)["pre_permute"]
    assert gather.bound == "memory" and gather.seconds == pytest.approx(gather.bytes / 4300e9)
    assert p.seconds == pytest.approx(sum(stage.seconds for stage in p.stages))
    assert p.bound == "compute"
    assert plan(DEEPSEEK_V3, 8, device="H200").bound == "memory"


def test_a_decode_step_reads_only_the_experts_it_reaches():
    # One token: exactly its K experts. Many: all.
    assert plan(DEEPSEEK_V3, 1).touched_experts == 8
    assert plan(DEEPSEEK_V3, 4096).touched_experts == 256
    one = stages(plan(DEEPSEEK_V3, 1, device="H200"))["gemm1"]
    assert one.bytes == pytest.approx(8 * 2 * 2048 * 7168, rel=0.01)


def test_unquantised_rows_run_at_the_bf16_rate():
    exact = plan(DEEPSEEK_V3, 32768, Execution(quantize_activations=False), device="H200")
    gemm1 = stages(exact)["gemm1"]
    assert gemm1.seconds == pytest.approx(gemm1.flops / 790e12)


def test_no_tokens():
    p = plan(DEEPSEEK_V3, 0, device="H200")
    assert (p.assignments, p.touched_experts) == (0, 0)
    assert plan(DEEPSEEK_V3, 0, Execution(layout="psum")).capacity == 0
    assert "0 tokens" in str(p)


def test_on_cpu_it_says_reference_and_gives_no_time():
    p = plan(DEEPSEEK_V3, 64)
    assert p.backend == "reference" and p.gpu is None and p.seconds is None and p.bound is None
    assert "no estimate" in str(p)


@pytest.mark.parametrize("name", GPUS)
def test_text_answers_what_why_bytes_time_and_bound(name):
    text = str(plan(DEEPSEEK_V3, 4096, device=name))
    for part in ("psum", "in use", "GB at the peak", "ms at best on " + name, "bound by", GPUS[name].source):
        assert part in text
    assert max(map(len, text.splitlines())) <= 120


def test_unknown_gpu_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'B300'.*'H200', 'H100', 'B200'"):
        plan(DEEPSEEK_V3, 64, device="B300")


@pytest.mark.parametrize("tokens", [-1, 2.0, True])
def test_bad_token_count(tokens):
    with pytest.raises(ValueError, match="tokens is"):
        plan(DEEPSEEK_V3, tokens)


def test_unknown_backend():
    with pytest.raises(ValueError, match="'cutlass'"):
        plan(DEEPSEEK_V3, 64, Execution(backend="cutlass"))


def test_kernels_are_those_that_are_compiled_or_the_reason_why_not(monkeypatch):
    monkeypatch.setitem(grouped_gemm.BACKENDS, "deepgemm", lambda *a, **k: None)

    def deepgemm(*args, device, **kwargs):
        p = plan(*args, device=device, **kwargs)
        return p.backend, dict(p.kernels)["deepgemm"]

    backend, names = deepgemm(DEEPSEEK_V3, 4096, device="H200")
    kernels = kernels_for(DEEPSEEK_V3, Arch("sm_90a", 132), [4096])
    assert backend == "deepgemm" and names == ", ".join(dict.fromkeys(kernel.name for kernel in kernels))
    assert "sm90" in names and "psum" in names
    packed = MoEConfig(hidden=256, intermediate=128, router=RouterConfig(num_experts=8, top_k=2), weights=MXFP4)
    backend, reason = deepgemm(packed, 4096, device="H200")
    assert backend == "reference" and reason.startswith("cannot: ") and "MXFP4" in reason
    assert deepgemm(packed, 4096, device="B200")[0] == "deepgemm"
    assert "quantised rows only" in deepgemm(packed, 16, Execution(quantize_activations=False), device="B200")[1]
    assert "bfloat16 only" in deepgemm(packed, 16, device="B200", itemsize=4)[1]
    assert "nothing" in deepgemm(packed, 0, device="B200")[1]
    p = plan(packed, 4096, Execution(backend="deepgemm"), device="H200")
    assert p.backend == "none" and "cannot" in p.backend_reason


def test_a_quantised_forward_is_planned_and_the_backward_pass_is_named():
    """BF16 experts: memory and work are those of an FP8 layer, and of making it from weights that stay."""
    masters = dataclasses.replace(DEEPSEEK_V3, weights=BF16)
    straight = plan(masters, 4096, Execution(forward_format=FP8Block), device="H200")
    fp8, bf16 = plan(DEEPSEEK_V3, 4096, device="H200"), plan(masters, 4096, device="H200")
    quantise, *rooms = straight.stages
    assert rooms == list(fp8.stages) and quantise.name == "weights"
    copies = fp8.memory.weights + fp8.memory.scales
    assert quantise.bytes == bf16.memory.weights + copies
    assert straight.memory.weights + straight.memory.scales == bf16.memory.weights + copies
    assert straight.memory.peak - fp8.memory.peak == bf16.memory.weights
    forward, backward = dict(straight.kernels)["deepgemm"].split("; ")
    assert forward == "forward " + dict(fp8.kernels)["deepgemm"]
    sources = kernels_for(masters, Arch("sm_90a", 132), [4096], gradients=True)
    assert backward == "backward " + ", ".join(dict.fromkeys(source.name for source in sources))
    assert "k_grouped" in backward and "k_grouped" not in str(bf16)
    text = str(straight)
    assert "below are of this pass alone" in text and "backward  experts unquantised" in text
    assert "this pass alone" not in str(fp8)
    # What is quantised already is not copied.
    kept = plan(DEEPSEEK_V3, 4096, Execution(forward_format=FP8Block), device="H200")
    assert (kept.stages, kept.memory) == (fp8.stages, fp8.memory) and "backward  experts dequantised" in str(kept)


def test_fused_shared_experts_are_slots():
    shared = SharedExperts(intermediate=256, fused=True)
    config = MoEConfig(
        hidden=256, intermediate=128, router=RouterConfig(num_experts=8, top_k=2), weights=BF16, shared=shared
    )
    p = plan(config, 16)
    assert p.assignments == 16 * (2 + 2)
    assert "shared" not in stages(p)
    assert p.memory.weights == 10 * 3 * 256 * 128 * 2
