"""The handler under XLA on CPU, with a driver that records: instantiate, execute, jit, shard_map, scan, vmap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxmoe.cuda import ffi
from jaxmoe.cuda.launch import Buffer, Integer, LaunchSpec, Pointer, TensorMap
from jaxmoe.errors import FormatError, ShapeError

CPUS = jax.devices("cpu")
BYTES = 1024
ARGUMENT, RESULT = Buffer("argument", 0), Buffer("result", 0)
SHAPE = jax.ShapeDtypeStruct((BYTES // 4,), jnp.int32)


@pytest.fixture(autouse=True)
def on_cpu():
    """The recording driver stands behind the CPU platform, also where there is a GPU."""
    with jax.default_device(CPUS[0]):
        yield


def spec_of(key: str, name: str = "fill", **kwargs) -> LaunchSpec:
    """A kernel that reads argument 0 by tensor map and fills result 0."""
    tensor_map = TensorMap(ARGUMENT, "INT32", (64, 4), (256,), (32, 4), 128)
    return LaunchSpec(
        key, name, (2, 1, 1), (128, 1, 1), 1000, (Pointer(RESULT, BYTES), Integer(7), tensor_map), **kwargs
    )


def fill(standin, byte: int) -> LaunchSpec:
    return spec_of(standin.cubin(8, 4, 128, store=(0, byte, BYTES)))


def filled(byte: int) -> np.ndarray:
    return np.full(BYTES, byte, np.uint8).view(np.int32)


@pytest.mark.parametrize("command_buffer", [True, False])
def test_jit_launches_on_the_buffers_of_the_call(standin, command_buffer):
    spec = fill(standin, 3)

    options = {"name": "jaxmoe_test_fill", "command_buffer": command_buffer}
    run = jax.jit(lambda x: ffi.launch([spec], [x], [SHAPE], **options)[0])

    x = jnp.arange(BYTES // 4, dtype=jnp.int32)
    text = run.lower(x).as_text()
    assert ("@jaxmoe_test_fill_no_graph" in text) == (not command_buffer)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(run(x)), filled(3))
    assert len(standin.calls("cuLibraryLoadData")) == 1
    launches = standin.calls("cuLaunchKernelEx")
    assert len(launches) == 3
    maps = {m["map"]: m for m in standin.calls("cuTensorMapEncodeTiled")}
    for record in launches:
        assert record["grid"] == [2, 1, 1] and record["block"] == [128, 1, 1] and record["smem"] == 1000
        assert record["params"][1] == "07000000"
        assert maps[int(record["params"][2].removeprefix("map "))]["dims"] == [64, 4]
        assert int.from_bytes(bytes.fromhex(record["params"][0]), "little") % 16 == 0


def test_eager_call(standin):
    (y,) = ffi.launch([fill(standin, 9)], [jnp.zeros(BYTES // 4, jnp.int32)], [SHAPE], name="jaxmoe_test_eager")
    np.testing.assert_array_equal(np.asarray(y), filled(9))


def test_launches_run_in_order(standin):
    specs = [fill(standin, byte) for byte in (1, 2, 5)]
    (y,) = ffi.launch(specs, [jnp.zeros(BYTES // 4, jnp.int32)], [SHAPE], name="jaxmoe_test_order")
    np.testing.assert_array_equal(np.asarray(y), filled(5))
    loaded = [r["library"] for r in standin.calls("cuLibraryLoadData")]
    assert [r["library"] for r in standin.calls("cuLaunchKernelEx")] == loaded and len(loaded) == 3


def test_no_launches_with_alias_returns_the_argument(standin):
    x = jnp.arange(BYTES // 4, dtype=jnp.int32)
    (y,) = ffi.launch([], [x], [SHAPE], name="jaxmoe_test_none", input_output_aliases={0: 0})
    np.testing.assert_array_equal(np.asarray(y), np.arange(BYTES // 4))
    assert standin.calls() == []


def test_scan(standin):
    spec = fill(standin, 4)

    @jax.jit
    def run(x):
        def step(carry, _):
            (y,) = ffi.launch([spec], [carry], [SHAPE], name="jaxmoe_test_scan")
            return y, y

        return jax.lax.scan(step, x, None, length=5)

    last, every = run(jnp.zeros(BYTES // 4, jnp.int32))
    np.testing.assert_array_equal(np.asarray(last), filled(4))
    np.testing.assert_array_equal(np.asarray(every), np.tile(filled(4), (5, 1)))
    assert len(standin.calls("cuLaunchKernelEx")) == 5


def test_shard_map_with_a_replicated_argument(standin):
    spec = fill(standin, 2)
    mesh = Mesh(np.array(CPUS[:2]), "d")

    def local(x, shared):
        (y,) = ffi.launch([spec], [x, shared], [SHAPE], name="jaxmoe_test_mixed")
        return y

    spread = PartitionSpec("d")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spread, PartitionSpec()), out_specs=spread))
    y = run(jnp.zeros(BYTES // 2, jnp.int32), jnp.zeros(3, jnp.float32))
    np.testing.assert_array_equal(np.asarray(y), np.tile(filled(2), 2))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_launches_once_per_device(standin, check_vma):
    spec = fill(standin, 6)
    mesh = Mesh(np.array(CPUS[:4]), "d")

    def local(x):
        (y,) = ffi.launch([spec], [x], [SHAPE], name="jaxmoe_test_shard")
        return y

    spread = PartitionSpec("d")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=check_vma))
    y = run(jnp.zeros(BYTES, jnp.int32))
    np.testing.assert_array_equal(np.asarray(y), np.tile(filled(6), 4))
    assert len(standin.calls("cuLaunchKernelEx")) == 4
    devices = [r["device"] for r in standin.calls("cuKernelSetAttribute")]
    assert len(devices) == len(set(devices))


def test_vmap_is_refused_with_the_way_out(standin):
    spec = fill(standin, 1)
    run = jax.vmap(lambda x: ffi.launch([spec], [x], [SHAPE], name="jaxmoe_test_vmap")[0])
    with pytest.raises(NotImplementedError, match=r"jaxmoe_test_vmap: jax.vmap .* Fold the mapped axis"):
        run(jnp.zeros((2, BYTES // 4), jnp.int32))


def test_error_of_a_launch_reaches_the_user_and_the_next_call_works(standin):
    spec = fill(standin, 8)
    run = jax.jit(lambda x: ffi.launch([spec], [x], [SHAPE], name="jaxmoe_test_error")[0])
    x = jnp.zeros(BYTES // 4, jnp.int32)
    run(x).block_until_ready()
    standin.driver.standin_fail(b"cuLaunchKernelEx", 1, 0)
    # JAX's fast path on CPU turns every error of a handler into a ValueError.
    with pytest.raises(ValueError, match=r"'jaxmoe_test_error'.*'fill'.*CUDA_ERROR_INVALID_VALUE \(invalid argument"):
        run(x).block_until_ready()
    standin.driver.standin_reset()
    np.testing.assert_array_equal(np.asarray(run(x)), filled(8))


def test_missing_cubin_names_the_command_that_makes_it(standin):
    run = jax.jit(lambda x: ffi.launch([spec_of("absent")], [x], [SHAPE], name="jaxmoe_test_missing")[0])
    with pytest.raises(RuntimeError, match=r"KernelNotCompiled: the cubin 'absent' of kernel 'fill'.*`jaxmoe warmup`"):
        run(jnp.zeros(BYTES // 4, jnp.int32)).block_until_ready()


def test_buffer_smaller_than_the_tensor_map(standin):
    spec = fill(standin, 1)
    run = jax.jit(lambda x: ffi.launch([spec], [x], [SHAPE], name="jaxmoe_test_small")[0])
    with pytest.raises(RuntimeError, match=r"parameter 2: the kernel uses bytes 0..1024 of argument 0, which has 512"):
        run(jnp.zeros(BYTES // 8, jnp.int32)).block_until_ready()
    assert standin.calls("cuLaunchKernelEx") == []


def test_spec_with_a_buffer_that_the_call_lacks(standin):
    spec = fill(standin, 1)
    with pytest.raises(ShapeError, match="parameter 2 of kernel 'fill' is argument 0; the call has 0 arguments"):
        ffi.launch([spec], [], [SHAPE], name="jaxmoe_test_lacks")


def test_types_of_less_than_a_byte_are_refused(standin):
    with pytest.raises(FormatError, match="argument 0 has dtype int4"):
        ffi.launch([], [jnp.zeros(8, jnp.int4)], [SHAPE], name="jaxmoe_test_int4")


def test_library_that_is_not_built_says_how_to_build_it(monkeypatch):
    monkeypatch.setenv("JAXMOE_FFI_LIBRARY", "/nowhere/libjaxmoe_ffi.so")
    ffi.library.cache_clear()
    with pytest.raises(RuntimeError, match=r"/nowhere/libjaxmoe_ffi.so does not exist.*pip install"):
        ffi.library()


def test_side_effect_keeps_a_call_whose_results_nobody_uses(standin):
    spec = fill(standin, 1)

    @jax.jit
    def run(x):
        for effect in (False, True):
            ffi.launch([spec], [x], [SHAPE], name="jaxmoe_test_effect", has_side_effect=effect)
        return x

    run(jnp.zeros(BYTES // 4, jnp.int32)).block_until_ready()
    assert len(standin.calls("cuLaunchKernelEx")) == 1
