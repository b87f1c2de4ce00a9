"""The CUDA kernel for quantised rows, run by threads of the host: what every block reads and writes, to the bit."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.cuda.launch import Integer, LaunchSpec, Pointer
from jaxmoe.ops.permute import group_tokens, reference
from jaxmoe.ops.permute.cuda import Tiles, choose_tiles, plan_copies
from jaxmoe.quant.formats import ActivationQuant

F32, PACKED = ActivationQuant(128, "float32"), ActivationQuant(32, "ue8m0")
GUARD = 256
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-pthread")
POISON = 0xA5


class Guarded:
    """A poisoned array of bytes between guards that nobody may write."""

    def __init__(self, nbytes: int, poison: int = POISON):
        self.all, self.poison = np.full(nbytes + 3 * GUARD, poison, np.uint8), poison
        start = -self.all.ctypes.data % GUARD + GUARD
        self.bytes = self.all[start : start + nbytes]

    def check(self) -> None:
        start = self.bytes.ctypes.data - self.all.ctypes.data
        assert (self.all[:start] == self.poison).all() and (self.all[start + self.bytes.size :] == self.poison).all()


@pytest.fixture
def run(build_cpp: Any) -> Any:
    path = build_cpp("permute_rows.so", ["tests/cuda/standin/permute_rows.cc"], *FLAGS)
    library = ctypes.CDLL(str(path))

    def launch(spec: LaunchSpec, arguments: list[np.ndarray], results: list[Guarded]) -> None:
        held = []
        for argument in arguments:
            held.append(Guarded(argument.nbytes, 0))  # what is read past the end names token 0
            held[-1].bytes[:] = argument.reshape(-1).view(np.uint8)
        buffers = {"argument": held, "result": results}
        pointers = []
        for p in spec.params:
            if isinstance(p, Pointer):
                taken = None if p.buffer is None else buffers[p.buffer.kind][p.buffer.index].bytes
                assert taken is None or taken.size == p.nbytes
                pointers.append(None if taken is None else taken.ctypes.data)
        integers = [p.value for p in spec.params if isinstance(p, Integer)]
        assert (len(pointers), len(integers)) == (6, 15)
        library.run(
            spec.grid[0],
            spec.block[0],
            spec.dynamic_smem,
            (ctypes.c_void_p * 6)(*pointers),
            (ctypes.c_uint32 * 15)(*integers),
        )
        for buffer in (*held, *results):
            buffer.check()

    return launch


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


CASES = [
    (37, 3, 5, "psum", 1, {}),  # rows no multiple of 4
    (37, 3, 5, "masked", 1, {"words": 1, "staged": 2}),  # nor those of an expert
    # more choices than a warp has lanes, several chunks
    (35, 40, 5, "contiguous", 2, {"words": 3, "staged": 8, "through": True}),
    (35, 40, 5, "masked", 8, {"shared": False, "staged": 4}),
    (1, 1, 3, "psum", 128, {"shared": False, "words": 2}),
]


@pytest.mark.parametrize("quant", [F32, PACKED], ids=str)
@pytest.mark.parametrize(("n", "k", "e", "layout", "alignment", "tiles"), CASES)
def test_gives_the_bits_of_the_reference(
    rng: np.random.Generator, run: Any, quant: ActivationQuant, n: int, k: int, e: int, layout: Any, alignment: int,
    tiles: dict[str, Any],
) -> None:  # fmt: skip
    """Values where rows have a token, scales everywhere; in one launch, and the scales alone."""
    ids = np.where(rng.random((n, k)) < 0.4, -1, rng.integers(0, e, (n, k)))
    g = group_tokens(jnp.asarray(ids, jnp.int32), e, layout=layout, alignment=alignment)
    width, words, stride = 640, 5, -(-n // 4) * 4
    values = rng.integers(0, 256, (n, width), np.uint8)
    words_of = rng.integers(1, 1 << 30, (words, stride), np.int32)
    scales = words_of.view(np.float32) if quant is F32 else words_of
    want = reference.take_scales(jnp.asarray(scales), quant, g.source, g.row_shape)

    chosen = dataclasses.replace(choose_tiles(values.shape, scales.shape, k, g.row_shape), **tiles)
    slots, source = np.asarray(g.slots), np.asarray(g.source)
    rows, moved, alone = Guarded(source.size * width), Guarded(want.nbytes), Guarded(want.nbytes)
    _, spec = plan_copies("sm_90a", slots.shape, width, scales.shape, g.row_shape, quant, chosen)
    run(spec, [values, scales, slots, source], [rows, moved])
    held = source >= 0
    got = rows.bytes.reshape(-1, width)
    np.testing.assert_array_equal(got[held], values[source[held]])
    assert (got[~held] == POISON).all()
    _, spec = plan_copies("sm_90a", (0, 0), 0, scales.shape, g.row_shape, quant, chosen)
    run(spec, [scales, source], [alone])
    for scales_of in (moved, alone):
        np.testing.assert_array_equal(scales_of.bytes.view(np.uint32).reshape(want.shape), bits(want))


@pytest.mark.parametrize("stride", [6, 18])
def test_words_that_the_copy_engine_cannot_fetch(rng: np.random.Generator, run: Any, stride: int) -> None:
    """Scales taken out of a slab may have a row of any length."""
    scales = rng.integers(1, 1 << 30, (3, stride), np.int32).view(np.float32)
    source = rng.integers(-1, stride, 4103).astype(np.int32)
    tiles = choose_tiles((stride, 384), scales.shape, 1, source.shape)
    assert not tiles.shared
    _, spec = plan_copies("sm_90a", (0, 0), 0, scales.shape, source.shape, F32, tiles)
    want = reference.take_scales(jnp.asarray(scales), F32, jnp.asarray(source), source.shape)
    moved = Guarded(want.nbytes)
    run(spec, [scales, source], [moved])
    np.testing.assert_array_equal(moved.bytes.view(np.uint32).reshape(want.shape), bits(want))


@pytest.mark.parametrize(
    ("tokens", "rows", "tiles"),
    [
        (1, 1024, Tiles(1, 4, 256, True, False)),
        (1024, 40704, Tiles(2, 4, 512, True, True)),
        (8192, 98048, Tiles(4, 1, 3584, True, True)),  # 7 chunks of 56 words, 3 blocks on each of 132 SMs
        (25600, 237312, Tiles(4, 1, 8704, True, True)),  # 100 KB, two blocks on an SM
        (25604, 237344, Tiles(4, 1, 8704, False, True)),
    ],
)
def test_tiles(tokens: int, rows: int, tiles: Tiles) -> None:
    assert choose_tiles((tokens, 7168), (56, -(-tokens // 4) * 4), 8, (rows,)) == tiles
    assert choose_tiles((tokens, 65536), (512, -(-tokens // 4) * 4), 8, (rows,)).staged == 1
