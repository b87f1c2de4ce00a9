"""The deepep transport on the model of its kernels, against AllToAll: formats, layers, gradients, hostile inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxmoe.config import Execution, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.dispatch.all_to_all import AllToAll
from jaxmoe.dispatch.deepep import DeepEP
from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.layer.build import make_params
from jaxmoe.layer.pipeline import moe
from jaxmoe.parallel import ParallelLayout, moe_parallel, shard_params
from jaxmoe.quant.formats import BF16, MXFP8, FP8Block, FP8BlockUE8M0
from jaxmoe.router import Routing
from jaxmoe.testing import calc_diff

E, H, K, M = 8, 128, 3, 6
FORMATS = ("normal", "v2", "v2_psum", "ll")
VARIANTS = [(f, True) for f in FORMATS] + [("v2", False), ("v2_psum", False), ("ll", False)]


def make_ids(rng: np.random.Generator, ranks: int, kind: str) -> np.ndarray:
    """[R·M, K] of a kind."""
    tokens = ranks * M
    ids = np.stack([rng.permutation(E)[:K] for _ in range(tokens)]).astype(np.int32)
    if kind == "holes":
        ids[rng.random(ids.shape) < 0.4] = -1
    if kind == "one":
        ids[:] = (3, -1, -1)
    if kind == "repeats":
        ids[::2, 1] = ids[::2, 0]
        ids[1] = ids[1, 0]
    if kind == "some_ranks":  # ranks without tokens, and ranks that receive none
        ids[: tokens // 2] = -1
        ids[ids >= E // 2] = -1
    if kind == "none":
        ids[:] = -1
    return ids


def there_and_back(transport, mesh, num_experts=E):
    """Every row is weighted and summed as experts that scale by 1 + their global id."""

    def body(x, ids, weights):
        sent = transport.dispatch(x, ids, weights, num_experts)
        own = transport.held(num_experts, 0)
        scale = (1 + jax.lax.axis_index("d") * own + jnp.maximum(sent.ids, 0)).astype(jnp.float32)
        total = jnp.sum(jnp.where(sent.ids >= 0, sent.weights * scale, 0.0), -1, keepdims=True)
        rows = sent.x if not hasattr(sent.x, "rows") else sent.x.values.reshape(-1, sent.x.values.shape[-1])
        rows = jnp.where((sent.ids >= 0).any(-1, keepdims=True), rows.astype(jnp.float32), 0.0)
        return transport.combine(rows * total, sent)

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")))


KINDS = ("random", "holes", "one", "repeats", "some_ranks", "none")


@pytest.fixture(scope="module")
def oracle():
    """The transport of XLA's collectives over 4 ranks, compiled once."""
    return there_and_back(AllToAll("d"), Mesh(np.array(jax.devices()[:4]), "d"))


@pytest.mark.parametrize(("format", "deterministic"), VARIANTS)
def test_same_as_all_to_all(rng, model, mesh_of, oracle, format, deterministic):
    context = model.ModelContext("d", 4, tokens=M, hidden=H, num_experts=E, top_k=K)
    run = there_and_back(DeepEP(context, format, deterministic), mesh_of(4))
    for kind in KINDS:
        ids = make_ids(rng, 4, kind)
        weights = np.where(ids >= 0, rng.random(ids.shape), np.nan).astype(np.float32)
        x = jnp.asarray(rng.integers(-4, 5, (ids.shape[0], H)), jnp.bfloat16)
        args = (x, jnp.asarray(ids), jnp.asarray(weights))
        want = oracle(*args)
        np.testing.assert_allclose(run(*args), want, rtol=2e-2, atol=1e-2, err_msg=kind)
        assert kind == "none" or np.abs(want).max() > 1


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("format", FORMATS)
def test_any_number_of_ranks(rng, model, mesh_of, format, ranks):
    """Fewer and more ranks than choices; fewer tokens than the buffer holds."""
    context = model.ModelContext("d", ranks, tokens=M + 3, hidden=H, num_experts=E, top_k=K)
    ids = make_ids(rng, ranks, "holes")
    x = jnp.asarray(rng.integers(-4, 5, (ids.shape[0], H)), jnp.bfloat16)
    args = (x, jnp.asarray(ids), jnp.ones(ids.shape, jnp.float32))
    want = there_and_back(AllToAll("d"), mesh_of(ranks))(*args)
    got = there_and_back(DeepEP(context, format), mesh_of(ranks))(*args)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-2)


def test_normal_order_is_sender_then_token(rng, model, mesh_of):
    ranks = 4
    context = model.ModelContext("d", ranks, tokens=M, hidden=H, num_experts=E, top_k=K)
    ids = make_ids(rng, ranks, "holes")
    x = jnp.broadcast_to(jnp.arange(ranks * M, dtype=jnp.bfloat16)[:, None], (ranks * M, H))

    def body(x, ids, weights):
        sent = DeepEP(context, "normal").dispatch(x, ids, weights, E)
        return jnp.where((sent.ids >= 0).any(-1), sent.x[:, 0], -1.0), sent.ids

    run = jax.jit(jax.shard_map(body, mesh=mesh_of(ranks), in_specs=P("d"), out_specs=P("d")))
    rows, local = (np.asarray(a).reshape(ranks, ranks * M, -1) for a in run(x, jnp.asarray(ids), jnp.ones(ids.shape)))
    for rank in range(ranks):
        mine = (ids // (E // ranks) == rank) & (ids >= 0)
        expected = np.flatnonzero(mine.any(1))
        np.testing.assert_array_equal(rows[rank, : len(expected), 0], expected)
        assert (rows[rank, len(expected) :] == -1).all() and (local[rank, len(expected) :] == -1).all()
        np.testing.assert_array_equal(
            local[rank, : len(expected)], np.where(mine, ids - rank * (E // ranks), -1)[expected]
        )


@pytest.mark.parametrize("format", ["v2_psum", "ll"])
def test_grouped_order_is_expert_sender_token(rng, model, mesh_of, format):
    ranks = 4
    context = model.ModelContext("d", ranks, tokens=M, hidden=H, num_experts=E, top_k=K)
    ids = make_ids(rng, ranks, "holes")
    x = jnp.broadcast_to(jnp.arange(ranks * M, dtype=jnp.bfloat16)[:, None], (ranks * M, H))

    def body(x, ids, weights):
        sent = DeepEP(context, format).dispatch(x, ids, weights, E)
        values = sent.x.values.reshape(-1, H)[:, 0]
        return jnp.where(sent.ids[:, 0] >= 0, values, -1.0), sent.ids, sent.x.group

    run = jax.jit(jax.shard_map(body, mesh=mesh_of(ranks), in_specs=P("d"), out_specs=P("d")))
    out = run(x, jnp.asarray(ids), jnp.ones(ids.shape))
    rows, local, group = (np.asarray(a).reshape(ranks, -1) for a in out)
    for rank in range(ranks):
        start = 0
        for e in range(E // ranks):
            expected = np.flatnonzero((ids == rank * (E // ranks) + e).any(1))
            if format == "ll":
                start = e * ((ranks * M + 7) // 8 * 8)
                assert group[rank, e] == len(expected)
            else:
                assert group[rank, e] == start + len(expected)
            np.testing.assert_array_equal(rows[rank, start : start + len(expected)], expected)
            assert (local[rank, start : start + len(expected)] == e).all()
            start = -(-(start + len(expected)) // 8) * 8
        assert (local[rank] >= 0).sum() == (ids // (E // ranks) == rank)[ids >= 0].sum() if (ids < 0).any() else True


def layer(rng, fmt=BF16, fused=False, hidden=H):
    inter = 128
    shared = SharedExperts(intermediate=inter, fused=True) if fused else None
    config = MoEConfig(
        hidden=hidden,
        intermediate=inter,
        router=RouterConfig(num_experts=E, top_k=K),
        weights=fmt,
        shared=shared,
        partial_blocks=True,
    )
    shapes = {"gate": (E, inter, hidden), "up": (E, inter, hidden), "down": (E, hidden, inter)}
    shapes["router_kernel"] = (hidden, E)
    if fused:
        shapes |= {"shared_gate": (inter, hidden), "shared_up": (inter, hidden), "shared_down": (hidden, inter)}
    arrays = {n: jnp.asarray(rng.normal(size=s) / np.sqrt(s[-1]), jnp.float32) for n, s in shapes.items()}
    params = make_params(config, **arrays)
    if fmt is BF16:
        params = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim == 3 else a, params)
    return config, params


LAYER_CASES = [
    (BF16, "auto", "ll", True),
    (BF16, "auto", "v2_psum", True),
    (FP8Block, "auto", "v2", True),
    (FP8Block, "auto", "ll", False),
    (FP8BlockUE8M0, "fp8", "v2_psum", True),
    (MXFP8, "auto", "v2", False),
    (FP8Block, "bf16", "v2_psum", False),
]


@pytest.mark.parametrize(("fmt", "wire", "format", "fused"), LAYER_CASES)
def test_whole_layer_equals_one_device(rng, model, mesh_of, fmt, wire, format, fused):
    """DP × EP over 4 ranks, invalid NaN tokens; fused shared experts live on every rank."""
    ranks = 4
    config, params = layer(rng, fmt, fused)
    context = model.ModelContext(
        ("d",), ranks, tokens=M, hidden=H, num_experts=E, top_k=K + fused, replicated=int(fused), weights=fmt, wire=wire
    )
    mesh, layout = mesh_of(ranks), ParallelLayout(tokens=P("d"), experts="d")
    execution = Execution(row_alignment=8)
    x = rng.normal(size=(ranks * M - 1, H)).astype(np.float32)
    valid = rng.random(len(x)) < 0.8
    x[~valid] = np.nan
    x, valid = jnp.asarray(x, jnp.bfloat16), jnp.asarray(valid)
    want = np.float32(jax.jit(lambda p, x, v: moe(p, x, config, execution, valid=v))(params, x, valid))
    sharded = shard_params(params, config, layout, mesh)
    got = moe_parallel(sharded, x, config, layout, mesh, execution, valid=valid, transport=DeepEP(context, format))
    got = np.asarray(got, np.float32)
    assert got.shape == want.shape and (got[~np.asarray(valid)] == 0).all() and np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())
    assert calc_diff(got, want) < 1e-4


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(rng, model, mesh_of, tokens):
    config, params = layer(rng)
    context = model.ModelContext("d", 4, tokens=M, hidden=H, num_experts=E, top_k=K)
    mesh, layout = mesh_of(4), ParallelLayout(tokens=P("d"), experts="d")
    x = jnp.asarray(rng.normal(size=(tokens, H)), jnp.bfloat16)
    sharded = shard_params(params, config, layout, mesh)
    want = jax.jit(lambda x: moe(params, x, config))(x)
    for format in ("v2", "ll"):
        got = moe_parallel(sharded, x, config, layout, mesh, transport=DeepEP(context, format))
        np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=0, atol=2e-2)


@pytest.mark.parametrize("hidden", [72, 300])
def test_widths_that_the_kernels_do_not_take(rng, model, mesh_of, hidden):
    config, params = layer(rng, hidden=hidden)
    context = model.ModelContext("d", 2, tokens=M, hidden=hidden, num_experts=E, top_k=K)
    mesh, layout = mesh_of(2), ParallelLayout(tokens=P("d"), experts="d")
    x = jnp.asarray(rng.normal(size=(2 * M, hidden)), jnp.bfloat16)
    sharded = shard_params(params, config, layout, mesh)
    got = moe_parallel(sharded, x, config, layout, mesh, transport=DeepEP(context))
    want = np.float32(jax.jit(lambda x: moe(params, x, config))(x))
    np.testing.assert_allclose(np.float32(got), want, rtol=0, atol=2e-2 * np.abs(want).max())


@pytest.mark.parametrize(
    ("format", "deterministic"), [("v2", True), ("v2_psum", True), ("v2_psum", False), ("ll", True)]
)
def test_gradients_equal_those_of_all_to_all(rng, model, mesh_of, format, deterministic):
    """Of x, the combine weights, and the experts; through NaN in rows that nothing arrived in."""
    ranks = 4
    config, params = layer(rng)
    context = model.ModelContext("d", ranks, tokens=M, hidden=H, num_experts=E, top_k=K)
    mesh, layout = mesh_of(ranks), ParallelLayout(tokens=P("d"), experts="d")
    sharded = shard_params(params, config, layout, mesh)
    ids = jnp.asarray(make_ids(rng, ranks, "holes"))
    weights = jnp.asarray(rng.random(ids.shape), jnp.float32)
    x = jnp.asarray(rng.normal(size=(ranks * M, H)), jnp.bfloat16)
    c = jnp.asarray(rng.normal(size=(ranks * M, H)), jnp.float32)

    def loss(params, x, weights, transport):
        y = moe_parallel(params, x, config, layout, mesh, routing=Routing(ids, weights), transport=transport)
        return jnp.sum(c * y.astype(jnp.float32))

    grads = [
        jax.jit(jax.grad(lambda *a, t=t: loss(*a, t), argnums=(0, 1, 2), allow_int=True))(sharded, x, weights)
        for t in (DeepEP(context, format, deterministic), AllToAll("d"))
    ]
    pairs = [(g, w) for g, w in zip(*map(jax.tree.leaves, grads), strict=True) if w.dtype != jax.dtypes.float0]
    assert len(pairs) >= 4
    for got, want in pairs:
        got, want = np.float32(got), np.float32(want)
        assert np.isfinite(got).all()
        if np.abs(want).max() > 0:
            assert calc_diff(got, want) < 2e-4, (got.shape, calc_diff(got, want))


def test_quantised_rows_have_no_gradient_and_say_so(rng, model, mesh_of):
    context = model.ModelContext("d", 2, tokens=M, hidden=H, num_experts=E, top_k=K, weights=FP8Block)
    run = jax.shard_map(
        lambda x, ids, w: jnp.sum(DeepEP(context).dispatch(x, ids, w, E).weights)[None],
        mesh=mesh_of(2),
        in_specs=P("d"),
        out_specs=P("d"),
    )
    args = (jnp.ones((2 * M, H), jnp.bfloat16), jnp.zeros((2 * M, K), jnp.int32), jnp.ones((2 * M, K)))
    with pytest.raises(NotImplementedError, match=r"no gradient; make the EpContext with wire='bf16'"):
        jax.jit(jax.grad(lambda w: jnp.sum(run(args[0], args[1], w))))(args[2])


def test_refusals(model, mesh_of):
    context = model.ModelContext("d", 2, tokens=M, hidden=H, num_experts=E, top_k=K)

    def call(tokens=M, hidden=H, k=K, dtype=jnp.bfloat16, num_experts=E, ranks=2, format="v2"):
        x, ids = jnp.ones((ranks * tokens, hidden), dtype), jnp.zeros((ranks * tokens, k), jnp.int32)
        body = lambda x, ids, w: DeepEP(context, format).dispatch(x, ids, w, num_experts).ids  # noqa: E731
        jax.shard_map(body, mesh=mesh_of(ranks), in_specs=P("d"), out_specs=P("d"))(x, ids, jnp.ones(ids.shape))

    for options, error, message in (
        ({"tokens": M + 1}, ShapeError, rf"{M + 1} tokens per rank; .* holds {M}: make it with tokens={M + 1}"),
        ({"hidden": 2 * H}, ShapeError, rf"x is \[6, 256\].*takes \[T, {H}\]"),
        ({"k": K + 1}, ShapeError, rf"ids \[6, {K + 1}\]"),
        ({"dtype": jnp.float32}, FormatError, "x is float32.*cast x to it, or use the AllToAll"),
        ({"num_experts": 2 * E}, ShapeError, r"16 experts and 0 fused.*is for 8 and 0"),
        ({"ranks": 4}, ShapeError, r"has 4 devices here.*is for 2 ranks"),
    ):
        with pytest.raises(error, match=message):
            call(**options)
    with pytest.raises(ValueError, match="format is 'v3'"):
        DeepEP(context, "v3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="'normal' is in order"):
        DeepEP(context, "normal", deterministic=False)
