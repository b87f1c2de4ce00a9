"""Sizes, sources and launches of DeepEP's kernels against the figures measured and computed elsewhere."""

from __future__ import annotations

import re
import struct

import jax.numpy as jnp
import pytest

from jaxmoe.cuda import jit
from jaxmoe.cuda.deepep import specs
from jaxmoe.cuda.deepep.sizes import SMEM, Sizes, Wire, combine_wire, result_shapes, suggested_sms
from jaxmoe.cuda.launch import Integer, PeerField, Pointer, Struct, encode
from jaxmoe.errors import ShapeError

ROW = Wire(jnp.bfloat16, 7168)
FP8 = Wire(jnp.float8_e4m3fn, 7168, jnp.float32, 56)
MODES: tuple[specs.Mode, ...] = ("plain", "given", "again")


def sizes(ranks: int = 2, **changes) -> Sizes:
    return Sizes(**{"ranks": ranks, "tokens": 4096, "hidden": 7168, "experts": 64, "top_k": 8} | changes)


def test_records_buffers_and_warps():
    """Figures of DeepEP's own host code for H = 7168, K = 8."""
    two, eight = sizes(), sizes(8, experts=256)
    assert two.dispatch_record(ROW) == 14_464 and two.dispatch_record(FP8) == 7_520 and two.combine_record == 14_400
    assert two.received * two.dispatch_record(ROW) == 118_489_088
    assert two.data_bytes(ROW) == 57 << 21 and eight.data_bytes(ROW) == 226 << 21
    assert two.data_bytes(FP8) == two.data_bytes(ROW)  # gradients travel as bf16
    assert two.dispatch_warps(ROW, notify=True) == 16 and eight.dispatch_warps(ROW, notify=True) == 15
    assert two.dispatch_warps(FP8, notify=True) == 28 and two.dispatch_warps(ROW, notify=False) == 16
    assert (two.copy_warps(ROW), two.copy_warps(FP8), two.combine_warps, two.reduce_warps) == (16, 30, 16, 16)


def test_rows_that_may_arrive():
    s = sizes(8, experts=256, tokens=100)
    assert s.received == 800 and s.expanded == 10_496  # 800·8 + 127·32, rounded up to 128
    few = sizes(8, experts=8, tokens=100, alignment=16)
    assert few.local_experts == 1 and few.expanded == 816  # one row each, whatever K
    assert (sizes(2).slots, sizes(16, experts=64).slots) == (2, 8)


@pytest.mark.parametrize("ranks, experts, sms", [(1, 64, 64), (2, 64, 64), (8, 256, 64)])
def test_suggested_sms(ranks, experts, sms):
    assert suggested_sms(sizes(ranks, experts=experts)) == sms
    assert suggested_sms(sizes(ranks, experts=experts), available=20) == 20
    assert suggested_sms(sizes(), link=4e12) == 132


def test_the_proven_instantiations():
    """Those that ran on two H200s, by their template arguments."""
    s = sizes(num_sms=24)
    call = specs.dispatch("sm_90a", s, ROW, 3, 4096, mode="plain", expand=True)
    codes = [source.code for source, _ in call.launches]
    assert "dispatch_impl<true, false, false, 24, 4, 16, 2, 14336, 0, 4096, 64, 8, 128, 1, 200000000000ll>" in codes[0]
    copy = "dispatch_copy_epilogue_impl<true, false, false, 132, 1, 16, 1, 2, 14336, 0, 4096, 64, 8, 128>"
    assert copy in codes[1]
    call = specs.combine("sm_90a", s, 3, 4096, expand=True)
    codes = [source.code for source, _ in call.launches]
    assert "combine_impl<true, true, true, 24, 16, 2, 7168, 4096, 64, 8, 1, 200000000000ll>" in codes[0]
    assert "combine_reduce_epilogue_impl<true, true, 132, 16, 1, 2, 7168, 4096, 64, 8>" in codes[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("wire", [ROW, FP8], ids=["bf16", "fp8"])
def test_launches(wire, expand, mode):
    s = sizes(num_sms=23)
    call = specs.dispatch("sm_90a", s, wire, 3, 101, mode=mode, expand=expand)
    assert len(encode([spec for _, spec in call.launches], call.name)) > 100
    (_, send), (_, copy) = call.launches
    assert (len(send.params), len(copy.params)) == (19, 16)
    assert send.cooperative and not send.pdl and send.cluster == 1 and send.grid == (23, 1, 1)
    assert copy.pdl and not copy.cooperative and copy.grid == (132, 1, 1)
    assert send.dynamic_smem == copy.dynamic_smem == SMEM
    assert send.params[10:13] == (Integer(101), Integer(1), Integer(104))
    assert copy.params[11] == Integer(2 * 4096)  # the kernel then takes the number of rows from the device
    comm = send.params[13]
    assert isinstance(comm, Struct) and len(comm.data) == 20 and [p for p, _ in comm.peers] == [0, 8]
    assert send.params[14] == PeerField(3, "window") and send.params[18] == PeerField(3, "rank")
    shapes = result_shapes(s, wire, expand=expand)
    rows = s.expanded if expand else 8192
    assert shapes["rows"].shape == (rows, 7168) and call.results["rows"].dtype == wire.dtype
    assert ("row_scales" in call.results) == (wire is FP8) and ("row_ids" in call.results) == (not expand)
    assert ("slots" in call.results) == (mode == "plain") and ("slots" in call.arguments) == (mode != "plain")
    assert ("metadata" in call.results) == (mode != "again")
    assert ("metadata" in call.arguments) == (mode == "again" and expand)
    # what the first kernel writes, the second reads in the same place
    assert send.params[6] == copy.params[2]
    assert isinstance(copy.params[3], Pointer)
    assert (copy.params[3].buffer is not None) == (expand and mode != "again")


def test_tokens_that_do_not_fit():
    for tokens in (0, 4097):
        with pytest.raises(ShapeError, match=rf"{tokens} tokens per rank; the buffer is for 1 to 4096"):
            specs.dispatch("sm_90a", sizes(), ROW, 1, tokens, mode="given", expand=False)
        with pytest.raises(ShapeError, match="make the EpContext with tokens"):
            specs.combine("sm_90a", sizes(), 1, tokens, expand=False)
    with pytest.raises(ShapeError, match=r"rows of 72 .* have 144 bytes; the kernels move multiples of 32"):
        Wire(jnp.bfloat16, 72)


def test_combine_tells_a_barrier_of_the_bytes_before_they_are_fetched(deep_ep_toolchain):
    """In both loops over rows; the other order ended in illegal addresses on an H200."""
    ((name, text),) = deep_ep_toolchain.headers.overrides
    assert name == "deep_ep/impls/combine.cuh"
    asked = re.findall(r"ptx::(mbarrier_arrive_and_set_tx|tma_load_1d|mbarrier_wait_and_flip_phase)\(", text)
    assert asked == ["mbarrier_arrive_and_set_tx", "tma_load_1d", "mbarrier_wait_and_flip_phase"] * 2


def test_gather_is_one_block_of_a_launch_that_any_other_may_run_beside():
    s = sizes(8)
    call = specs.gather("sm_90a", s, 3, 101)
    ((source, spec),) = call.launches
    assert (spec.grid, spec.block, spec.cooperative, spec.dynamic_smem) == ((1, 1, 1), (1024, 1, 1), False, 0)
    assert call.results["all_ids"].shape == (8, 101, 8) and spec.params[2] == Integer(101 * 8)
    assert "jaxmoe_gather_ids<8, 200000000000ll>" in source.code and source.package == "deep_ep"
    # what all ranks send fits into the place of the records
    assert 4 * s.received * s.top_k <= s.data_bytes(ROW)
    with pytest.raises(ShapeError, match="4097 tokens per rank"):
        specs.gather("sm_90a", s, 1, 4097)


def calls(arch: str, ranks: int, wire: Wire) -> list[specs.Call]:
    s = sizes(ranks, tokens=512, num_sms=24)
    found = [
        specs.dispatch(arch, s, wire, 1, 7, mode=mode, expand=expand) for mode in MODES for expand in (False, True)
    ]
    found += [specs.combine(arch, s, 1, 7, expand=expand) for expand in (False, True)]
    return [*found, specs.gather(arch, s, 1, 7)]


def parameter_bytes(cubin: bytes) -> list[int]:
    """Sizes of the kernel's parameters, from the attributes in its ELF section ``.nv.info.<kernel>``."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    strings = sections[names][4]
    found = {}
    for name, _, _, _, offset, length in sections:
        if not cubin[strings + name :].startswith(b".nv.info."):
            continue
        at = offset
        while at < offset + length:
            form, attribute, extent = struct.unpack_from("<BBH", cubin, at)
            if (form, attribute) == (4, 0x17):  # EIATTR_KPARAM_INFO
                _, ordinal, _, packed = struct.unpack_from("<IHHI", cubin, at + 4)
                found[ordinal] = packed >> 18
            at += 4 + (extent if form == 4 else 0)
    return [found[i] for i in range(len(found))]


def check_parameters(call: specs.Call, cubins: dict) -> None:
    """What the launch passes has the sizes that the compiled kernel takes."""
    for source, spec in call.launches:
        (name,) = jit.kernel_names(cubins[source])
        assert re.findall(r"\(void\)&(\w+)<", source.code)[0] in name
        passed = []
        for param in spec.params:
            if isinstance(param, Struct):
                passed.append(len(param.data))
            else:
                number = isinstance(param, Integer) or (isinstance(param, PeerField) and param.field == "rank")
                passed.append(4 if number else 8)
        assert parameter_bytes(cubins[source]) == passed, source.name


def test_one_of_each_kernel_compiles(deep_ep_toolchain):
    s = sizes(tokens=512, num_sms=24)
    pair = (
        specs.dispatch("sm_90a", s, FP8, 1, 7, mode="given", expand=False),
        specs.combine("sm_90a", s, 1, 7, expand=True),
        specs.gather("sm_90a", s, 1, 7),
    )
    sources = [source for call in pair for source, _ in call.launches]
    cubins = dict(jit.compile_many(sources, toolchain=deep_ep_toolchain))
    assert len(cubins) == 5
    for call in pair:
        check_parameters(call, cubins)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_kernel_compiles(deep_ep_toolchain, ranks, arch):
    packed = Wire(jnp.float8_e4m3fn, 7168, jnp.int32, 14)
    wanted = [call for wire in (combine_wire(7168), FP8, packed) for call in calls(arch, ranks, wire)]
    sources = list(dict.fromkeys(source for call in wanted for source, _ in call.launches))
    cubins = dict(jit.compile_many(sources, toolchain=deep_ep_toolchain))
    for call in wanted:
        check_parameters(call, cubins)
