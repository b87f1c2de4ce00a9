"""DeepEP's kernels on GPUs: in JAX on as many ranks as there are, as ranks that share a GPU, and over processes."""

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
from jaxmoe.testing.ranks import Ended, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deep_ep_toolchain")]

HERE = pathlib.Path(__file__).parent
E, K, H, INTER = 16, 4, 1024, 512
FORMATS = ("normal", "v2", "v2_psum", "ll")
VARIANTS = [(f, True) for f in FORMATS] + [("v2", False), ("v2_psum", False)]


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.multigpu(n)) for n in (1, 2, 4, 8)])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return Mesh(np.array(jax.devices()[: request.param]), "d")


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
    ids = jnp.asarray(random_ids(rng, mesh.size * tokens))
    x = jnp.asarray(rng.standard_normal((ids.shape[0], H)), jnp.bfloat16)
    # Eighths: their sums are exact, in whatever order the two programs take them.
    weights = jnp.asarray(rng.integers(1, 9, ids.shape) / 8, jnp.float32)
    most = tokens + 7 * (tokens == 128)
    sizes = {"tokens": most, "hidden": H, "num_experts": E, "top_k": K, "weights": fmt}
    stand = model.ModelContext("d", mesh.size, alignment=128, **sizes)
    with context_of(mesh, most, weights=fmt) as context:
        run = on(mesh, rooms(DeepEP(context, format, deterministic)))
        got = [jax.device_get(run(x, ids, weights)) for _ in range(2)][1]
    want = jax.device_get(on(mesh, rooms(DeepEP(stand, format, deterministic)))(x, ids, weights))
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
    x = jnp.asarray(rng.standard_normal((mesh.size * tokens, H)), jnp.bfloat16)
    valid = jnp.asarray(rng.random(x.shape[0]) < 0.9)
    x = jnp.where(valid[:, None], x, jnp.nan)
    want = np.float32(moe_parallel(sharded, x, config, LAYOUT, mesh, valid=valid))
    with context_of(mesh, max(tokens, 1), weights=fmt, top_k=K + fused, replicated=int(fused)) as context:
        got = np.float32(moe_parallel(sharded, x, config, LAYOUT, mesh, valid=valid, transport=DeepEP(context, format)))
    assert got.shape == want.shape and np.isfinite(got).all()
    assert not tokens or calc_diff(got, want) < 1e-4


def test_a_thousand_times_under_scan(rng, mesh):
    """Every step gives the bits of the first, with two contexts in turn."""
    tokens, steps = 64, 500
    ids, weights = jnp.asarray(random_ids(rng, mesh.size * tokens)), jnp.ones((mesh.size * tokens, K))
    x = jnp.asarray(rng.standard_normal((ids.shape[0], H)), jnp.bfloat16)
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

        wrong, first = jax.device_get(on(mesh, body)(x, ids, weights))
    assert not wrong.any() and np.abs(first).max() > 1


def test_independent_exchanges_of_one_context(rng, mesh):
    """Two branches that share nothing but the buffer, beside each other in one program."""
    config, params = layer(rng, BF16)
    sharded = shard_params(params, config, LAYOUT, mesh)
    a, b = (jnp.asarray(rng.standard_normal((mesh.size * 96, H)), jnp.bfloat16) for _ in range(2))
    with context_of(mesh, 96) as context:
        transport = DeepEP(context)

        @jax.jit
        def both(a: jax.Array, b: jax.Array) -> list[jax.Array]:
            return [moe_parallel(sharded, x, config, LAYOUT, mesh, transport=transport) for x in (a, b)]

        for _ in range(5):
            got = both(a, b)
        want = [moe_parallel(sharded, x, config, LAYOUT, mesh, transport=transport) for x in (a, b)]
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.float32(g), np.float32(w))


def test_command_buffers_change_nothing(rng, mesh):
    """Two exchanges, in a program long enough to be recorded; run more often than XLA needs to replay it."""
    ids = jnp.asarray(random_ids(rng, mesh.size * 64))
    x = jnp.asarray(rng.standard_normal((ids.shape[0], H)), jnp.bfloat16)
    weights = jnp.asarray(rng.integers(1, 9, ids.shape) / 8, jnp.float32)

    def both(transport: DeepEP):
        def body(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            once = rooms(transport)(x, ids, weights)["back"]
            return rooms(transport)((once * 2).astype(jnp.bfloat16), ids, weights)["back"]

        return on(mesh, body)

    with context_of(mesh, 64) as plain, context_of(mesh, 64, command_buffers=True) as recorded:
        want = np.asarray(both(DeepEP(plain))(x, ids, weights))
        run = both(DeepEP(recorded))
        for _ in range(5):
            np.testing.assert_array_equal(np.asarray(run(x, ids, weights)), want)


@pytest.mark.parametrize(("format", "deterministic"), [("v2", True), ("v2_psum", True), ("v2_psum", False)])
def test_gradients_equal_those_of_all_to_all(rng, mesh, format, deterministic):
    config, params = layer(rng, BF16)
    sharded = shard_params(params, config, LAYOUT, mesh)
    ids = jnp.asarray(random_ids(rng, mesh.size * 128))
    x, c = (jnp.asarray(rng.standard_normal((ids.shape[0], H)), jnp.bfloat16) for _ in range(2))
    weights = jnp.asarray(rng.random(ids.shape), jnp.float32)

    def gradient(transport: Any) -> list[np.ndarray]:
        def loss(params: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
            y = moe_parallel(params, x, config, LAYOUT, mesh, routing=Routing(ids, weights), transport=transport)
            return jnp.sum((c * y).astype(jnp.float32))

        return [np.float32(g) for g in jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1, 2)))(sharded, x, weights))]

    with context_of(mesh, 128) as context:
        got = gradient(DeepEP(context, format, deterministic))
    for g, w in zip(got, gradient(AllToAll("d")), strict=True):
        assert np.isfinite(g).all()
        if np.abs(w).max() > 0:
            assert calc_diff(g, w) < 2e-4, g.shape


def test_close_gives_memory_back_and_programs_say_so(rng, mesh):
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


def processes(count: int, mode: str, seconds: int) -> list[Ended]:
    env = {
        "JAXMOE_TEST_GPUS": str(len(jax.devices())),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    script = HERE / "deepep_processes.py"
    return run_ranks(lambda port, rank: (script, port, rank, count, mode), count, env=env, seconds=seconds)


@pytest.mark.parametrize("count", [2, 4])
def test_processes_give_what_one_device_gives(count: int) -> None:
    """Through handles of the driver; several processes on a GPU take turns."""
    for rank in processes(count, "layer", 150):
        assert rank.code == 0 and "equal 3" in rank.out, rank.out[-2000:] + rank.err[-4000:]


def test_a_rank_that_never_arrives_ends_in_an_error() -> None:
    first, _ = processes(2, "absent", 90)
    text = first.out + first.err
    assert "EpContext over 'd'" in text and "did not arrive within 3 s" in text, text[-4000:]
