"""The gated activations against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import Activation
from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.ops.gated_act import gated_act
from jaxmoe.ops.quantize import dequantize_rows, quantize
from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.tensors import QuantizedRows
from jaxmoe.testing import dense_act

KINDS = [
    Activation(),
    Activation(kind="clamped", limit=1.5),
    Activation(kind="oai", limit=7.0),
    Activation(kind="situ", beta_gate=2.0, beta_up=0.5),
]


@pytest.mark.parametrize("activation", KINDS, ids=lambda a: a.kind)
def test_against_float64(rng: np.random.Generator, activation: Activation) -> None:
    h = np.float32(rng.normal(size=(2, 3, 256)) * 4)
    y = gated_act(jnp.asarray(h), activation)
    assert isinstance(y, jax.Array)
    np.testing.assert_allclose(y, dense_act(h, activation), rtol=2e-5, atol=1e-6)
    b = jnp.asarray(h, jnp.bfloat16)
    y = gated_act(b, activation)
    assert isinstance(y, jax.Array) and y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(y), dense_act(np.asarray(b, np.float32), activation), rtol=2.0**-8, atol=1e-6)


def test_numbers() -> None:
    """Worked by hand: g = 2, u = -3 with limit 1; σ(1) = 0.73105858, σ(1.702) = 0.84579577."""
    h = jnp.array([[2.0, -3.0]], jnp.float32)
    for kind, want in (("clamped", -0.73105858), ("oai", 0.0)):
        y = gated_act(h, Activation(kind=kind, limit=1.0))  # type: ignore[arg-type]
        np.testing.assert_allclose(np.asarray(y), want, rtol=1e-6)
    y = gated_act(jnp.array([[2.0, 0.5]], jnp.float32), Activation(kind="oai", limit=1.0))
    np.testing.assert_allclose(np.asarray(y), 1.5 * 0.84579577, rtol=1e-6)


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("keep", [False, True])
def test_what_the_quantiser_sees(rng: np.random.Generator, keep: bool, block: int) -> None:
    """keep_fp32 hands over the f32 product, otherwise its bf16 rounding: bit-equal to quantising those."""
    h = jnp.asarray(rng.normal(size=(5, 512)), jnp.bfloat16)
    quant = ActivationQuant(block, "ue8m0")
    got = gated_act(h, Activation(keep_fp32=keep), quant=quant)
    exact = gated_act(h.astype(jnp.float32), Activation())
    assert isinstance(got, QuantizedRows) and isinstance(exact, jax.Array)
    want = quantize(exact if keep else exact.astype(jnp.bfloat16), quant)
    other = quantize(exact.astype(jnp.bfloat16) if keep else exact, quant)
    assert (got.values == want.values).all() and (got.scales == want.scales).all()
    assert not (other.values == want.values).all()


@pytest.mark.parametrize("quant", [None, ActivationQuant(128, "float32")])
def test_rows_that_do_not_count(rng: np.random.Generator, quant: ActivationQuant | None) -> None:
    h = rng.normal(size=(4, 256)).astype(np.float32)
    h[[1, 3]] = np.nan
    valid = jnp.array([True, False, True, False])
    y = gated_act(jnp.asarray(h), Activation(), quant=quant, valid=valid)
    y = dequantize_rows(y) if isinstance(y, QuantizedRows) else y
    assert (np.asarray(y)[[1, 3]] == 0).all() and np.isfinite(np.asarray(y)).all()


def test_gradient_of_rows_that_do_not_count(rng: np.random.Generator) -> None:
    h = jnp.asarray(rng.normal(size=(2, 8)), jnp.float32).at[1].set(jnp.nan)
    valid = jnp.array([True, False])
    grad = jax.grad(lambda h: jnp.sum(gated_act(h, Activation(), valid=valid)))(h)  # type: ignore[arg-type]
    assert (np.asarray(grad[1]) == 0).all() and np.isfinite(np.asarray(grad)).all()
    step = 1e-3
    bump = jnp.zeros_like(h).at[0, 3].set(step)
    up, down = (gated_act(h + s * bump, Activation(), valid=valid) for s in (1, -1))
    np.testing.assert_allclose(grad[0, 3], (up.sum() - down.sum()) / (2 * step), rtol=1e-3)  # type: ignore[union-attr]


def test_bad_input() -> None:
    with pytest.raises(ShapeError, match=r"\[2, 7\]"):
        gated_act(jnp.zeros((2, 7)), Activation())
    with pytest.raises(FormatError, match="float16"):
        gated_act(jnp.zeros((2, 8), jnp.float16), Activation())
    with pytest.raises(ShapeError, match=r"bool\[3\]; it must be bool\[2\]"):
        gated_act(jnp.zeros((2, 8)), Activation(), valid=jnp.ones(3, bool))
    with pytest.raises(ShapeError, match="I = 96 is not a multiple of the quantisation block 128"):
        gated_act(jnp.zeros((2, 192)), Activation(), quant=ActivationQuant(128, "float32"))
