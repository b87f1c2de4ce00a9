"""The launcher without XLA, against a driver that records: parameters, attributes, geometry, errors, concurrency."""

from __future__ import annotations

import struct
import subprocess
import threading

import numpy as np
import pytest

from jaxmoe.cuda.launch import (
    Buffer,
    Integer,
    LaunchSpec,
    PeerField,
    Pointer,
    Struct,
    TensorMap,
    TensorMapDtype,
    encode,
)

BASE, OUT = 0x7F0000000000, 0x7F1000000000


def argument(index: int = 0, offset: int = 0) -> Buffer:
    return Buffer("argument", index, offset)


def spec_of(key: str, *params, **kwargs) -> LaunchSpec:
    geometry = {"grid": (132, 1, 1), "block": (384, 1, 1), "dynamic_smem": 215744} | kwargs
    return LaunchSpec(key, "kernel", params=params, **geometry)


def tensor_map(
    index: int = 0,
    dtype: TensorMapDtype = "UINT8",
    dims=(7168, 3072),
    strides=(7168,),
    box=(128, 128),
    swizzle=128,
    offset=0,
):
    return TensorMap(argument(index, offset), dtype, dims, strides, box, swizzle)


def run(standin, spec: LaunchSpec, arguments=((BASE, 1 << 40),), results=((OUT, 1 << 40),), **kwargs) -> dict:
    standin.program([spec]).launch(arguments, results, **kwargs)
    (record,) = standin.calls("cuLaunchKernelEx")
    return record


def test_parameters_arrive_in_order_and_byte_for_byte(standin):
    standin.library.set_peer(7, 0, base=0x1111, workspace=0x2222, window=0x3333, rank=5)
    key = standin.cubin(8, 8, 1, 2, 4, 8, 20, 8, 8, 8, 4, 8)
    comm = Struct(struct.pack("<5i", -1, 2, -1, 2, 0), ((0, PeerField(7, "rank")), (8, PeerField(7, "rank"))))
    record = run(
        standin,
        spec_of(
            key,
            Pointer(argument(0, 24), nbytes=1000),
            Pointer(None),
            Integer(0xFE, 1),
            Integer(0xFFEE, 2),
            Integer(7168),
            Integer(2**63 + 5, 8),
            comm,
            PeerField(7, "base"),
            PeerField(7, "workspace"),
            PeerField(7, "window"),
            PeerField(7, "rank"),
            Pointer(Buffer("result", 0)),
        ),
    )
    expected = struct.pack("<QQBHIQ", BASE + 24, 0, 0xFE, 0xFFEE, 7168, 2**63 + 5)
    expected += struct.pack("<5iQQQiQ", 5, 2, 5, 2, 0, 0x1111, 0x2222, 0x3333, 5, OUT)
    assert bytes.fromhex("".join(record["params"])) == expected
    standin.library.erase_peer(7)


def test_tensor_map_fields(standin):
    sizes = standin.cubin(8, 128, 128, 128, 128)
    maps = (
        tensor_map(0),
        tensor_map(1, "BFLOAT16", (4096, 3072), (8192,), (64, 128), 128, offset=512),
        tensor_map(2, "FLOAT32", (3072, 56), (12288,), (128, 1), 0),
        tensor_map(3, "16U4_ALIGN16B", (256, 64, 3), (128, 8192), (128, 16, 1), 128),
    )
    buffers = [(BASE + i * 2**32, 2**32) for i in range(4)]
    record = run(standin, spec_of(sizes, Pointer(None), *maps), arguments=buffers)
    seen = standin.calls("cuTensorMapEncodeTiled")
    assert record["params"][1:] == [f"map {m['map']}" for m in seen]
    for m in seen:
        assert m["misaligned"] == 0
        assert (m["interleave"], m["promotion"], m["fill"]) == (0, 3, 0)
        assert m["element_strides"] == [1] * len(m["dims"])
    assert [m["type"] for m in seen] == [0, 9, 7, 14]
    assert [m["swizzle"] for m in seen] == [3, 3, 0, 3]
    assert [m["address"] for m in seen] == [b[0] + offset for b, offset in zip(buffers, (0, 512, 0, 0), strict=True)]
    assert [m["dims"] for m in seen] == [[7168, 3072], [4096, 3072], [3072, 56], [256, 64, 3]]
    assert [m["strides"] for m in seen] == [[7168], [8192], [12288], [128, 8192]]
    assert [m["box"] for m in seen] == [[128, 128], [64, 128], [128, 1], [128, 16, 1]]


@pytest.mark.parametrize("swizzle, code", [(0, 0), (32, 1), (64, 2), (128, 3)])
@pytest.mark.parametrize("dtype, code_of_type", [("TFLOAT32", 11), ("INT32", 3)])
def test_tensor_map_codes(standin, swizzle, code, dtype, code_of_type):
    box = (swizzle // 4 or 64, 2)
    run(standin, spec_of(standin.cubin(128), tensor_map(0, dtype, (64, 8), (256,), box, swizzle)))
    (seen,) = standin.calls("cuTensorMapEncodeTiled")
    assert (seen["swizzle"], seen["type"]) == (code, code_of_type)


@pytest.mark.parametrize(
    "options, attributes",
    [
        ({}, {}),
        ({"cluster": 2}, {"4": [2, 1, 1]}),
        ({"cooperative": True}, {"2": [1, 0, 0]}),
        ({"pdl": True}, {"6": [1, 0, 0]}),
        ({"cluster": 4, "cooperative": True, "pdl": True}, {"4": [4, 1, 1], "2": [1, 0, 0], "6": [1, 0, 0]}),
    ],
)
def test_launch_attributes_and_geometry(standin, options, attributes):
    spec = spec_of(standin.cubin(), grid=(132, 3, 2), block=(64, 2, 4), dynamic_smem=77, **options)
    record = run(standin, spec, stream=0x5150)
    assert record["attributes"] == attributes
    assert (record["grid"], record["block"], record["smem"]) == ([132, 3, 2], [64, 2, 4], 77)
    assert record["stream"] == 0x5150


def test_each_device_is_prepared_once_and_again_only_for_more_shared_memory(standin):
    key = standin.cubin()
    small = standin.program([spec_of(key, dynamic_smem=1000)])
    large = standin.program([spec_of(key, dynamic_smem=2000)])
    for device in (0, 3, 0, 3):
        small.launch(device=device)
    seen = standin.calls("cuKernelSetAttribute")
    assert [(s["attribute"], s["value"], s["device"]) for s in seen] == [(8, 1000, 0), (8, 1000, 3)]
    assert [s["device"] for s in standin.calls("cuKernelGetFunction")] == [0, 3]
    for program in (large, small, large):
        program.launch(device=3)
    assert [(s["value"], s["device"]) for s in standin.calls("cuKernelSetAttribute")][2:] == [(2000, 3)]
    assert len(standin.calls("cuKernelGetFunction")) == 2
    assert len(standin.calls("cuLibraryLoadData")) == 1


def test_nothing_to_launch(standin):
    standin.program([]).launch()
    assert standin.calls() == []


INSTANTIATE = ("cuLibraryLoadData", "cuLibraryGetKernelCount", "cuLibraryEnumerateKernels")
PREPARE = (
    "cuDeviceGet",
    "cuKernelSetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuKernelGetFunction",
    "cuCtxPopCurrent_v2",
)


def test_a_kernel_whose_parameters_cannot_be_read_is_refused(standin):
    """Without a context, for example; it is not taken for a kernel without parameters."""
    standin.driver.standin_fail(b"cuKernelGetParamInfo", 201, 0)
    with pytest.raises(RuntimeError, match=r"cuKernelGetParamInfo.*code 201"):
        standin.program([spec_of(standin.cubin())]).launch([(BASE, 1 << 40)])


@pytest.mark.parametrize("call", INSTANTIATE + PREPARE + ("cuTensorMapEncodeTiled", "cuLaunchKernelEx"))
@pytest.mark.parametrize(
    "result, text", [(1, "CUDA_ERROR_INVALID_VALUE (invalid argument"), (999, "unknown CUDA error")]
)
def test_a_failing_driver_call_is_named_with_its_launch(standin, call, result, text):
    good, bad = standin.cubin(), standin.cubin(128)
    specs = [spec_of(good), spec_of(bad, tensor_map(), cluster=2, pdl=True)]
    standin.driver.standin_fail(call.encode(), result, int(call not in ("cuTensorMapEncodeTiled",)))
    with pytest.raises(RuntimeError) as caught:
        standin.program(specs, "jaxmoe_some_gemm").launch([(BASE, 1 << 40)])
    message = str(caught.value)
    assert call.removesuffix("_v2") in message and text in message and f"code {result}" in message
    for part in (
        "target 'jaxmoe_some_gemm'",
        "launch 2 of 2",
        f"kernel 'kernel' (cubin '{bad}'",
        "grid (132, 1, 1), block (384, 1, 1), dynamic shared memory 215744 bytes, cluster 2, pdl",
    ):
        assert part in message, message
    standin.driver.standin_reset()
    standin.program(specs).launch([(BASE, 1 << 40)])
    assert len(standin.calls("cuLaunchKernelEx")) == 2


def test_missing_cubin_and_cubin_that_comes_later(standin):
    with pytest.raises(
        RuntimeError, match=r"KernelNotCompiled: the cubin 'later' .* is not in .*; run `jaxmoe warmup`"
    ):
        standin.program([spec_of("later")])
    (standin.directory / f"{standin.cubin()}.cubin").rename(standin.directory / "later.cubin")
    standin.program([spec_of("later")]).launch()


def test_empty_cubin(standin):
    (standin.directory / "empty.cubin").write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"empty.cubin' of kernel 'kernel' is empty or cannot be read; delete it"):
        standin.program([spec_of("empty")])


@pytest.mark.parametrize("kernels", [0, 2])
def test_cubin_without_its_one_kernel_is_refused_and_unloaded(standin, kernels):
    with pytest.raises(RuntimeError, match=f"holds {kernels} kernels instead of one"):
        standin.program([spec_of(standin.cubin(kernels=kernels))])
    assert len(standin.calls("cuLibraryUnload")) == 1


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((8, 4, 128), "has 2 parameters, the kernel takes 3"),
        ((8,), "has 2 parameters, the kernel takes 1"),
        ((8, 8), "parameter 1 has 4 bytes in the specification, 8 in the kernel"),
    ],
)
def test_parameters_that_are_not_the_kernels(standin, sizes, message):
    with pytest.raises(RuntimeError, match=message):
        standin.program([spec_of(standin.cubin(*sizes), Pointer(argument()), Integer(1))])


@pytest.mark.parametrize(
    "param, bytes_, message",
    [
        (tensor_map(), 7168 * 3072 - 1, "uses bytes 0..22020096 of argument 0, which has 22020095 bytes"),
        (tensor_map(offset=16), 7168 * 3072, "uses bytes 16..22020112 of argument 0"),
        (tensor_map(dtype="16U4_ALIGN16B", dims=(256, 3), strides=(128,), box=(128, 3)), 383, "uses bytes 0..384"),
        (Pointer(argument(), nbytes=65), 64, "uses bytes 0..65 of argument 0, which has 64 bytes"),
        (Pointer(argument(0, 65)), 64, "uses bytes 65..65 of argument 0"),
        (Pointer(argument(1)), 64, "argument 1 does not exist: the call has 1"),
        (Pointer(Buffer("result", 2)), 64, "result 2 does not exist: the call has 1"),
    ],
)
def test_buffer_too_small_is_an_error_before_the_launch(standin, param, bytes_, message):
    program = standin.program([spec_of(standin.cubin(128 if isinstance(param, TensorMap) else 8), param)])
    with pytest.raises(RuntimeError, match=rf"parameter 0: .*{message}.* on device 2"):
        program.launch([(BASE, bytes_)], [(OUT, 64)], device=2)
    assert standin.calls("cuLaunchKernelEx") == []


def test_buffer_that_fits_exactly(standin):
    run(standin, spec_of(standin.cubin(128), tensor_map()), arguments=[(BASE, 7168 * 3072)])


def test_misaligned_tensor_map(standin):
    program = standin.program([spec_of(standin.cubin(128), tensor_map())])
    with pytest.raises(RuntimeError, match="argument 0 at byte offset 0 is not aligned to the 16 bytes"):
        program.launch([(BASE + 8, 1 << 40)])


@pytest.mark.parametrize("device", [-1, 64])
def test_device_ordinal_outside_the_table(standin, device):
    with pytest.raises(RuntimeError, match=f"device ordinal {device} is outside 0..63"):
        standin.program([spec_of(standin.cubin())]).launch(device=device)


def test_peer_fields_differ_by_device_and_end_with_the_context(standin):
    for device in range(3):
        standin.library.set_peer(1, device, base=100 + device, workspace=0, window=0, rank=device)
    standin.library.set_peer(2, 0, base=7, workspace=0, window=0, rank=0)
    program = standin.program([spec_of(standin.cubin(8, 4), PeerField(1, "base"), PeerField(1, "rank"))])
    for device in range(3):
        program.launch(device=device)
    words = [bytes.fromhex("".join(r["params"])) for r in standin.calls("cuLaunchKernelEx")]
    assert [struct.unpack("<Qi", w) for w in words] == [(100, 0), (101, 1), (102, 2)]
    with pytest.raises(RuntimeError, match="peer context 1 is not set up on device 3; create the EpContext"):
        program.launch(device=3)
    standin.library.erase_peer(1)
    with pytest.raises(RuntimeError, match="peer context 1 is not set up on device 0"):
        program.launch(device=0)
    with pytest.raises(KeyError, match="peer context 1 is not set"):
        standin.library.erase_peer(1)
    standin.library.erase_peer(2)


def test_threads_and_devices_at_once(standin):
    """8 threads × 4 devices through 2 shared programs: every launch complete, every device prepared once."""
    threads, rounds, devices = 8, 50, 4
    keys = [standin.cubin(8, 4, 128) for _ in range(2)]
    specs = [[spec_of(key, Pointer(argument()), Integer(i), tensor_map(1))] for i, key in enumerate(keys)]
    programs = [standin.program(spec) for spec in specs]
    gate = threading.Barrier(threads)
    failures = []

    def work(thread: int) -> None:
        try:
            gate.wait()
            own = standin.program(specs[thread % 2])
            for n in range(rounds):
                program = own if n % 3 == 0 else programs[thread % 2]
                address = BASE + (thread << 20) + (n << 8)
                program.launch([(address, 64), (address << 1, 1 << 40)], device=n % devices, stream=thread + 1)
        except Exception as error:
            failures.append(error)

    pool = [threading.Thread(target=work, args=(t,)) for t in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert failures == []
    maps = {m["map"]: m["address"] for m in standin.calls("cuTensorMapEncodeTiled")}
    launches = standin.calls("cuLaunchKernelEx")
    assert len(launches) == threads * rounds
    for record in launches:
        address = int.from_bytes(bytes.fromhex(record["params"][0]), "little")
        thread = (address - BASE) >> 20
        assert record["stream"] == thread + 1
        assert record["params"][1] == struct.pack("<I", thread % 2).hex()
        assert maps[int(record["params"][2].removeprefix("map "))] == address << 1
    prepared = [(s["library"], s["device"]) for s in standin.calls("cuKernelSetAttribute")]
    assert len(prepared) == len(set(prepared)) == 2 * devices
    assert len(standin.calls("cuLibraryLoadData")) == 2


def test_buffers_of_more_than_four_gigabytes(standin):
    dims, stride = (7168, 2**20), 7168
    spec = spec_of(standin.cubin(128), tensor_map(dims=dims, strides=(stride,)))
    run(standin, spec, arguments=[(BASE, int(np.prod(dims, dtype=np.int64)))])
    with pytest.raises(RuntimeError, match="of argument 0, which has 7516192767 bytes"):
        standin.program([spec]).launch([(BASE, 7168 * 2**20 - 1)])


def test_steady_state_allocates_nothing_and_is_cheap(standin, build_cpp, tmp_path):
    """What a DeepGEMM call needs: three scalars, two pointers, five tensor maps; and a peer field in a struct."""
    maps = (tensor_map(0), tensor_map(1), tensor_map(2), tensor_map(3), tensor_map(4))
    key = standin.cubin(8, 8, 4, 4, 4, *[128] * 5, 20)
    params = (Pointer(argument(5)), Pointer(argument(6)), Integer(1), Integer(2), Integer(3), *maps, Struct(bytes(20)))
    (tmp_path / "spec").write_bytes(encode([spec_of(key, *params, cluster=2)], "jaxmoe_test"))
    sources = [f"ffi/{name}.cc" for name in ("context", "driver", "kernels", "program", "spec")]
    binary = build_cpp("steady", ["tests/cuda/standin/steady.cc", *sources], "-O2")
    driver = build_cpp("quiet.so", ["tests/cuda/standin/driver.cc"], "-O2", "-fPIC", "-shared", "-DQUIET")
    command = [str(binary), str(tmp_path / "spec"), str(tmp_path), "20000"]
    done = subprocess.run(command, env={"JAXMOE_LIBCUDA": str(driver)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    allocations, nanoseconds = done.stdout.split()
    print(f"{nanoseconds} ns per call")
    assert int(allocations) == 0
    assert float(nanoseconds) < 10_000
