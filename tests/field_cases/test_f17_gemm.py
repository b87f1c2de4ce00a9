"""F17, the GEMM's numbers: scale groups that are no multiple of 4, any row count, padding that never shows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import MoEConfig, RouterConfig
from jaxmoe.layer.build import make_params
from jaxmoe.layer.pipeline import moe
from jaxmoe.ops.grouped_gemm import grouped_gemm
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.formats import MXFP4, MXFP8, FP8BlockUE8M0, WeightFormat
from jaxmoe.quant.scale_layout import pack_ue8m0
from jaxmoe.quant.tensors import QuantizedRows
from jaxmoe.quant.weights import from_canonical
from jaxmoe.router import Routing

E4M3 = jnp.float8_e4m3fn
gemm = jax.jit(functools.partial(grouped_gemm, out_dtype=jnp.float32))


@pytest.mark.parametrize(
    ("k", "m"),
    [
        (640, 6),
        (128, 6),
        (384, 6),
        (896, 6),
        (1152, 6),
        (640, 1),
        (640, 2),
        (640, 3),
        (640, 5),
        (640, 127),
        (1152, 129),
    ],
)
def test_a_c_scale_bytes(k: int, m: int) -> None:
    g = k // 128
    r = np.arange(m)[:, None] * (np.arange(m)[:, None] < 6)
    scales = pack_ue8m0(jnp.asarray(120 + np.arange(g) + 3 * r, jnp.uint8))
    if (k, m) == (640, 6):
        assert scales.shape == (2, 8)
        assert [int(word) for word in scales[:, 0].astype(jnp.uint32)] == [0x7B7A7978, 0x7F7F7F7C]
    quant = FP8BlockUE8M0.activation
    assert quant is not None
    rows = GroupedRows(QuantizedRows(jnp.ones((m, k), E4M3), scales, quant), jnp.array([m], jnp.int32), "psum", 1)
    w = from_canonical(jnp.ones((1, 8, k), E4M3), jnp.full((1, 1, g), 127, jnp.uint8), FP8BlockUE8M0)
    want = np.where(np.arange(m) < 6, 8.0 ** np.arange(m), 1) * (2**g - 1)
    np.testing.assert_array_equal(gemm(rows, w), np.broadcast_to(want[:, None], (m, 8)))


@pytest.mark.parametrize("fmt", [MXFP8, MXFP4])
def test_b_ninety_groups(fmt: WeightFormat) -> None:
    """Scales 2^(g mod 3) on the rows (1×32) or, with MXFP4, on the weights; K = 2880 is padded inside to 2944."""
    quant = fmt.activation
    assert quant is not None
    pattern = 127 + np.arange(90) % 3
    on_rows = quant.block == 32
    row_bytes = np.full((1, 2944 // quant.block), 127)
    if on_rows:
        row_bytes[0, :90] = pattern
    codes = jnp.pad(jnp.ones((1, 2880), E4M3), [(0, 0), (0, 64)])
    rows = QuantizedRows(codes, pack_ue8m0(jnp.asarray(row_bytes, jnp.uint8)), quant)
    values = jnp.full((1, 8, 1440), 0x22, jnp.uint8) if fmt.bits == 4 else jnp.ones((1, 8, 2880), E4M3)
    weight_bytes = np.full((1, 8, 90), 127) if on_rows else np.broadcast_to(pattern, (1, 8, 90))
    w = from_canonical(values, jnp.asarray(weight_bytes, jnp.uint8), fmt)
    assert w.k == 2880 and w.k_padded == 2944
    y = gemm(GroupedRows(rows, jnp.array([1], jnp.int32), "psum", 1), w)
    np.testing.assert_array_equal(y, np.full((1, 8), 6720))


@pytest.mark.parametrize("fmt", [FP8BlockUE8M0, MXFP4])
def test_b_output_width(fmt: WeightFormat) -> None:
    """Hidden 2880: y is 2880 wide, not 2944 or 3072, and I = 160 is padded inside."""
    router = RouterConfig(num_experts=2, top_k=1)
    config = MoEConfig(hidden=2880, intermediate=160, router=router, weights=fmt, partial_blocks=True)
    ones = jnp.ones((2, 160, 2880), jnp.bfloat16)
    params = make_params(config, gate=ones / 2880, up=ones / 2880, down=ones.mT / 160)
    routing = Routing(jnp.array([[1]], jnp.int32), jnp.ones((1, 1), jnp.float32))
    y = jax.jit(lambda x: moe(params, x, config, routing=routing))(jnp.ones((1, 2880), jnp.bfloat16))
    assert y.shape == (1, 2880)
    # 1/2880 and 1/160 round to 4 (e4m3) or 2 (e2m1) significant bits: at most 1/16 and 1/4 off, three times.
    assert len(np.unique(np.float32(y))) == 1 and 0.3 < float(y[0, 0]) < 1.2
