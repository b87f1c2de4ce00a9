"""The gated activation's kernel: in the interpreter, on a GPU, and lowered for both architectures."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmoe.config import Activation
from jaxmoe.errors import BackendUnavailable
from jaxmoe.ops.gated_act import gated_act, reference
from jaxmoe.ops.gated_act.pallas import TILE, gated_act_kernel
from jaxmoe.ops.mosaic import LOWERS, Tile
from jaxmoe.ops.quantize import reference as quantizer
from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.tensors import QuantizedRows

F32, MX = ActivationQuant(128, "float32"), ActivationQuant(32, "ue8m0")
CASES = [
    (Activation(), F32),
    (Activation(keep_fp32=True), MX),
    (Activation(kind="clamped", limit=1.5), None),
    (Activation(kind="oai", limit=7.0), ActivationQuant(128, "ue8m0")),
    (Activation(kind="situ", beta_gate=2.0, beta_up=0.5), None),
]


def halves(rng: np.random.Generator, shape: tuple[int, ...], dtype: jnp.dtype, masked: bool):
    """Gate and up; with ``masked``, invalid rows are NaN and the last 16 are all invalid."""
    h = rng.normal(size=shape) * 5
    h[..., 0, :8] = [-300, -90, -20, -1e-4, 1e-4, 20, 90, 300]
    if not masked:
        return jnp.asarray(h, dtype), None
    valid = rng.random(shape[:-1]) < 0.5
    valid[..., -16:] = False
    h[~valid] = np.nan
    return jnp.asarray(h, dtype), jnp.asarray(valid)


def compare(got: jax.Array | QuantizedRows, h: jax.Array, a: Activation, quant: ActivationQuant | None, valid) -> None:
    """Against the reference on the CPU: a unit in the last place of bf16, codes one step, in at most one of 1000."""
    h, valid = jax.device_put((h, valid), jax.local_devices(backend="cpu")[0])
    exact = h.astype(jnp.float32) if a.keep_fp32 else h
    y = reference.gated_act(exact, a, quant=None, valid=valid)
    assert isinstance(y, jax.Array)
    if quant is None:
        u, v = (np.asarray(z, np.float32) for z in (got, y))
        bf16 = h.dtype == jnp.bfloat16
        np.testing.assert_allclose(u, v, rtol=2.0**-7 if bf16 else 1e-5, atol=1e-30)
        assert not bf16 or (u != v).mean() < 1e-3
        return
    assert isinstance(got, QuantizedRows)
    want = quantizer.quantize(y, quant, valid=valid)
    u, v = (np.asarray(r.values).view(np.uint8).astype(int) for r in (got, want))
    assert np.abs(np.where(u >> 7 == v >> 7, u - v, (u & 127) + (v & 127))).max() <= 1
    assert (u != v).mean() < 1e-3
    if quant.scale == "float32":
        np.testing.assert_allclose(got.scales, want.scales, rtol=2.0**-7)
    else:
        assert (np.asarray(got.scales) != np.asarray(want.scales)).mean() < 1e-3


@pytest.mark.parametrize(("activation", "quant"), CASES, ids=str)
def test_in_the_interpreter(rng: np.random.Generator, activation: Activation, quant: ActivationQuant | None) -> None:
    masked = activation.kind in ("silu", "clamped")
    h, valid = halves(
        rng, (2, 20, 256) if masked else (16, 384 if quant is MX else 256), jnp.dtype(jnp.bfloat16), masked
    )
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = gated_act_kernel(h, activation, quant, valid, Tile(16, 2))
    compare(got, h, activation, quant, valid)


@pytest.mark.skipif(not LOWERS, reason="Mosaic GPU of this JAX refuses the kernels, and so do the backends")
@pytest.mark.parametrize("arch", [(9, 0), (10, 0)])
@pytest.mark.parametrize(("activation", "quant"), CASES, ids=str)
def test_lowers(
    monkeypatch: pytest.MonkeyPatch, activation: Activation, quant: ActivationQuant | None, arch: tuple[int, int]
) -> None:
    monkeypatch.setattr(mosaic_utils, "_infer_arch", lambda: arch)
    h, valid = jax.ShapeDtypeStruct((200, 2 * 1408), jnp.bfloat16), jax.ShapeDtypeStruct((200,), jnp.bool_)
    lowered = (
        jax.jit(lambda h, v: gated_act_kernel(h, activation, quant, v, TILE))
        .trace(h, valid)
        .lower(lowering_platforms=("cuda",))
    )
    assert "mosaic_gpu" in lowered.as_text()


def test_refusals() -> None:
    for shape, words in (((32, 160), "multiple of 64"), ((8, 256), "8 rows are fewer")):
        with pytest.raises(BackendUnavailable, match=words):
            gated_act_kernel(jnp.zeros(shape), Activation(), None, None, TILE)


@pytest.mark.gpu
@pytest.mark.skipif(not LOWERS, reason="Mosaic GPU of this JAX refuses the kernels, and so do the backends")
@pytest.mark.parametrize(("activation", "quant"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("shape", "masked"), [((16, 256), False), ((2, 333, 2816), True), ((1024, 4096), False)])
def test_on_a_gpu(
    rng: np.random.Generator,
    activation: Activation,
    quant: ActivationQuant | None,
    dtype: jnp.dtype,
    shape: tuple[int, ...],
    masked: bool,
) -> None:
    h, valid = halves(rng, shape, dtype, masked)
    got = gated_act(h, activation, quant=quant, valid=valid, backend="pallas")
    compare(got, h, activation, quant, valid)


@pytest.mark.gpu
@pytest.mark.skipif(not LOWERS, reason="Mosaic GPU of this JAX refuses the kernels, and so do the backends")
def test_gradient_on_a_gpu(rng: np.random.Generator) -> None:
    h, valid = halves(rng, (48, 512), jnp.dtype(jnp.float32), True)

    def loss(h: jax.Array, backend: str) -> jax.Array:
        y = gated_act(h, Activation(), valid=valid, backend=backend)
        assert isinstance(y, jax.Array)
        return (y * y).sum()

    got, want = (jax.grad(loss)(h, b) for b in ("pallas", "reference"))
    assert np.isfinite(np.asarray(got)).all()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_needs_a_gpu() -> None:
    with pytest.raises(BackendUnavailable, match="need an NVIDIA GPU" if LOWERS else "JAX 0.11"):
        gated_act(jnp.zeros((32, 256)), Activation(), backend="pallas")
