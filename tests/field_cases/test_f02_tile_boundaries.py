"""F02: a group boundary falls inside a GEMM tile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.errors import ShapeError
from jaxmoe.ops.grouped_gemm import grouped_gemm, ragged_gemm
from jaxmoe.ops.quantize import quantize
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.formats import BF16, FP8Block, WeightFormat
from jaxmoe.quant.tensors import GroupedWeight
from jaxmoe.quant.weights import quantize_weight


def _markers(e: int, fmt: WeightFormat = BF16) -> GroupedWeight:
    values = np.arange(1, e + 1)[:, None, None] / 128
    return quantize_weight(jnp.asarray(np.broadcast_to(values, (e, 128, 128)), jnp.bfloat16), fmt)


@pytest.mark.parametrize("counts", [[3, 0, 130, 1, 70], [64, 65, 0, 127, 129], [1] * 37], ids=str)
@pytest.mark.parametrize("alignment", [8, 128])
def test_a_any_counts(counts: list[int], alignment: int) -> None:
    """Also with the rows 128-aligned inside, as the kernels need them."""
    lhs = jnp.ones((sum(counts), 128), jnp.bfloat16)
    run = jax.jit(ragged_gemm, static_argnames="alignment")
    y = np.float32(run(lhs, _markers(len(counts)), jnp.array(counts, jnp.int32), alignment=alignment))
    np.testing.assert_array_equal(y, np.broadcast_to(np.repeat(np.arange(len(counts)), counts)[:, None] + 1, y.shape))


@pytest.mark.parametrize("max_m", [8, 16, 32, 64])
@pytest.mark.parametrize("fmt", [BF16, FP8Block])
def test_b_masked(fmt: WeightFormat, max_m: int) -> None:
    counts = np.array([3, 0, 8, 1], np.int32)
    valid = np.arange(max_m) < counts[:, None]
    x = jnp.where(valid[..., None], jnp.ones((4, max_m, 128), jnp.bfloat16), jnp.nan)
    rows = x if fmt.activation is None else quantize(x, fmt.activation, valid=jnp.asarray(valid))
    y = grouped_gemm(GroupedRows(rows, jnp.asarray(counts), "masked", 8), _markers(4, fmt))
    for e, m in enumerate(counts):
        np.testing.assert_allclose(np.float32(y[e, :m]), e + 1, rtol=2e-2 if fmt.quantized else 0)


def test_c_labels_packed_at_a_finer_step() -> None:
    labels = np.array([0] * 3 + [1] * 125 + [2] * 128, np.int32)
    rows = GroupedRows(jnp.ones((256, 128), jnp.bfloat16), jnp.asarray(labels), "contiguous", 128)
    with pytest.raises(ShapeError, match=r"rows 0\.\.127 are one tile but have labels \[0, 1\]"):
        grouped_gemm(rows, _markers(3))
    labels[:128] = [-1] * 125 + [1] * 3
    with pytest.raises(ShapeError, match=r"labels \[-1, 1\]"):
        grouped_gemm(GroupedRows(rows.rows, jnp.asarray(labels), "contiguous", 128), _markers(3))


def test_c_traced_a_tile_takes_the_expert_of_its_first_row() -> None:
    labels = jnp.array([1] * 5 + [-1] * 3 + [-1] * 8 + [0] * 8, jnp.int32)
    run = jax.jit(lambda labels: grouped_gemm(GroupedRows(jnp.ones((24, 128)), labels, "contiguous", 8), _markers(2)))
    np.testing.assert_array_equal(np.asarray(run(labels))[:, 0], [2] * 5 + [0] * 11 + [1] * 8)
