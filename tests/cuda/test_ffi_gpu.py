"""The handler on a CUDA GPU, with kernels of a few lines: every parameter kind, TMA, clusters, graphs, errors."""

from __future__ import annotations

import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.cuda import ffi, jit, nvrtc
from jaxmoe.cuda.launch import Buffer, Integer, LaunchSpec, PeerField, Pointer, Struct, TensorMap

pytestmark = pytest.mark.gpu

ARGUMENT, RESULT = Buffer("argument", 0), Buffer("result", 0)
ROWS, COLUMNS = 64, 256
SHAPE = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.int32)

# Adds `step` to a tile of 16 rows and 32 columns that the tensor map brings, and tells which CTA of the cluster it was.
TILE = r"""
struct alignas(64) Map { unsigned char bytes[128]; };
extern "C" __global__ void tile(int* out, int* rank, unsigned columns, unsigned char step,
                                const __grid_constant__ Map map) {
  extern __shared__ __align__(1024) int smem[];
  __shared__ __align__(8) unsigned long long barrier;
  unsigned b = __cvta_generic_to_shared(&barrier), s = __cvta_generic_to_shared(smem);
  int x = blockIdx.x * 32, y = blockIdx.y * 16;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(b));
    asm volatile("fence.proxy.async.shared::cta;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 2048;" ::"r"(b));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(s), "l"(&map), "r"(x), "r"(y), "r"(b) : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra W; }" ::"r"(b)
               : "memory");
  for (int i = threadIdx.x; i < 512; i += blockDim.x) out[(y + i / 32) * columns + x + i % 32] = smem[i] + step;
  unsigned cta;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(cta));
  if (threadIdx.x == 0 && rank != nullptr) rank[blockIdx.x] = cta;
}
"""

# Writes its parameters where the first points.
WORDS = r"""
struct Comm { int rank, size, rank_again; };
extern "C" __global__ void words(unsigned long long* out, void* base, int rank, Comm comm, unsigned short s) {
  out[0] = (unsigned long long)base; out[1] = rank; out[2] = comm.rank; out[3] = comm.size;
  out[4] = comm.rank_again; out[5] = s;
}
"""


@pytest.fixture
def cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Compiles a source for the GPU at hand into an empty cache; gives the key, new for each test."""
    monkeypatch.setenv("JAXMOE_CACHE_DIR", str(tmp_path))
    setup = nvrtc.Setup(str(jit.find_nvrtc().path), [], [["empty.h", "\n"]], "empty.h")
    arch = "sm_" + jax.devices()[0].compute_capability.replace(".", "")

    def compile_one(code: str) -> str:
        image, log = nvrtc.compile_source(setup, "test", arch, code)
        assert image, log
        key = f"test_{tmp_path.name}_{abs(hash(code))}"
        (tmp_path / f"{key}.cubin").write_bytes(image)
        return key

    return compile_one


def tile_spec(key: str, step: int, **changes) -> LaunchSpec:
    tensor_map = TensorMap(ARGUMENT, "INT32", (COLUMNS, ROWS), (4 * COLUMNS,), (32, 16), 0)
    params = (Pointer(RESULT, 4 * ROWS * COLUMNS), Pointer(None), Integer(COLUMNS), Integer(step, 1), tensor_map)
    options = {"params": params, "dynamic_smem": 100_000, "cluster": 2} | changes
    return LaunchSpec(key, "tile", (COLUMNS // 32, ROWS // 16, 1), (128, 1, 1), **options)


def chain(spec: LaunchSpec, length: int, **options):
    """A program of `length` dependent custom calls."""

    def run(x):
        for _ in range(length):
            (x,) = ffi.launch([spec], [x], [SHAPE], name="jaxmoe_test_tile", **options)
        return x

    return jax.jit(run)


def numbers(seed: int = 0) -> jax.Array:
    return jnp.arange(ROWS * COLUMNS, dtype=jnp.int32).reshape(ROWS, COLUMNS) + seed


def test_tensor_map_cluster_and_large_shared_memory(cubin):
    spec = tile_spec(cubin(TILE), 7)
    params = (spec.params[0], Pointer(Buffer("result", 1), 4 * COLUMNS // 32), *spec.params[2:])
    spec = tile_spec(spec.cubin, 7, params=params)
    ranks = jax.ShapeDtypeStruct((COLUMNS // 32,), jnp.int32)
    y, rank = jax.jit(lambda x: ffi.launch([spec], [x], [SHAPE, ranks], name="jaxmoe_test_tile"))(numbers())
    np.testing.assert_array_equal(np.asarray(y), np.asarray(numbers()) + 7)
    np.testing.assert_array_equal(np.asarray(rank), np.arange(COLUMNS // 32) % 2)


@pytest.mark.parametrize("pdl", [False, True])
def test_recorded_and_launched_programs_agree_when_buffers_move(cubin, pdl):
    spec = tile_spec(cubin(TILE), 3, pdl=pdl)
    recorded, launched = chain(spec, 12), chain(spec, 12, command_buffer=False)
    kept = []
    for seed in range(6):
        x = numbers(1000 * seed)
        expected = np.asarray(x) + 36
        for run in (recorded, launched):
            kept.append(run(x))
            np.testing.assert_array_equal(np.asarray(kept[-1]), expected)


def test_every_device_launches_its_own_shard(cubin):
    spec = tile_spec(cubin(TILE), 1)
    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices, "d")
    spread = jax.sharding.PartitionSpec("d")
    run = jax.jit(jax.shard_map(chain(spec, 3), mesh=mesh, in_specs=spread, out_specs=spread))
    x = jnp.concatenate([numbers(i) for i in range(len(devices))])
    np.testing.assert_array_equal(np.asarray(run(x)), np.asarray(x) + 3)


def test_parameters_by_value_and_peer_fields(cubin):
    ffi.library().set_peer(99, 0, base=0x7FFF12345678, workspace=0, window=0, rank=5)
    comm = Struct(struct.pack("<3i", -1, 8, -1), ((0, PeerField(99, "rank")), (8, PeerField(99, "rank"))))
    params = (Pointer(RESULT, 48), PeerField(99, "base"), PeerField(99, "rank"), comm, Integer(0xFEDC, 2))
    spec = LaunchSpec(cubin(WORDS), "words", (1, 1, 1), (1, 1, 1), 0, params)
    result = jax.ShapeDtypeStruct((12,), jnp.uint32)
    (words,) = ffi.launch([spec], [], [result], name="jaxmoe_test_words")
    assert np.asarray(words).view(np.uint64).tolist() == [0x7FFF12345678, 5, 5, 8, 5, 0xFEDC]
    ffi.library().erase_peer(99)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"cluster": 8, "cooperative": True, "dynamic_smem": 200_000}, "'tile'.*cuLaunchKernelEx failed: CUDA_ERROR"),
        ({"params": ()}, "has 0 parameters, the kernel takes 5"),
    ],
)
def test_refused_launch_leaves_the_context_alive(cubin, changes, message):
    key = cubin(TILE)
    bad = tile_spec(key, 0, **changes)
    if "cooperative" in changes:  # far more CTAs of this size than fit at once
        bad = LaunchSpec(key, "tile", (8 * 1024, 1, 1), (128, 1, 1), params=bad.params, **changes)
    with pytest.raises((RuntimeError, ValueError), match=message):
        chain(bad, 1)(numbers()).block_until_ready()
    np.testing.assert_array_equal(np.asarray(chain(tile_spec(key, 1), 1)(numbers())), np.asarray(numbers()) + 1)


def test_cubin_that_is_none(cubin, tmp_path):
    (tmp_path / "broken.cubin").write_bytes(b"not an ELF file\0")
    with pytest.raises(
        (RuntimeError, ValueError), match=r"cuLibraryLoadData failed|the cubin 'broken' holds 0 kernels"
    ):
        chain(tile_spec("broken", 1), 1)(numbers())
    np.testing.assert_array_equal(np.asarray(chain(tile_spec(cubin(TILE), 1), 1)(numbers())), np.asarray(numbers()) + 1)
