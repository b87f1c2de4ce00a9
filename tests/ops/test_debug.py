"""Debug mode: traced groupings and scales that kernels would silently misread stop the program, and name the value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxmoe import debug
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.target import target
from jaxmoe.ops.debug import debugging
from jaxmoe.ops.grouped_gemm import grouped_gemm
from jaxmoe.ops.quantize import quantize
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.quant.formats import BF16, MXFP8
from jaxmoe.quant.tensors import GroupedWeight, QuantizedRows
from jaxmoe.quant.weights import quantize_weight

E, K = 2, 128
# JAX turns the error of a callback into a ValueError when a compiled program is called again on CPU.
STOPPED = (jax.errors.JaxRuntimeError, ValueError)


def multiply(group: jax.Array, layout: Any, x: Any = None) -> jax.Array:
    if x is None:
        x = jnp.zeros((E, 8, K) if layout == "masked" else (16, K), jnp.bfloat16)
    fmt = MXFP8 if isinstance(x, QuantizedRows) else BF16
    weight = quantize_weight(jnp.zeros((E, 8, K), jnp.bfloat16), fmt)
    return grouped_gemm(GroupedRows(x, group, layout, 8), weight)


@pytest.mark.parametrize(
    ("layout", "good", "bad", "message"),
    [
        ("contiguous", [0] * 8 + [1] * 8, [0] * 3 + [1] * 13, r"rows 0..7 are one tile .* labels \[0, 1\]"),
        ("contiguous", [-1] * 16, [0] * 8 + [2] * 8, r"labels must lie in -1..1, got 0..2"),
        ("psum", [3, 16], [9, 3], r"psum ends \[9, 3\] must not fall"),
        ("psum", [0, 0], [3, 17], r"psum ends \[3, 17\] .* lie in 0..M = 16"),
        ("masked", [8, 0], [3, 9], r"masked counts \[3, 9\] do not lie in 0..C = 8"),
        ("masked", [0, 0], [-1, 3], r"masked counts \[-1, 3\]"),
    ],
)
def test_traced_groupings(layout, good, bad, message):
    """F02 C: labels packed at a finer step than a tile are an error, not a result, when only the device knows them."""
    run = jax.jit(multiply, static_argnums=1)
    good, bad = jnp.array(good, jnp.int32), jnp.array(bad, jnp.int32)
    assert "callback" not in run.lower(bad, layout).as_text()
    with debug():
        jax.block_until_ready(run(good, layout))
        with pytest.raises(STOPPED, match=f"(?s)ShapeError: .*{message}"):
            jax.block_until_ready(run(bad, layout))
        jax.block_until_ready(run(good, layout))


def test_scales_of_rows_that_belong_to_no_expert_may_be_anything():
    x = quantize(jnp.ones((16, K), jnp.bfloat16), MXFP8.activation)
    x = QuantizedRows(x.values, x.scales.at[:, 5].set(-1), x.quant)
    run = jax.jit(multiply, static_argnums=1)
    with debug():
        jax.block_until_ready(run(jnp.array([5, 8], jnp.int32), "psum", x))
        with pytest.raises(STOPPED, match=r"4 UE8M0 scales of the rows .* is 255 at row \[5\]"):
            jax.block_until_ready(run(jnp.array([6, 8], jnp.int32), "psum", x))


def test_inside_scan_vmap_and_shard_map():
    good, bad = jnp.array([[3, 16], [0, 8]], jnp.int32), jnp.array([[3, 16], [9, 3]], jnp.int32)
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    spread = PartitionSpec("d")
    programs = (
        jax.vmap(lambda group: multiply(group, "psum")),
        lambda groups: lax.scan(lambda c, group: (c, multiply(group, "psum")), 0, groups)[1],
        jax.shard_map(lambda groups: multiply(groups[0], "psum")[None], mesh=mesh, in_specs=spread, out_specs=spread),
    )
    with debug():
        for program in programs:
            run = jax.jit(program)
            jax.block_until_ready(run(good))
            with pytest.raises(STOPPED, match=r"psum ends \[9, 3\]"):
                jax.block_until_ready(run(bad))


def test_a_wrong_grouping_never_reaches_the_kernel(launches):
    weight = GroupedWeight(jnp.zeros((E, 64, K), jnp.bfloat16), None, BF16, K)

    @jax.jit
    def run(group):
        return grouped_gemm(GroupedRows(jnp.zeros((256, K), jnp.bfloat16), group, "psum", 128), weight)

    with target(Arch("sm_90a", 132)), debug():
        with pytest.raises(STOPPED, match=r"psum ends \[300, 300\]"):
            jax.block_until_ready(run(jnp.array([300, 300], jnp.int32)))
        assert launches() == []
        jax.block_until_ready(run(jnp.array([100, 200], jnp.int32)))
    assert len(launches()) == 1


def test_switch(monkeypatch):
    monkeypatch.delenv("JAXMOE_DEBUG", raising=False)
    assert not debugging()
    with debug():
        assert debugging()
        with debug(False):
            assert not debugging()
    for value, on in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("JAXMOE_DEBUG", value)
        assert debugging() == on
    monkeypatch.setenv("JAXMOE_DEBUG", "1")
    with debug(False):
        assert not debugging()
