"""Every layout gives what one device gives: router kinds and formats in turn, odd token counts, unused NaN tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.config import Execution, SharedExperts
from jaxmoe.dispatch.all_to_all import AllToAll
from jaxmoe.layer.pipeline import moe
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.quant.formats import FORMATS
from jaxmoe.router import Routing
from jaxmoe.testing import calc_diff

ONE, FOUR, TWO, THREE = {"d": 8}, {"d": 4}, {"d": 2, "e": 4}, {"d": 2, "e": 2, "t": 2}
LAYOUTS = {
    "tp_tp": (ONE, ParallelLayout(intermediate="d", shared="d")),
    "dp_tp": (FOUR, ParallelLayout(tokens=P("d"), intermediate="d", shared="d")),
    "tp_ep": (ONE, ParallelLayout(experts="d", shared="d")),
    "dp_ep": (ONE, ParallelLayout(tokens=P("d"), experts="d")),
    "cp_ep": (ONE, ParallelLayout(tokens=P(None, "d"), experts="d")),
    "cp_tp": (FOUR, ParallelLayout(tokens=P(None, "d"), intermediate="d")),
    "dp_cp_ep": (TWO, ParallelLayout(tokens=P("d", "e"), experts=("e", "d"))),
    "dp_ep_tp": (THREE, ParallelLayout(tokens=P("d"), experts="e", intermediate="t", shared="t")),
    "mixed": (THREE, ParallelLayout(tokens=P(("d", "t")), experts="e", intermediate="t", shared=("t", "e"))),
    "copies": (ONE, ParallelLayout(tokens=P("d"))),
}
KINDS = ("softmax", "grouped", "hash", "gpt_oss", "given")


QUANTISED = {"tp_tp": "FP8Block", "tp_ep": "MXFP4", "dp_ep": "MXFP8", "mixed": "FP8BlockUE8M0"}
CASES = [(name, True) for name in LAYOUTS] + [(name, False) for name in QUANTISED]


@pytest.mark.parametrize(("name", "exact"), CASES, ids=[f"{n}-{'exact' if e else 'quantised'}" for n, e in CASES])
def test_equals_one_device(rng, mesh, layer, name, exact):
    """Exact: to 1e-5 of the largest output. Quantised rows are cut into other blocks where I is cut; then the format's
    bound holds for both GEMMs, and elsewhere 1e-5 again."""
    sizes, layout = LAYOUTS[name]
    index = list(LAYOUTS).index(name)
    fmt = list(FORMATS.values())[index % 5] if exact else FORMATS[QUANTISED[name]]
    kind = KINDS[(index + index // 5 + 3 * (not exact)) % 5]
    config, params = layer(
        fmt,
        router="softmax" if kind == "given" else kind,
        oai=kind == "gpt_oss",
        shared=SharedExperts(intermediate=48, gate=index % 2 == 0),
    )
    x = rng.normal(size=(3, 7, config.hidden)).astype(np.float32)
    valid = rng.random((3, 7)) < 0.8
    x[~valid] = np.nan
    inputs: dict = {"valid": jnp.asarray(valid)}
    if kind == "hash":
        inputs["token_ids"] = jnp.asarray(rng.integers(0, 11, (3, 7)), jnp.int32)
    if kind == "given":
        ids = rng.integers(-1, 8, (21, 3))
        weights = np.where(ids >= 0, rng.random((21, 3)), np.nan)
        inputs["routing"] = Routing(jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32))
    execution, devices = Execution(quantize_activations=not exact), mesh(**sizes)

    want = jax.jit(lambda params, x, inputs: moe(params, x, config, execution, **inputs))(params, x, inputs)
    sharded = shard_params(params, config, layout, devices)
    got = np.asarray(moe_parallel(sharded, jnp.asarray(x), config, layout, devices, execution, **inputs))

    assert got.shape == x.shape and (got[~valid] == 0).all() and np.abs(want).max() > 0.1
    if exact or not layout.intermediate:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert calc_diff(got, want) <= 2 * fmt.max_diff


def test_result_is_cut_like_x_and_counts_may_be_any(rng, mesh, layer):
    """63 tokens per rank as 1008 over 16; one token; none. Capacity: in several exchanges."""
    config, params = layer()
    devices, layout = mesh(d=8), ParallelLayout(tokens=P("d"), experts="d")
    sharded = shard_params(params, config, layout, devices)
    for tokens, capacity in ((504, 20), (1, None), (0, None)):
        x = jnp.asarray(rng.normal(size=(tokens, config.hidden)), jnp.float32)
        y = moe_parallel(sharded, x, config, layout, devices, transport=AllToAll("d", capacity))
        want = jax.jit(lambda x: moe(params, x, config))(x)
        np.testing.assert_allclose(y, want, rtol=0, atol=1e-5)
        if tokens == 504:
            assert y.sharding.is_equivalent_to(jax.NamedSharding(devices, P("d")), 2)


def test_collectives_are_those_of_the_table(mesh, layer):
    """What is exchanged, by layout, forward: nothing is gathered or reduced that the table does not name."""
    config, params = layer(shared=SharedExperts(intermediate=40))
    devices, x = mesh(d=8), jnp.ones((16, config.hidden), jnp.float32)
    for layout, want in (
        (ParallelLayout(intermediate="d", shared="d"), {"psum"}),
        (ParallelLayout(tokens=P("d"), intermediate="d", shared="d"), {"all_gather", "reduce_scatter"}),
        (ParallelLayout(experts="d"), {"all_to_all", "all_gather"}),
        (ParallelLayout(tokens=P("d"), experts="d"), {"all_to_all"}),
        (ParallelLayout(tokens=P("d")), set()),
    ):
        sharded = shard_params(params, config, layout, devices)
        text = str(jax.make_jaxpr(lambda p, x, layout=layout: moe_parallel(p, x, config, layout, devices))(sharded, x))
        names = ("psum", "all_gather", "reduce_scatter", "all_to_all", "ppermute")
        assert {n for n in names if f" {n}[" in text or f" {n}_invariant[" in text} == want, layout
        if want == {"psum"}:
            assert text.count(" psum_invariant[") + text.count(" psum[") == 1
