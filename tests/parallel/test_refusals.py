"""What does not fit is refused with its numbers and the way out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.config import SharedExperts
from jaxmoe.dispatch.all_to_all import AllToAll
from jaxmoe.errors import ShapeError
from jaxmoe.layer.pipeline import moe
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.testing import marker_layer


def test_an_axis_has_one_job():
    with pytest.raises(ValueError, match=r"'d' is in layout.experts and in layout.intermediate"):
        ParallelLayout(experts=("e", "d"), intermediate="d")
    with pytest.raises(ValueError, match=r"layout.tokens names mesh axis 'd' twice"):
        ParallelLayout(tokens=P("d", ("e", "d")))


@pytest.mark.parametrize(
    ("layout", "change", "error", "message"),
    [
        (ParallelLayout(experts="q"), {}, ValueError, r"experts names axis 'q'; the mesh has 'd' \(3\), 'e' \(2\)"),
        (ParallelLayout(tokens=P(None, "x")), {}, ValueError, r"tokens names axis 'x'"),
        (ParallelLayout(experts="d"), {}, ShapeError, r"experts 4 does not divide by the 3 devices.*divides 4"),
        (ParallelLayout(intermediate="d"), {}, ShapeError, r"intermediate 128 does not divide by the 3 devices"),
        (ParallelLayout(shared="d"), {}, ShapeError, r"shared intermediate 128 does not divide by the 3"),
        (
            ParallelLayout(shared="e"),
            {"shared": SharedExperts(intermediate=128, fused=True)},
            ValueError,
            r"layout.shared is \('e',\) but the shared experts are fused.*fused=False",
        ),
    ],
)
def test_layout_mesh_and_layer(mesh, layout, change, error, message):
    config, params = marker_layer(4, 2, shared=1.0)
    config = dataclasses.replace(config, **change)
    devices = mesh(d=3, e=2)
    for call in (
        lambda: shard_params(params, config, layout, devices),
        lambda: moe_parallel(params, jnp.ones((6, 128), jnp.bfloat16), config, layout, devices),
    ):
        with pytest.raises(error, match=message):
            call()


def test_inputs(mesh):
    config, params = marker_layer(4, 2)
    devices, x = mesh(e=4), jnp.ones((8, 128), jnp.bfloat16)
    layout = ParallelLayout(tokens=P("e"), experts="e")
    sharded = shard_params(params, config, layout, devices)
    with pytest.raises(ShapeError, match=r"cuts 2 leading axes; x is \[8, 128\], which has 1"):
        moe_parallel(sharded, x, config, dataclasses.replace(layout, tokens=P(None, "e")), devices)
    with pytest.raises(ValueError, match=r"AllToAll.*layout.experts names no mesh axis"):
        moe_parallel(params, x, config, ParallelLayout(), devices, transport=AllToAll("e"))
    with pytest.raises(ShapeError, match=r"gate_up holds 1 experts; the config says 4"):  # not cut along I
        moe_parallel(params, x, config, ParallelLayout(intermediate="e"), devices)
    config, params = marker_layer(4, 2, shared=1.0, fused=True)
    sharded = shard_params(params, config, layout, devices)
    with pytest.raises(ShapeError, match=r"gate_up holds 4 experts; the config says 3"):  # fused copies for 4 devices
        moe_parallel(sharded, x, config, ParallelLayout(experts="d"), mesh(d=2, e=2))
    with pytest.raises(ShapeError, match="capacity is 0; it must be at least 1"):
        AllToAll("e", 0)


def test_transport_in_a_shard_map_of_ones_own(mesh):
    """Experts that do not divide; a stack that holds others than the transport would send."""
    config, params = marker_layer(4, 2)
    x = jnp.ones((6, 128), jnp.bfloat16)
    for ranks, message in ((3, "4 experts do not divide over the 3 ranks of mesh axis 'e'"), (2, "holds 4 .* says 2")):
        run = jax.shard_map(
            lambda p, x: moe(p, x, config, transport=AllToAll("e")),
            mesh=mesh(e=ranks),
            in_specs=(P(), P("e")),
            out_specs=P("e"),
        )
        with pytest.raises(ShapeError, match=message):
            run(params, x)
