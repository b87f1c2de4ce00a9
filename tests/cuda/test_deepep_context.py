"""EpContext on the recording driver: memory, tables, peers, launches under shard_map, refusals, closing."""

from __future__ import annotations

import dataclasses
import json
import struct
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxmoe.cuda import arch as arches
from jaxmoe.cuda import cubin_cache, driver
from jaxmoe.cuda.deepep.sizes import DATA_OFFSET, SMEM, TABLE_OFFSET
from jaxmoe.dispatch.deepep import DeepEP, EpContext, peers
from jaxmoe.errors import BackendUnavailable, EpFailure, FormatError, ShapeError
from jaxmoe.quant.formats import BF16, FP8Block

SIZES = {"tokens": 16, "hidden": 256, "num_experts": 8, "top_k": 2}
PARAMETER_BYTES = {
    "dispatch_copy_epilogue": (8,) * 11 + (4,) * 5,
    "dispatch": (8,) * 10 + (4, 4, 4, 20, 8, 8, 8, 8, 4),
    "combine_reduce_epilogue": (8,) * 6 + (4,) * 3,
    "combine": (8,) * 4 + (20, 8, 8, 8, 4, 4),
    "gather_ids": (8, 8, 4, 20, 8, 8, 8, 4),
}
COOPERATIVE, CLUSTER, PDL = "2", "4", "6"


@pytest.fixture
def gpus(standin, monkeypatch):
    """Virtual CPU devices that pass for H200s, on the recording driver; kernels compile to images of their kind."""
    text = str(standin.driver._name)
    monkeypatch.setenv("JAXMOE_LIBCUDA", text)
    driver._load.cache_clear()
    monkeypatch.setattr(arches, "detect", lambda device=None: arches.Arch("sm_90a", 132))

    def ensure(sources):
        keys = {}
        for source in sources:
            kind = next(k for k in PARAMETER_BYTES if source.name.startswith(f"deepep_{k}_r"))
            keys[source] = standin.cubin(*PARAMETER_BYTES[kind], key=f"deepep_{kind}")
        return keys

    monkeypatch.setattr(cubin_cache, "ensure", ensure)
    yield standin
    driver._load.cache_clear()


def mesh_of(*shape: int, names: str = "d") -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[: int(np.prod(shape))]).reshape(shape), tuple(names))


def words(address: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}Q", driver.driver().read(0, address, 8 * count))


def test_buffers_are_allocated_and_each_knows_all_others(gpus):
    with EpContext(mesh_of(4), "d", **SIZES) as context:
        made = gpus.calls("cuMemAlloc_v2")
        assert [c["device"] for c in made] == [0, 1, 2, 3]
        assert {c["bytes"] for c in made} == {context.sizes.buffer_bytes(context.wire)}
        starts = [c["address"] for c in made]
        for start in starts:
            assert words(start + TABLE_OFFSET, 4) == tuple(starts)
            assert words(start, 9730) == (0,) * 9730  # the workspace
        pairs = {(c["device"], c["peer"]) for c in gpus.calls("cuCtxEnablePeerAccess")}
        assert pairs == {(a, b) for a in range(4) for b in range(4) if a != b}
        assert context.sizes.timeout_cycles == 198_000_000_000 and context.sizes.num_sms == 64
    assert sorted(c["address"] for c in gpus.calls("cuMemFree_v2")) == sorted(starts)


def test_each_group_along_an_axis_has_its_own_table(gpus):
    """Axes in the order given, major first."""
    mesh = mesh_of(2, 2, 2, names="abc")
    with EpContext(mesh, ("c", "a"), **SIZES):
        starts = [c["address"] for c in gpus.calls("cuMemAlloc_v2")]
        by_device = dict(zip([c["device"] for c in gpus.calls("cuMemAlloc_v2")], starts, strict=True))
        for device, group in ((0, (0, 4, 1, 5)), (4, (0, 4, 1, 5)), (2, (2, 6, 3, 7)), (7, (2, 6, 3, 7))):
            assert words(by_device[device] + TABLE_OFFSET, 4) == tuple(by_device[d] for d in group)


def run_layer(context, mesh, tokens: int, **options):
    def body(x, ids, weights):
        sent = DeepEP(context, **options).dispatch(x, ids, weights, 8)
        return DeepEP(context, **options).combine(jnp.zeros((sent.ids.shape[0], 256), jnp.float32), sent)

    ranks = context.sizes.ranks
    args = (jnp.ones((ranks * tokens, 256), jnp.bfloat16), jnp.zeros((ranks * tokens, 2), jnp.int32))
    spec = PartitionSpec(context.axis)
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    return run(*args, jnp.ones((ranks * tokens, 2), jnp.float32))


@pytest.mark.parametrize("tokens", [16, 5])
def test_what_each_device_launches(gpus, tokens):
    mesh = mesh_of(2)
    with EpContext(mesh, "d", **SIZES) as context:
        start = {c["device"]: c["address"] for c in gpus.calls("cuMemAlloc_v2")}
        jax.block_until_ready(run_layer(context, mesh, tokens))
        records = gpus.calls("cuLaunchKernelEx")
        assert len(records) == 8
        by_rank = {0: [], 1: []}
        for record in records:
            params = [int.from_bytes(bytes.fromhex(p), "little", signed=False) for p in record["params"]]
            rank = params[-2] if len(params) == 10 else params[-1]
            by_rank[rank].append((record, params))
        for rank, launched in by_rank.items():
            (dispatch, d), (copy, c), (combine, b), (reduce, r) = launched
            for record in (dispatch, combine):
                assert record["attributes"] == {COOPERATIVE: [1, 0, 0], CLUSTER: [2, 1, 1]}
                assert record["grid"] == [64, 1, 1] and record["smem"] == SMEM
            for record in (copy, reduce):
                assert record["attributes"] == {PDL: [1, 0, 0]} and record["grid"] == [132, 1, 1]
            base, table, workspace = start[rank] + DATA_OFFSET, start[rank] + TABLE_OFFSET, start[rank]
            comm = struct.pack("<5i", rank, 2, rank, 2, 0)
            assert dispatch["params"][13] == comm.hex() and combine["params"][4] == comm.hex()
            assert d[10] == tokens and d[11:13] == [1, -(-tokens // 4) * 4]
            assert d[14:18] == [table, base, workspace, 0]
            assert d[1] == d[4] == d[5] == 0 and d[9] != 0  # no scales, no copies; places are given
            assert c[:2] == [base, workspace] and c[3] == 0 and c[11] == 32 and c[15] == rank
            assert b[5:8] == [table, base, workspace] and b[9] == 32 and b[1] == 0
            assert r[3] == base and r[6] == tokens and r[8] == rank
            assert (c[2], c[8]) == (d[6], b[2]) and c[2] == b[3]  # ranks and metadata go from call to call


def test_modes_differ_in_what_is_given(gpus):
    mesh = mesh_of(1)
    with EpContext(mesh, "d", **SIZES) as context:
        for options, slots_are_results, cursor in (
            ({"format": "v2", "deterministic": False}, True, False),
            ({"format": "v2_psum", "deterministic": False}, True, True),
            ({"format": "v2_psum"}, False, True),
        ):
            gpus.driver.standin_reset()
            jax.block_until_ready(run_layer(context, mesh, 16, **options))
            records = gpus.calls("cuLaunchKernelEx")
            # Places that follow from all ranks' ids take these first, by a kernel that gives up waiting, too.
            gathers = [r["block"] == [1024, 1, 1] and r["grid"] == [1, 1, 1] for r in records]
            assert gathers[0] == (not slots_are_results) and sum(gathers) == gathers[0]
            record = next(r for r in records if len(r["params"]) == 16)
            ends = int.from_bytes(bytes.fromhex(record["params"][3]), "little")
            assert bool(ends) == (cursor and slots_are_results)


@pytest.mark.parametrize("recorded", [False, True])
def test_command_buffers_take_exchanges_on_request(gpus, monkeypatch, recorded):
    mesh = mesh_of(1)
    with EpContext(mesh, "d", **SIZES, command_buffers=recorded) as context:
        spec = PartitionSpec("d")
        run = jax.shard_map(
            lambda x, i, w: DeepEP(context).dispatch(x, i, w, 8).ids, mesh=mesh, in_specs=spec, out_specs=spec
        )
        args = (jnp.ones((4, 256), jnp.bfloat16), jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2)))
        text = jax.jit(run).lower(*args).as_text()
        assert ("@jaxmoe_deepep_dispatch_no_graph" in text) == (not recorded)
        jax.jit(run)(*args).block_until_ready()
        assert len(gpus.calls("cuLaunchKernelEx")) == 2
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT_REGIONS")
    if recorded:
        with pytest.raises(ValueError, match=r"CONCURRENT_REGIONS'.*=LHS, or command_buffers=F"):
            EpContext(mesh, "d", **SIZES, command_buffers=True)
    else:
        EpContext(mesh, "d", **SIZES).close()


def test_closed_context_is_refused_and_closing_again_does_nothing(gpus):
    mesh = mesh_of(2)
    context = EpContext(mesh, "d", **SIZES)
    run_layer(context, mesh, 3).block_until_ready()
    context.close()
    context.close()
    assert len(gpus.calls("cuMemFree_v2")) == 2
    with pytest.raises(RuntimeError, match=r"EpContext over 'd' \(tokens=16, hidden=256\) is closed; make another one"):
        run_layer(context, mesh, 4)


def test_a_program_that_outlives_its_context_fails_by_name(gpus):
    mesh = mesh_of(1)
    context = EpContext(mesh, "d", **SIZES)
    body = lambda x, i, w: DeepEP(context).dispatch(x, i, w, 8).ids  # noqa: E731
    spec = PartitionSpec("d")
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    args = (jnp.ones((4, 256), jnp.bfloat16), jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2)))
    run(*args).block_until_ready()
    context.close()
    with pytest.raises((RuntimeError, ValueError), match=r"peer context \d+ is not set up on device 0"):
        run(*args).block_until_ready()


def test_too_little_memory_says_how_much_and_leaves_nothing_behind(gpus):
    with pytest.raises(
        MemoryError, match=r"needs [\d,]+ bytes on .*1,073,741,824 are free\. Use fewer tokens \(65536\)"
    ):
        EpContext(mesh_of(2), "d", **SIZES | {"tokens": 65536, "hidden": 7168})
    assert gpus.calls("cuMemAlloc_v2") == []
    gpus.driver.standin_fail(b"cuMemAlloc_v2", 2, 1)
    with pytest.raises(RuntimeError, match="cuMemAlloc_v2 failed"):
        EpContext(mesh_of(2), "d", **SIZES)
    assert len(gpus.calls("cuMemFree_v2")) == 1


def test_gpus_without_peer_access(gpus, monkeypatch):
    monkeypatch.setattr(driver.Driver, "reaches", lambda self, a, b: False)
    with pytest.raises(BackendUnavailable, match=r"no peer access to .*use the AllToAll transport"):
        EpContext(mesh_of(2), "d", **SIZES)
    assert len(gpus.calls("cuMemFree_v2")) == 2


REFUSALS = [
    ({"num_experts": 9}, ShapeError, "9 experts do not divide over 2 ranks"),
    ({"num_experts": 2, "replicated": 1, "tokens": 0}, ShapeError, "tokens is 0"),
    ({"top_k": 33}, ShapeError, "top_k is 33; the kernels take at most 32"),
    ({"num_experts": 1024}, ShapeError, "512 experts per rank are more than the kernels' 256; use at least 4 ranks"),
    ({"weights": BF16, "wire": "fp8"}, FormatError, "wire='fp8' with BF16 experts"),
    ({"weights": FP8Block, "wire": "fp4"}, ValueError, "wire is 'fp4'"),
    ({"num_sms": 200}, ShapeError, "num_sms is 200; .* has 132"),
    ({"timeout_seconds": 0}, ValueError, "timeout_seconds is 0"),
    ({"hidden": 200_000}, ShapeError, "does not fit the 231936 bytes of shared memory; use a smaller H"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSALS)
def test_refusals(gpus, change, error, message):
    with pytest.raises(error, match=message):
        EpContext(mesh_of(2), "d", **SIZES | change)
    assert gpus.calls("cuMemAlloc_v2") == []


def test_unknown_axis(gpus):
    with pytest.raises(ValueError, match=r"axis 'e' is not in the mesh, which has 'd' \(2\)"):
        EpContext(mesh_of(2), "e", **SIZES)


def test_a_kernel_that_failed_is_explained(gpus):
    context = EpContext(mesh_of(1), "d", **SIZES, timeout_seconds=7)
    with pytest.raises(EpFailure, match=r"EpContext over 'd'.*cuCtxSynchronize failed.*within 7 s.*First error: boom"):
        with context:
            gpus.driver.standin_fail(b"cuCtxSynchronize", 719, 0)
            raise RuntimeError("boom")
    assert gpus.calls("cuMemFree_v2") == []  # a lost CUDA context gives nothing back
    gpus.driver.standin_reset()
    with pytest.raises(RuntimeError, match=r"^boom$"), EpContext(mesh_of(1), "d", **SIZES):
        raise RuntimeError("boom")


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """A device of process 1."""

    id: int = 77
    process_index: int = 1
    local_hardware_id: int = 0


class Store:
    """The store of jax.distributed as process 0 meets it: process 1 says what process 0 said, but for ``says``."""

    def __init__(self):
        self.values, self.barriers, self.says = {}, [], {}

    def key_value_set_bytes(self, key, value):
        self.values[key] = value

    def blocking_key_value_get_bytes(self, key, timeout):
        mine = self.values[key.removesuffix("1") + "0" if key.endswith("/1") else key]
        return json.dumps(json.loads(mine) | self.says).encode() if key.endswith("/1") else mine

    def wait_at_barrier(self, name, timeout, processes):
        self.barriers.append((name.rsplit("/")[-1], processes))


def test_processes_exchange_handles(gpus, monkeypatch):
    store = Store()
    monkeypatch.setattr(peers.distributed, "global_state", types.SimpleNamespace(client=store))
    group = [[jax.devices("cpu")[0], Elsewhere()]]
    monkeypatch.setattr(peers, "groups_of", lambda mesh, axis: group)
    handle = struct.pack("<Q56x", 0x5000_0000).hex()

    store.says = {"handles": {"77": handle}, "context": 41}
    with EpContext(mesh_of(2), "d", **SIZES) as context:
        (made,) = gpus.calls("cuMemAlloc_v2")
        assert words(made["address"] + TABLE_OFFSET, 2) == (made["address"], 0x5000_0000 + 4096)
        assert context.calls.context >= 41
    assert store.barriers == [("connected", [0, 1]), ("closing", [0, 1]), ("freed", [0, 1])]
    assert [c["address"] for c in gpus.calls("cuIpcCloseMemHandle")] == [0x5000_0000 + 4096]

    for say, error, message in (
        ({"host": "elsewhere"}, BackendUnavailable, r"several hosts .*use the AllToAll transport"),
        ({"shape": "other"}, ShapeError, "process 1 makes another context than process 0: other"),
        ({"handles": {"error": "MemoryError: full"}}, RuntimeError, "process 1 cannot make the EpContext.*full"),
    ):
        store.says = {"handles": {"77": handle}} | say
        with pytest.raises(error, match=message):
            EpContext(mesh_of(2), "d", **SIZES)
    store.says = {"handles": {"77": handle}}
    gpus.driver.standin_fail(b"cuIpcOpenMemHandle_v2", 217, 0)
    with pytest.raises(BackendUnavailable, match=r"cannot open the buffer of .*use the AllToAll transport"):
        EpContext(mesh_of(2), "d", **SIZES)
