"""Shards hold matching slices of gate and up, with their scales, in every format."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.config import SharedExperts
from jaxmoe.parallel import ParallelLayout, param_specs, shard_params
from jaxmoe.quant.formats import FORMATS
from jaxmoe.quant.sharding import slice_experts
from jaxmoe.quant.weights import dequantize


def parts(w):
    """Dequantised gate, up and down of a stack."""
    gate_up = np.asarray(dequantize(w.gate_up))
    return *np.split(gate_up, 2, axis=1), np.asarray(dequantize(w.down))


@pytest.mark.parametrize("inter", [256, 254])
@pytest.mark.parametrize("name", FORMATS)
def test_shards_are_slices(mesh, layer, name, inter):
    """I = 256 cut on blocks; 254 cut inside blocks: widened by zeros, and all of them equally wide."""
    config, params = layer(FORMATS[name], oai=True, inter=inter, hidden=128)
    devices, layout = mesh(t=2, e=4), ParallelLayout(intermediate="t", experts="e")
    sharded = shard_params(params, config, layout, devices).experts
    gate, up, down = parts(params.experts)
    half, share, width = gate.shape[1], inter // 2, sharded.gate_up.n // 2
    for t in range(2):
        mine = slice(t * share, (t + 1) * share)
        shard = jax.tree.map(lambda a, t=t: a[8 * t : 8 * t + 8], sharded)
        grid = FORMATS[name].block
        before = 0 if share % grid == 0 else t * share % grid
        inside = slice(before, before + share)
        wanted = (gate[:, mine], up[:, mine], down[:, :, mine])
        for got, want, axis in zip(parts(shard), wanted, (1, 1, 2), strict=True):
            kept = np.take(got, np.arange(before, before + share), axis)
            np.testing.assert_array_equal(kept, want)
            assert np.count_nonzero(got) == np.count_nonzero(kept)
        bias = np.asarray(sharded.gate_up_bias)[8 * t : 8 * t + 8]
        whole = np.asarray(params.experts.gate_up_bias)
        np.testing.assert_array_equal(bias[:, :width][:, inside], whole[:, mine])
        np.testing.assert_array_equal(bias[:, width:][:, inside], whole[:, half + t * share : half + (t + 1) * share])
    np.testing.assert_array_equal(sharded.down_bias, params.experts.down_bias)
    assert {s.data.shape[0] for s in sharded.gate_up.values.addressable_shards} == {2}


def test_fused_shared_experts_are_on_every_part_of_the_experts(mesh, layer):
    config, params = layer(FORMATS["MXFP8"], shared=SharedExperts(intermediate=40, fused=True))
    devices, layout = mesh(e=4), ParallelLayout(experts="e")
    sharded = shard_params(params, config, layout, devices)
    assert sharded.experts.gate_up.num_experts == 4 * 3
    for rank in range(4):
        for part in ("gate_up", "down"):
            whole, mine = getattr(params.experts, part), getattr(sharded.experts, part)
            mine = dequantize(slice_experts(mine, 3 * rank, 3 * rank + 3))
            np.testing.assert_array_equal(mine[:2], dequantize(slice_experts(whole, 2 * rank, 2 * rank + 2)))
            np.testing.assert_array_equal(mine[2:], dequantize(slice_experts(whole, 8, 9)))


def test_specs_are_where_the_parameters_are(mesh, layer):
    shared = SharedExperts(intermediate=40, gate=True)
    config, params = layer(oai=True, shared=shared)
    devices = mesh(t=2, e=4)
    layout = ParallelLayout(intermediate="t", experts="e", shared="t")
    specs = param_specs(config, layout)
    assert specs.experts.gate_up == P(("t", "e")) and specs.experts.down_bias == P(("e",))
    assert specs.router == P() and specs.shared.experts.down == P(("t",))
    sharded = shard_params(params, config, layout, devices)
    assert sharded.shared.experts.gate_up.values.shape == (2, 40, 72)
    assert sharded.experts.down.values.sharding.spec == P(("t", "e"))
