"""The whole layer against the float64 formula: every format, layout and activation."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import Activation, Execution, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.layer.build import make_params
from jaxmoe.layer.params import MoEParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.ops.grouped_gemm import BACKENDS
from jaxmoe.ops.shapes import Shape, routings
from jaxmoe.quant.formats import BF16, FORMATS, MXFP8, FP8Block, WeightFormat
from jaxmoe.router import Routing
from jaxmoe.testing import calc_diff, dense_moe, marker_layer

ACTIVATIONS = {
    "silu": Activation(),
    "clamped": Activation(kind="clamped", limit=0.7),
    "oai": Activation(kind="oai", limit=1.5, keep_fp32=True),
    "situ": Activation(kind="situ", beta_gate=2.0, beta_up=1.5, keep_fp32=True),
}
LAYOUTS = ("psum", "masked", "contiguous")
jitted = jax.jit(moe, static_argnames=("config", "execution"))


def layer(
    rng: np.random.Generator, fmt: WeightFormat, activation: Activation, hidden: int, inter: int, **changes: object
) -> tuple[MoEConfig, MoEParams]:
    e = 5
    config = MoEConfig(
        hidden=hidden,
        intermediate=inter,
        router=RouterConfig(num_experts=e, top_k=2),
        weights=fmt,
        activation=activation,
        expert_bias=activation.kind == "oai",
        partial_blocks=True,
        **changes,  # type: ignore[arg-type]
    )
    arrays = {
        "gate": (e, inter, hidden),
        "up": (e, inter, hidden),
        "down": (e, hidden, inter),
        "router_kernel": (hidden, e),
    }
    if config.expert_bias:
        arrays |= {"gate_bias": (e, inter), "up_bias": (e, inter), "down_bias": (e, hidden)}
    if config.shared is not None:
        width = config.shared.intermediate
        arrays |= {"shared_gate": (width, hidden), "shared_up": (width, hidden), "shared_down": (hidden, width)}
        if config.shared.gate:
            arrays["shared_gate_vector"] = (hidden,)
    made = {name: (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32) for name, shape in arrays.items()}
    return config, make_params(config, **made)


CASES = [
    (name, layout, kind)
    for i, name in enumerate(FORMATS)
    for j, layout in enumerate(LAYOUTS)
    for kind in (list(ACTIVATIONS)[(i + j) % 4],)
] + [("FP8Block", "psum", "oai"), ("MXFP4", "psum", "clamped")]


@pytest.mark.parametrize(("name", "layout", "kind"), CASES)
def test_against_float64(rng: np.random.Generator, name: str, layout: str, kind: str) -> None:
    """H and I that are no block multiples; ids random, all the same, with holes, none. Unquantised rows to 1e-5 of
    the largest output; quantised rows within the format's bound for each of the two GEMMs."""
    config, params = layer(rng, FORMATS[name], ACTIVATIONS[kind], 200, 136)
    x = rng.normal(size=(9, 200)).astype(np.float32)
    exact = Execution(layout=layout, quantize_activations=False)  # type: ignore[arg-type]
    for what, ids in routings(Shape(200, 136, 5, 2), 9):
        w = np.where(ids >= 0, rng.random(ids.shape), np.nan).astype(np.float32)
        routing = Routing(jnp.asarray(ids), jnp.asarray(w))
        want = dense_moe(params, x, config, ids, np.nan_to_num(w))
        got = np.asarray(jitted(params, jnp.asarray(x), config=config, execution=exact, routing=routing))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(np.abs(want).max(), 1e-9), err_msg=what)
        assert (got[(ids < 0).all(1)] == 0).all()
        if config.weights.quantized:
            execution = dataclasses.replace(exact, quantize_activations=True)
            got = jitted(params, jnp.asarray(x), config=config, execution=execution, routing=routing)
            assert calc_diff(got, want) <= 2 * config.weights.max_diff, what


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("fmt", [BF16, FP8Block])
def test_shared_experts_with_a_gate(rng: np.random.Generator, fmt: WeightFormat, fused: bool) -> None:
    """Twice as wide as a routed expert, through the router, with invalid NaN tokens in between."""
    shared = SharedExperts(intermediate=256, gate=True, fused=fused)
    config, params = layer(rng, fmt, Activation(), 128, 128, shared=shared)
    x = rng.normal(size=(7, 128)).astype(np.float32)
    valid = np.array([1, 1, 0, 1, 0, 1, 1], bool)
    logits = x @ np.asarray(params.router.kernel)
    ids = np.argsort(-logits, axis=1)[:, :2]
    scores = np.exp(np.take_along_axis(logits, ids, 1))
    want = dense_moe(params, x, config, ids, scores / scores.sum(1, keepdims=True), valid=valid)
    x[~valid] = np.nan
    run = functools.partial(jitted, params, jnp.asarray(x), config=config, valid=jnp.asarray(valid))
    got = np.asarray(run(execution=Execution(quantize_activations=False)))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert (got[~valid] == 0).all()
    if fmt.quantized:
        assert calc_diff(run(execution=Execution()), want) <= 2 * fmt.max_diff


def test_a_shared_expert_in_its_own_format(rng: np.random.Generator) -> None:
    config, params = layer(rng, MXFP8, Activation(), 128, 128, shared=SharedExperts(intermediate=256, weights=FP8Block))
    x = rng.normal(size=(5, 128)).astype(np.float32)
    ids = np.array([[0, 1]] * 5, np.int32)
    w = np.full((5, 2), 0.5, np.float32)
    got = jitted(params, jnp.asarray(x), config=config, routing=Routing(jnp.asarray(ids), jnp.asarray(w)))
    assert calc_diff(got, dense_moe(params, x, config, ids, w)) <= 2e-3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtype_shape_and_eager(rng: np.random.Generator, dtype: jnp.dtype) -> None:
    """Leading axes are kept; eager and jitted bits agree; layouts and alignments agree bit for bit."""
    config, params = marker_layer(4, 2, dtype=dtype)
    x = jnp.asarray(rng.normal(size=(2, 3, 128)), dtype)
    eager = moe(params, x, config)
    assert eager.shape == x.shape and eager.dtype == dtype
    for execution in (Execution(), Execution(layout="masked"), Execution(layout="contiguous", row_alignment=128)):
        assert (jitted(params, x, config=config, execution=execution) == eager).all()
    assert moe(params, x[:0], config).shape == (0, 3, 128)


def test_gradients_of_the_layer(rng: np.random.Generator) -> None:
    """d/d(x, weights, biases, router) in f32 against autodiff of a dense formula that runs every expert."""
    shared = SharedExperts(intermediate=24, gate=True)
    config, params = layer(rng, BF16, ACTIVATIONS["oai"], 40, 24, shared=shared)
    x, c = (jnp.asarray(rng.normal(size=(6, 40)), jnp.float32) for _ in range(2))

    def mlp(x: jax.Array, w, e: int) -> jax.Array:
        h = jnp.dot(x, w.gate_up.values[e].T, precision="highest")
        h = h if w.gate_up_bias is None else h + w.gate_up_bias[e]
        g, u = jnp.split(h, 2, axis=-1)
        g, u = jnp.minimum(g, 1.5), jnp.clip(u, -1.5, 1.5)
        y = jnp.dot(g * jax.nn.sigmoid(1.702 * g) * (u + 1), w.down.values[e].T, precision="highest")
        return y if w.down_bias is None else y + w.down_bias[e]

    def dense(params: MoEParams, x: jax.Array) -> jax.Array:
        logits = jnp.dot(x, params.router.kernel, precision="highest")
        kept = jnp.where(logits >= jnp.sort(logits, axis=1)[:, -2:-1], logits, -jnp.inf)
        w = jax.nn.softmax(kept, axis=1)
        y = sum(w[:, e, None] * mlp(x, params.experts, e) for e in range(5))
        assert params.shared is not None and params.shared.gate is not None
        gate = jax.nn.sigmoid(jnp.dot(x, params.shared.gate, precision="highest"))
        return jnp.sum(c * (y + gate[:, None] * mlp(x, params.shared.experts, 0)))

    want = jax.jit(jax.grad(dense, argnums=(0, 1)))(params, x)
    got = jax.jit(jax.grad(lambda p, x: jnp.sum(c * moe(p, x, config)), argnums=(0, 1)))(params, x)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * scale, err_msg=jax.tree_util.keystr(path))


def test_gradient_with_quantised_weights(rng: np.random.Generator) -> None:
    """x and the router learn through dequantised weights; with quantised rows x refuses but the router still can."""
    config, params = marker_layer(4, 2, weights=FP8Block)
    x = jnp.asarray(rng.normal(size=(3, 128)), jnp.float32)
    routing = Routing(jnp.array([[0, 1], [2, 3], [1, 0]], jnp.int32), jnp.full((3, 2), 0.5, jnp.float32))
    plain = marker_layer(4, 2, dtype=jnp.float32)

    def loss(x: jax.Array, w: jax.Array, layer: tuple[MoEConfig, MoEParams], quantize: bool) -> jax.Array:
        execution = Execution(quantize_activations=quantize)
        return moe(layer[1], x, layer[0], execution, routing=Routing(routing.ids, w)).sum()

    got = jax.grad(loss, argnums=(0, 1))(x, routing.weights, (config, params), False)
    want = jax.grad(loss, argnums=(0, 1))(x, routing.weights, plain, False)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="quantize_activations=False"):
        jax.grad(loss)(x, routing.weights, (config, params), True)
    np.testing.assert_allclose(
        jax.grad(loss, argnums=1)(x, routing.weights, (config, params), True),
        want[1],
        rtol=0,
        atol=0.05 * abs(want[1]).max(),
    )


def test_a_named_backend_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is the GEMMs'; the ops around them, which may not know it, take their own."""

    def declines(*_: object, **__: object) -> jax.Array:
        raise NotImplementedError("this one cannot")

    monkeypatch.setitem(BACKENDS, "cutlass", declines)
    config, params = marker_layer(2, 1, weights=FP8Block)
    x = jnp.ones((1, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="this one cannot"):
        moe(params, x, config, Execution(backend="cutlass"))
    y = moe(params, x, config, Execution(backend=("cutlass", "reference"), row_alignment=8))
    assert (y == moe(params, x, config, Execution(backend="reference"))).all()
    with pytest.raises(ValueError, match="no backend 'triton'"):
        moe(params, x, config, Execution(backend="triton"))


ROUTING = Routing(jnp.zeros((2, 2), jnp.int32), jnp.ones((2, 2), jnp.float32))


@pytest.mark.parametrize(
    ("change", "arguments", "error", "message"),
    [
        ({}, {"x": jnp.ones((2, 64), jnp.bfloat16)}, ShapeError, r"\[2, 64\].*H = 128"),
        ({}, {"x": jnp.ones((2, 128), jnp.int32)}, FormatError, "int32"),
        ({}, {"valid": jnp.ones(3, bool)}, ShapeError, r"bool\[3\].*bool\[2\]"),
        ({}, {"token_ids": jnp.ones(2, jnp.float32)}, ShapeError, r"float32\[2\].*int32\[2\]"),
        ({}, {"routing": Routing(ROUTING.ids[:1], ROUTING.weights[:1])}, ShapeError, "1 tokens"),
        ({}, {"routing": Routing(ROUTING.ids + 4, ROUTING.weights)}, ValueError, r"4; expert ids must be in \[0, 4\)"),
        ({"hidden": 256}, {}, ShapeError, r"router kernel is \[128, 4\].*\[256, 4\]"),
        ({"intermediate": 256}, {}, ShapeError, r"gate_up.*\[4, 256, 128\].*\[4, 512, 128\]"),
        ({"weights": FP8Block}, {}, FormatError, "gate_up is BF16, the config says FP8Block"),
        ({"expert_bias": True}, {}, ShapeError, "gate_up_bias is missing"),
        ({"shared": SharedExperts(intermediate=128)}, {}, ShapeError, "parameters hold none"),
        (
            {"shared": SharedExperts(intermediate=128, fused=True)},
            {},
            ShapeError,
            r"holds 4 experts.*5 \(4 routed, 1 fused",
        ),
    ],
)
def test_bad_input(change: dict, arguments: dict, error: type[Exception], message: str) -> None:
    config, params = marker_layer(4, 2)
    x = arguments.pop("x", jnp.ones((2, 128), jnp.bfloat16))
    with pytest.raises(error, match=message):
        moe(params, x, dataclasses.replace(config, **change), **arguments)
