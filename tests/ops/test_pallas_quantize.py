"""The quantisation kernel: its bits in the interpreter and on a GPU, and that it lowers for both architectures."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmoe.errors import BackendUnavailable
from jaxmoe.ops.mosaic import LOWERS, Tile
from jaxmoe.ops.quantize import quantize, reference
from jaxmoe.ops.quantize.pallas import TILE, quantize_kernel
from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.tensors import QuantizedRows

QUANTS = [ActivationQuant(b, s) for b in (128, 32) for s in ("float32", "ue8m0")]  # pyright: ignore[reportArgumentType]
SMALL = Tile(16, 2)


def rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: jnp.dtype, masked: bool, infinite: bool = False):
    """Rows of many magnitudes with a NaN, zeros and values under the floor; invalid ones are NaN throughout."""
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-4, 5, shape[:-1])[..., None]
    x[..., 1, 5], x[..., 2, :64], x[..., 3, :] = np.nan, 0, 1e-33
    if infinite:
        x[..., 4, 7], x[..., 5, 9] = np.inf, -np.inf
    if not masked:
        return jnp.asarray(x, dtype), None
    valid = rng.random(shape[:-1]) < 0.5
    valid[..., -16:] = False  # the last tile is read by nobody
    x[~valid] = np.nan
    return jnp.asarray(x, dtype), jnp.asarray(valid)


def oracle(x: jax.Array, quant: ActivationQuant, valid: jax.Array | None = None) -> QuantizedRows:
    """The reference on the CPU, whose divisions are rounded correctly."""
    x, valid = jax.device_put((x, valid), jax.local_devices(backend="cpu")[0])
    return reference.quantize(x, quant, valid=valid)


def assert_same(got: QuantizedRows, want: QuantizedRows) -> None:
    a, b = (np.asarray(r.values.astype(jnp.float32)) for r in (got, want))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.asarray(got.scales), np.asarray(want.scales))


@pytest.mark.parametrize("quant", QUANTS, ids=str)
@pytest.mark.parametrize(
    ("shape", "dtype", "masked", "tile"),
    [
        ((16, 128), jnp.float32, False, TILE),  # one tile, narrower than a full one
        ((2, 38, 320), jnp.bfloat16, True, SMALL),  # K padded to 384, overlapping last tile, rows no multiple of 4
    ],
)
def test_same_bits_in_the_interpreter(
    rng: np.random.Generator, quant: ActivationQuant, shape: tuple[int, ...], dtype: jnp.dtype, masked: bool, tile: Tile
) -> None:
    x, valid = rows(rng, shape, dtype, masked)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = quantize_kernel(x, quant, valid, tile)
    assert_same(got, reference.quantize(x, quant, valid=valid))


def test_staged_tile_in_the_interpreter(rng: np.random.Generator) -> None:
    x, _ = rows(rng, (16, 512), jnp.dtype(jnp.bfloat16), False)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = quantize_kernel(x, QUANTS[1], None, Tile(16, 4, staged=True))
    assert_same(got, reference.quantize(x, QUANTS[1]))


@pytest.mark.skipif(not LOWERS, reason="Mosaic GPU of this JAX refuses the kernels, and so do the backends")
@pytest.mark.parametrize("arch", [(9, 0), (10, 0)])
@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_lowers(monkeypatch: pytest.MonkeyPatch, quant: ActivationQuant, arch: tuple[int, int]) -> None:
    monkeypatch.setattr(mosaic_utils, "_infer_arch", lambda: arch)
    x, valid = jax.ShapeDtypeStruct((2, 200, 2880), jnp.bfloat16), jax.ShapeDtypeStruct((2, 200), jnp.bool_)
    lowered = (
        jax.jit(lambda x, v: quantize_kernel(x, quant, v, TILE)).trace(x, valid).lower(lowering_platforms=("cuda",))
    )
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.skipif(not LOWERS, reason="Mosaic GPU of this JAX refuses the kernels, and so do the backends")
def test_rows_differ_over_a_mesh_as_what_they_are_made_of() -> None:
    def check(x: jax.Array) -> jax.Array:
        rows = quantize_kernel(x, QUANTS[0], None, TILE)
        for array in (rows.values, rows.scales):
            assert jax.typeof(array).manual_axis_type == jax.typeof(x).manual_axis_type
        return rows.values

    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.sharding.PartitionSpec("x")
    jax.eval_shape(jax.shard_map(check, mesh=mesh, in_specs=cut, out_specs=cut), jnp.zeros((64, 256), jnp.bfloat16))


def test_refusals() -> None:
    for shape, words in (((32, 96), "multiple of 64"), ((8, 128), "8 rows are fewer"), ((0, 32, 128), "nothing")):
        with pytest.raises(BackendUnavailable, match=words):
            quantize_kernel(jnp.zeros(shape), QUANTS[0], None, TILE)


def test_needs_a_gpu() -> None:
    with pytest.raises(BackendUnavailable, match="need an NVIDIA GPU" if LOWERS else "JAX 0.11"):
        quantize(jnp.zeros((32, 128)), QUANTS[0], backend="pallas")
    assert quantize(jnp.zeros((32, 128)), QUANTS[0]).values.shape == (32, 128)


@pytest.mark.gpu
@pytest.mark.skipif(not LOWERS, reason="Mosaic GPU of this JAX refuses the kernels, and so do the backends")
@pytest.mark.parametrize("quant", QUANTS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(16, 64), (2, 333, 2880), (1024, 7168)])
@pytest.mark.parametrize("masked", [False, True])
def test_same_bits_on_a_gpu(
    rng: np.random.Generator, quant: ActivationQuant, dtype: jnp.dtype, shape: tuple[int, ...], masked: bool
) -> None:
    x, valid = rows(rng, shape, dtype, masked, infinite=True)
    got = quantize(x, quant, valid=valid, backend="pallas")
    assert_same(got, oracle(x, quant, valid))
    again = quantize(x, quant, valid=valid, backend="pallas")
    assert_same(again, got)


@pytest.mark.gpu
@pytest.mark.skipif(not LOWERS, reason="Mosaic GPU of this JAX refuses the kernels, and so do the backends")
def test_reciprocals_are_rounded(rng: np.random.Generator) -> None:
    """Codes at the very midpoints between two e4m3 values show a reciprocal that is off by one unit."""
    amax = rng.uniform(1, 2, (4096, 1)) * 2.0 ** rng.integers(-60, 60, (4096, 1))
    x = amax / 448 * rng.choice([17.0, 19.0, 100.0, 108.0, 232.0], (4096, 128))
    x[:, :1] = amax
    x = jnp.asarray(x, jnp.float32)
    assert_same(quantize(x, QUANTS[0], backend="pallas"), oracle(x, QUANTS[0]))
