"""Files: dtypes, laziness, and every way a file or an index can be wrong."""

from __future__ import annotations

import json
import pickle
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from jaxmoe.checkpoint import CheckpointReader, TensorInfo
from jaxmoe.errors import CheckpointError

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1.5, -2], ml_dtypes.bfloat16),
    "c": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
    "d": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).reshape(4, 64),
    "e": np.array([[-1, 7]], np.int64),
    "f": np.array([-128, 127], np.int8),
    "g": np.array(3, np.float32),
    "h": np.zeros((0, 5), np.uint8),
}


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(begin, end, shape, dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_library_wrote(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reader = CheckpointReader(tmp_path)
    assert reader.names == set(TENSORS)
    assert reader.info("d") == TensorInfo("F8_E8M0", (4, 64))
    for name, value in TENSORS.items():
        got = reader.get(name)
        assert got.dtype == value.dtype and got.shape == value.shape and got.tobytes() == value.tobytes()
        assert not got.flags.writeable and not got.flags.owndata


def test_unaligned_data_reads(tmp_path):
    write_raw(tmp_path, {"b": entry(0, 1, [1]), "a": entry(1, 9, [2], "F32")}, b"\7" + struct.pack("<2f", 1.5, 2.5))
    np.testing.assert_array_equal(CheckpointReader(tmp_path).get("a"), np.float32([1.5, 2.5]))


def sharded(path, weight_map, **files):
    for stem, tensors in files.items():
        save_file(tensors, path / f"{stem}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_open_only_when_asked(tmp_path):
    sharded(tmp_path, {"x": "s1.safetensors", "y": "s2.safetensors"}, s1={"x": np.arange(3)})
    reader = CheckpointReader(tmp_path)
    np.testing.assert_array_equal(reader.get("x"), np.arange(3))
    with pytest.raises(CheckpointError, match=r"s2\.safetensors"):
        reader.info("y")


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/x.safetensors", "d/x.safetensors", "..", "x.bin", "d\\x.safetensors"]
)
def test_index_cannot_leave_the_directory(tmp_path, file):
    sharded(tmp_path, {"x": file})
    with pytest.raises(CheckpointError, match="same directory"):
        CheckpointReader(tmp_path)


def test_index_and_shards_must_agree(tmp_path):
    sharded(tmp_path, {"x": "s1.safetensors", "z": "s1.safetensors"}, s1={"x": np.arange(3)})
    with pytest.raises(CheckpointError, match="lacks 'z'"):
        CheckpointReader(tmp_path).info("z")
    sharded(tmp_path, {"x": "s1.safetensors"}, s1={"x": np.arange(3), "stray": np.arange(3)})
    with pytest.raises(CheckpointError, match=r"holds 'stray'.*does not list"):
        CheckpointReader(tmp_path).info("x")
    two = {"x": "s1.safetensors", "y": "s2.safetensors"}
    sharded(tmp_path, two, s1={"x": np.arange(3), "y": np.arange(3)}, s2={"y": np.arange(3)})
    with pytest.raises(CheckpointError, match=r"holds 'y'.*in s2\.safetensors"):
        CheckpointReader(tmp_path).info("x")


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"x": 3}}', "nonsense"])
def test_malformed_index(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        CheckpointReader(tmp_path)


def test_nothing_or_pickles_or_both(tmp_path):
    with pytest.raises(CheckpointError, match="neither"):
        CheckpointReader(tmp_path)

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="pickle, which is never loaded"):
        CheckpointReader(tmp_path)
    write_raw(tmp_path, {})
    sharded(tmp_path, {})
    with pytest.raises(CheckpointError, match="both"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "JSON"),
        (b"[]", b"", "JSON object"),
        (b'{"a": 1, "a": 2}', b"", "'a' is given twice"),
        ({"a": {"dtype": "U8", "shape": [1]}}, b"1", "malformed header entry for 'a'"),
        ({"a": [1]}, b"1", "malformed"),
        ({"a": entry(0, 1, [-1])}, b"1", "malformed"),
        ({"a": entry(0, 1, [True])}, b"1", "malformed"),
        ({"a": entry(0, 1, ["1"])}, b"1", "malformed"),
        ({"a": entry(0, 3, [1], "F32")}, b"123", "takes 4 bytes.*span 3"),
        ({"a": entry(0, 2, [2]), "b": entry(1, 3, [2])}, b"123", "'b'.*overlaps"),
        ({"a": entry(0, 1, [1]), "b": entry(2, 3, [1])}, b"123", "does not follow"),
        ({"a": entry(1, 0, [0], "NEW")}, b"", "'a'"),
        ({"a": entry(0, 4, [4])}, b"123", "truncated"),
        ({"a": entry(0, 2, [2])}, b"123", "describes 2 bytes.*holds 3"),
    ],
)
def test_malformed_header(tmp_path, header, data, message):
    write_raw(tmp_path, header, data)
    with pytest.raises(CheckpointError, match=message) as error:
        CheckpointReader(tmp_path)
    assert "model.safetensors" in str(error.value)


def test_unknown_dtype_matters_only_to_who_reads_it(tmp_path):
    write_raw(tmp_path, {"a": entry(0, 1, [2], "F4"), "b": entry(1, 2, [1])}, b"12")
    reader = CheckpointReader(tmp_path)
    assert reader.get("b")[0] == ord("2")
    with pytest.raises(CheckpointError, match="'a' has the dtype F4"):
        reader.get("a")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_every_truncation_is_an_error(tmp_path_factory, length):
    whole = save(TENSORS)
    path = tmp_path_factory.mktemp("cut")
    (path / "model.safetensors").write_bytes(whole[: length % len(whole)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        CheckpointReader(path)
