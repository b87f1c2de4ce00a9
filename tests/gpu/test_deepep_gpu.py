"""DeepEP's kernels on GPUs: in JAX on as many ranks as there are, as ranks that share a GPU, and over processes.

In several processes, which may share GPUs: ``python -m jaxmoe.testing.ranks 2 -m pytest tests/gpu/test_deepep_gpu.py``.
"""

from __future__ import annotations

import os
import pathlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxmoe.config import MoEConfig, RouterConfig, SharedExperts
from jaxmoe.cuda.driver import driver
from jaxmoe.dispatch.all_to_all import AllToAll
from jaxmoe.dispatch.deepep import DeepEP, EpContext
from jaxmoe.layer.build import make_params
from jaxmoe.ops.rows import GroupedRows
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.quant.formats import BF16, FP8Block, WeightFormat
from jaxmoe.router import Routing
from jaxmoe.testing import calc_diff
from jaxmoe.testing.files import load_file
from jaxmoe.testing.ranks import Ended, run_ranks, spread, whole

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deep_ep_toolchain")]

HERE = pathlib.Path(__file__).parent
E, K, H, INTER = 16, 4, 1024, 512
FORMATS = ("normal", "v2", "v2_psum", "ll")
VARIANTS = [(f, True) for f in FORMATS] + [("v2", False), ("v2_psum", False)]


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.multigpu(n)) for n in (1, 2, 4, 8)])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return Mesh(np.array(jax.devices()[: request.param]), "d")


def cut(mesh: Mesh, *arrays: np.ndarray) -> list[jax.Array]:
    return [spread(a, mesh, P("d")) for a in arrays]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(jnp.bfloat16)


@pytest.fixture(scope="module")
def model() -> ModuleType:
    return load_file(HERE.parent / "dispatch" / "model.py")


def context_of(mesh: Mesh, tokens: int, **options: Any) -> EpContext:
    sizes = {"tokens": tokens, "hidden": H, "num_experts": E, "top_k": K, "timeout_seconds": 10}
    return EpContext(mesh, "d", **sizes | options)


def random_ids(rng: np.random.Generator, rows: int) -> np.ndarray:
    ids = np.argsort(rng.random((rows, E)), axis=1)[:, :K].astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    ids[1::3, 1] = ids[1::3, 0]
    return ids


def rooms(transport: DeepEP):
    """What arrives, without what was never written, and what comes back of it."""

    def body(x: jax.Array, ids: jax.Array, weights: jax.Array) -> dict[str, jax.Array]:
        sent = transport.dispatch(x, ids, weights, E)
        rows = sent.x.rows if isinstance(sent.x, GroupedRows) else sent.x
        scales = None if isinstance(rows, jax.Array) else rows.scales
        values = rows if isinstance(rows, jax.Array) else rows.values
        values = values.reshape(-1, values.shape[-1])
        real = (sent.ids >= 0).any(-1, keepdims=True)
        values = jnp.where(real, values.astype(jnp.float32), 0.0)
        weight = jnp.sum(jnp.where(sent.ids >= 0, sent.weights, 0.0), -1, keepdims=True)
        out = {"values": values, "ids": sent.ids, "weights": sent.weights}
        if scales is not None and scales.ndim == 2:
            out["scales"] = jnp.where(real[:, 0], scales[:, : values.shape[0]], 0.0).T
        return out | {"back": transport.combine(values * weight, sent)}

    return body


def on(mesh: Mesh, body: Any) -> Any:
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")))


@pytest.mark.parametrize("tokens", [1, 128, 1024])
@pytest.mark.parametrize("fmt", [BF16, FP8Block], ids=repr)
@pytest.mark.parametrize(("format", "deterministic"), VARIANTS)
def test_kernels_are_the_model(rng, mesh, model, format, deterministic, fmt, tokens):
    """To the bit: rows, scales, ids, weights in their places, and sums. Where the kernel chooses places, sums."""
    ids = random_ids(rng, mesh.size * tokens)
    # Eighths: their sums are exact, in whatever order the two programs take them.
    weights = np.float32(rng.integers(1, 9, ids.shape) / 8)
    args = cut(mesh, normal(rng, ids.shape[0], H), ids, weights)
    most = tokens + 7 * (tokens == 128)
    sizes = {"tokens": most, "hidden": H, "num_experts": E, "top_k": K, "weights": fmt}
    stand = model.ModelContext("d", mesh.size, alignment=128, **sizes)
    with context_of(mesh, most, weights=fmt) as context:
        run = on(mesh, rooms(DeepEP(context, format, deterministic)))
        got = [whole(run(*args)) for _ in range(2)][1]
    want = whole(on(mesh, rooms(DeepEP(stand, format, deterministic)))(*args))
    for name in got if deterministic else ("back",):
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def layer(rng: np.random.Generator, fmt: WeightFormat, fused: bool = False):
    shared = SharedExperts(intermediate=INTER, fused=True) if fused else None
    router = RouterConfig(num_experts=E, top_k=K)
    config = MoEConfig(hidden=H, intermediate=INTER, router=router, weights=fmt, shared=shared)
    shapes = {"gate": (E, INTER, H), "up": (E, INTER, H), "down": (E, H, INTER), "router_kernel": (H, E)}
    if fused:
        shapes |= {"shared_gate": (INTER, H), "shared_up": (INTER, H), "shared_down": (H, INTER)}
    arrays = {n: jnp.asarray(rng.normal(size=s) / np.sqrt(s[-1]), jnp.float32) for n, s in shapes.items()}
    params = make_params(config, **arrays)
    if fmt is BF16:
        params = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim == 3 else a, params)
    return config, params


LAYOUT = ParallelLayout(tokens=P("d"), experts="d")


# A slab of R·M rows per expert is for decoding.
LAYERS = [(f, t) for f in ("v2", "v2_psum", "ll") for t in (0, 1, 128, 4096) if f != "ll" or t <= 128]


@pytest.mark.parametrize(("format", "tokens"), LAYERS)
@pytest.mark.parametrize("fmt", [BF16, FP8Block], ids=repr)
def test_layer_equals_all_to_all(rng, mesh, format, fmt, tokens):
    fused = format != "ll"
    config, params = layer(rng, fmt, fused)
    sharded = shard_params(params, config, LAYOUT, mesh)
    valid = rng.random(mesh.size * tokens) < 0.9
    x = np.where(valid[:, None], normal(rng, valid.size, H), np.nan).astype(jnp.bfloat16)
    x, valid = cut(mesh, x, valid)
    want = np.float32(whole(moe_parallel(sharded, x, config, LAYOUT, mesh, valid=valid)))
    with context_of(mesh, max(tokens, 1), weights=fmt, top_k=K + fused, replicated=int(fused)) as context:
        y = moe_parallel(sharded, x, config, LAYOUT, mesh, valid=valid, transport=DeepEP(context, format))
        got = np.float32(whole(y))
    assert got.shape == want.shape and np.isfinite(got).all()
    assert not tokens or calc_diff(got, want) < 1e-4


def test_a_thousand_times_under_scan(rng, mesh):
    """Every step gives the bits of the first, with two contexts in turn."""
    tokens, steps = 64, 500
    rows = mesh.size * tokens
    args = cut(mesh, normal(rng, rows, H), random_ids(rng, rows), np.ones((rows, K), np.float32))
    with context_of(mesh, tokens) as one, context_of(mesh, tokens + 8, weights=FP8Block) as two:
        steps_of = [rooms(DeepEP(one, "v2", False)), rooms(DeepEP(two, "v2_psum", False))]

        def body(x: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            first = [f(x, ids, weights)["back"] for f in steps_of]

            def step(wrong: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
                # The next step's input hangs on this one's output, as a layer's does.
                here = x + (0 * wrong.astype(x.dtype)) * i.astype(x.dtype)
                for f, want in zip(steps_of, first, strict=True):
                    back = f(here, ids, weights)["back"]
                    wrong = wrong + jnp.sum(back != want, dtype=jnp.int32)
                    here = here + 0 * jnp.where(jnp.isfinite(back), back, 0).astype(x.dtype)
                return wrong, None

            start = 0 * jnp.sum(ids)
            return jax.lax.scan(step, start, jnp.arange(steps))[0][None], first[0]

        wrong, first = whole(on(mesh, body)(*args))
    assert not wrong.any() and np.abs(first).max() > 1


def test_independent_exchanges_of_one_context(rng, mesh):
    """Two branches that share nothing but the buffer, beside each other in one program."""
    config, params = layer(rng, BF16)
    sharded = shard_params(params, config, LAYOUT, mesh)
    a, b = cut(mesh, *(normal(rng, mesh.size * 96, H) for _ in range(2)))
    with context_of(mesh, 96) as context:
        transport = DeepEP(context)

        @jax.jit
        def both(sharded: Any, a: jax.Array, b: jax.Array) -> list[jax.Array]:
            return [moe_parallel(sharded, x, config, LAYOUT, mesh, transport=transport) for x in (a, b)]

        for _ in range(5):
            got = both(sharded, a, b)
        want = [moe_parallel(sharded, x, config, LAYOUT, mesh, transport=transport) for x in (a, b)]
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(whole(g), whole(w))


def test_command_buffers_change_nothing(rng, mesh):
    """Two exchanges, in a program long enough to be recorded; run more often than XLA needs to replay it."""
    ids = random_ids(rng, mesh.size * 64)
    args = cut(mesh, normal(rng, ids.shape[0], H), ids, np.float32(rng.integers(1, 9, ids.shape) / 8))

    def both(transport: DeepEP):
        def body(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            once = rooms(transport)(x, ids, weights)["back"]
            return rooms(transport)((once * 2).astype(jnp.bfloat16), ids, weights)["back"]

        return on(mesh, body)

    with context_of(mesh, 64) as plain, context_of(mesh, 64, command_buffers=True) as recorded:
        want = whole(both(DeepEP(plain))(*args))
        run = both(DeepEP(recorded))
        for _ in range(5):
            np.testing.assert_array_equal(whole(run(*args)), want)


@pytest.mark.parametrize(("format", "deterministic"), [("v2", True), ("v2_psum", True), ("v2_psum", False)])
def test_gradients_equal_those_of_all_to_all(rng, mesh, format, deterministic):
    config, params = layer(rng, BF16)
    sharded = shard_params(params, config, LAYOUT, mesh)
    ids = random_ids(rng, mesh.size * 128)
    x, c = (normal(rng, ids.shape[0], H) for _ in range(2))
    args = cut(mesh, x, np.float32(rng.random(ids.shape)), ids, c)

    def gradient(transport: Any) -> list[np.ndarray]:
        def loss(params: Any, x: jax.Array, weights: jax.Array, ids: jax.Array, c: jax.Array) -> jax.Array:
            y = moe_parallel(params, x, config, LAYOUT, mesh, routing=Routing(ids, weights), transport=transport)
            return jnp.sum((c * y).astype(jnp.float32))

        found = jax.jit(jax.grad(loss, (0, 1, 2)))(sharded, *args)
        return [np.float32(whole(g)) for g in jax.tree.leaves(found)]

    with context_of(mesh, 128) as context:
        got = gradient(DeepEP(context, format, deterministic))
    for g, w in zip(got, gradient(AllToAll("d")), strict=True):
        assert np.isfinite(g).all()
        if np.abs(w).max() > 0:
            assert calc_diff(g, w) < 2e-4, g.shape


def test_close_gives_memory_back_and_programs_say_so(rng, mesh):
    if jax.process_count() > 1:
        pytest.skip("processes share the memory of a GPU")
    ordinal = mesh.devices.flat[0].local_hardware_id
    context = context_of(mesh, 2048)
    args = (jnp.ones((mesh.size * 8, H), jnp.bfloat16), jnp.zeros((mesh.size * 8, K), jnp.int32))
    run = on(mesh, rooms(DeepEP(context)))
    jax.block_until_ready(run(*args, jnp.ones(args[1].shape)))
    before = driver().free_bytes(ordinal)
    context.close()
    assert driver().free_bytes(ordinal) >= before + context.sizes.data_bytes(context.wire)
    with pytest.raises(Exception, match=r"peer context \d+ is not set up"):
        jax.block_until_ready(run(*args, jnp.ones(args[1].shape)))


def test_ranks_that_share_a_gpu() -> None:
    """R = 1, 2, 4 and 8 through the launcher alone, to the bit."""
    virtual = load_file(HERE / "virtual_ranks.py")
    for case in virtual.cases([1, 2, 4, 8]):
        virtual.check(case, virtual.load_model())


def processes(arguments: list[object], count: int, seconds: int) -> list[Ended]:
    """What processes said that run a program of this repository; those that share a GPU take turns."""
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path}
    return run_ranks(arguments, count, env=env, seconds=seconds)


SOME = ("R-v2_psum-True-jaxmoe.FP8Block-128", "R-jaxmoe.BF16-v2-128", "R-jaxmoe.FP8Block-ll-128", "R-v2-True]")


@pytest.mark.parametrize("count", [2, 4])
def test_processes_pass_the_same_tests(count: int) -> None:
    """Some of the above, through handles of the driver and XLA's collectives between processes."""
    some = " or ".join(SOME).replace("R", str(count))
    options = ["-q", "-x", "-p", "no:cacheprovider", "-n", "0", "-k", some]
    for rank in processes(["-m", "pytest", __file__, *options], count, 280):
        assert rank.code == 0 and "4 passed" in rank.out, rank.out[-4000:] + rank.err[-2000:]


@pytest.mark.parametrize("format", ["v2", "v2_psum"])
def test_a_rank_that_never_arrives_ends_in_an_error(format: str) -> None:
    """Also where places follow from all ranks' ids, which are gathered first."""
    first, _ = processes([HERE / "absent_rank.py", format], 2, 150)
    text = first.out + first.err
    assert "EpContext over 'd'" in text and "did not arrive within 3 s" in text, text[-4000:]
