"""Launch specifications: what Python refuses, and that the decoder survives any bytes."""

from __future__ import annotations

import dataclasses
import struct
import subprocess

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxmoe.cuda.launch import Buffer, Integer, LaunchSpec, PeerField, Pointer, Struct, TensorMap, encode
from jaxmoe.errors import ShapeError

A0 = Buffer("argument", 0)
MAP = TensorMap(A0, "BFLOAT16", (4096, 3072), (8192,), (64, 128), 128)
EVERY = LaunchSpec(
    cubin="0123abcd",
    name="sm90_fp8_1d2d",
    grid=(132, 1, 1),
    block=(384, 1, 1),
    dynamic_smem=215744,
    params=(
        Pointer(A0, 64),
        Pointer(None),
        Integer(7168),
        Struct(bytes(20), ((8, PeerField(3, "rank")),)),
        PeerField(3, "window"),
        MAP,
    ),
    cluster=2,
)
BLOB = encode([EVERY, EVERY], "jaxmoe_test")


def fp4(**changes) -> TensorMap:
    good = TensorMap(A0, "16U4_ALIGN16B", (256, 64), (128,), (128, 16), 128)
    return dataclasses.replace(good, **changes)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Buffer("output", 0), "Buffer.kind is 'output'"),  # pyright: ignore[reportArgumentType]
        (lambda: Buffer("argument", 64), "Buffer.index is 64; 0 to 63 is possible"),
        (lambda: Buffer("argument", 0, -1), "Buffer.offset is -1"),
        (lambda: Pointer(None, 4), "Pointer.nbytes is 4; 0 to 0 is possible"),
        (lambda: Integer(2**32), "Integer of 4 bytes is 4294967296; 0 to 4294967295 is possible"),
        (lambda: Integer(-1, 8), "Integer of 8 bytes is -1"),
        (lambda: Integer(0, 3), "Integer.width is 3; 1, 2, 4 or 8 bytes"),
        (lambda: PeerField(-1, "base"), "PeerField.context is -1"),
        (lambda: PeerField(0, "size"), "PeerField.field is 'size'"),  # pyright: ignore[reportArgumentType]
        (lambda: Struct(b""), "bytes of a Struct is 0; 1 to 1024 is possible"),
        (lambda: Struct(bytes(12), ((8, PeerField(0, "base")),)), "offset of the peer field 'base' is 8; 0 to 4"),
        (lambda: dataclasses.replace(MAP, dtype="FLOAT64"), "TensorMap.dtype is 'FLOAT64'"),
        (lambda: dataclasses.replace(MAP, strides=()), "2 dims and 0 strides"),
        (lambda: dataclasses.replace(MAP, box=(64,)), "2 dims and a box of 1"),
        (lambda: dataclasses.replace(MAP, swizzle=16), "swizzle is 16 bytes"),
        (lambda: dataclasses.replace(MAP, dims=(4096, 0)), r"dims \(launch nothing for an empty buffer\) is 0"),
        (lambda: dataclasses.replace(MAP, strides=(8200,)), "stride 8200 is not a multiple of 16 bytes"),
        (lambda: dataclasses.replace(MAP, box=(64, 257)), "TensorMap.box is 257; 1 to 256"),
        (lambda: dataclasses.replace(MAP, box=(65, 1)), "inner box row of a TensorMap has 130 bytes, not a multiple"),
        (lambda: dataclasses.replace(MAP, box=(128, 1)), "under a 128-byte swizzle is 256; 16 to 128"),
        (lambda: fp4(strides=(144,)), "stride 144 is not a multiple of 32 bytes"),
        (lambda: fp4(dims=(192, 64)), r"dims\[0\] in multiples of 128, got 192"),
        (lambda: fp4(box=(64, 16)), r"box\[0\] of 128, got 64"),
        (lambda: dataclasses.replace(EVERY, cubin="a/b"), "cubin key 'a/b' is not a file name"),
        (lambda: dataclasses.replace(EVERY, cubin="../x"), "cubin key '../x' is not a file name"),
        (lambda: dataclasses.replace(EVERY, name="naïve"), "kernel name 'naïve' is not 1 to 256 printable ASCII"),
        (lambda: dataclasses.replace(EVERY, grid=(0, 1, 1)), r"extent of grid \(0, 1, 1\) is 0"),
        (lambda: dataclasses.replace(EVERY, grid=(2, 65536, 1)), "is 65536; 1 to 65535"),
        (lambda: dataclasses.replace(EVERY, block=(512, 4, 1)), r"threads of block \(512, 4, 1\) is 2048; 1 to 1024"),
        (lambda: dataclasses.replace(EVERY, dynamic_smem=232449), "dynamic_smem is 232449; 0 to 232448"),
        (lambda: dataclasses.replace(EVERY, grid=(131, 1, 1)), "is not a multiple of the cluster 2"),
        (lambda: dataclasses.replace(EVERY, params=(Integer(0),) * 65), "number of parameters is 65; 0 to 64"),
        (lambda: dataclasses.replace(EVERY, params=(MAP,) * 17), "number of tensor maps is 17; 0 to 16"),
        (lambda: dataclasses.replace(EVERY, params=(Struct(bytes(600)),) * 2), "each rounded up to 16 is 1216"),
        (lambda: encode([], ""), "target name '' is not 1 to 256"),
    ],
)
def test_bad_specification_names_the_value_and_the_limit(make, message):
    with pytest.raises(ShapeError, match=message):
        make()


def test_encoding_is_a_function_of_the_specification_only():
    assert encode([EVERY, dataclasses.replace(EVERY)], "jaxmoe_test") == BLOB
    assert encode([EVERY], "jaxmoe_test") != encode([dataclasses.replace(EVERY, pdl=True)], "jaxmoe_test")


def test_every_truncation_is_refused(standin):
    for end in range(len(BLOB)):
        with pytest.raises(RuntimeError, match="malformed launch specification"):
            standin.program(BLOB[:end])


@pytest.mark.parametrize(
    "blob, message",
    [
        (b"ELF\0" + BLOB[4:], "the magic is not JXML at byte 4"),
        (BLOB[:4] + b"\x09\0" + BLOB[6:], r"version 9 instead of 1 \(the Python package and libjaxmoe_ffi.so"),
        (BLOB + b"\0", "unread bytes follow the last launch"),
        (BLOB.replace(b"0123abcd", b"0123/bcd"), "the cubin key '0123/bcd' is not a plain file name"),
        (BLOB.replace(b"0123abcd", b".123abcd"), "the cubin key '.123abcd' is not a plain file name"),
        (BLOB.replace(b"0123abcd", b"0123\0bcd"), "cubin key holds a character outside printable ASCII"),
        (BLOB.replace(struct.pack("<I", 384), struct.pack("<I", 0)), r"block 0 is outside 1..1024"),
        (BLOB.replace(struct.pack("<Q", 3072), struct.pack("<Q", 0)), r"dimension 0 is outside 1..4294967296"),
    ],
)
def test_malformed_bytes_say_what_and_where(standin, blob, message):
    with pytest.raises(RuntimeError, match=message):
        standin.program(blob)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, len(BLOB) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_edited_bytes_are_an_error_or_a_specification(standin, edits):
    blob = bytearray(BLOB)
    for at, value in edits:
        blob[at] = value
    # Either malformed, or well-formed and then without its cubin.
    with pytest.raises(RuntimeError, match=r"malformed launch specification|KernelNotCompiled"):
        standin.program(bytes(blob))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(blob=st.binary(max_size=200))
def test_random_bytes_are_refused(standin, blob):
    with pytest.raises(RuntimeError, match="malformed launch specification"):
        standin.program(blob)


def test_decoder_under_the_sanitisers(build_cpp, rng):
    """20000 edited, cut and extended specifications, each in an allocation of its own size."""
    sources = ["tests/cuda/standin/decode.cc", "ffi/spec.cc"]
    binary = build_cpp("decode", sources, "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    blobs = [BLOB]
    for _ in range(20000):
        blob = np.frombuffer(BLOB, np.uint8).copy()
        edits = rng.integers(1, 6)
        blob[rng.integers(0, len(blob), edits)] = rng.choice([0, 1, 2, 127, 128, 255, int(rng.integers(256))], edits)
        blobs.append((blob.tobytes() + rng.bytes(3))[: rng.integers(len(BLOB) // 2, len(BLOB) + 3)])
    stdin = b"".join(struct.pack("<I", len(blob)) + blob for blob in blobs)
    done = subprocess.run([str(binary)], input=stdin, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    accepted, total = map(int, done.stdout.decode().split(" of "))
    assert total == len(blobs) and 1 <= accepted < total
