"""Our CUDA kernels for places and quantised rows: what is launched, that they compile, and their bits on a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.cuda import jit
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.target import target
from jaxmoe.errors import BackendUnavailable
from jaxmoe.ops.permute import expert_counts, group_tokens, permute, unpermute
from jaxmoe.ops.permute.cuda import kernel_source
from jaxmoe.ops.permute.grouping import Grouping
from jaxmoe.ops.quantize import quantize
from jaxmoe.quant.formats import ActivationQuant

QUANTS = [ActivationQuant(128, "float32"), ActivationQuant(128, "ue8m0"), ActivationQuant(32, "ue8m0")]
LAYOUTS = ("psum", "contiguous", "masked")


@pytest.mark.parametrize(("layout", "code"), [("psum", 0), ("contiguous", 1), ("masked", 2)])
def test_what_is_launched(launches: Any, layout: Any, code: int) -> None:
    ids = jnp.zeros((1000, 6), jnp.int32)
    with target(Arch("sm_90a", 132)):
        g = jax.jit(lambda ids: group_tokens(ids, 5, layout=layout, alignment=16, backend="cuda"))(ids)
    (launch,) = launches()
    rows = g.source.shape[0]
    assert rows == (5 * 1008 if layout == "masked" else 6064)
    assert g.group.shape == ((rows,) if layout == "contiguous" else (5,))
    numbers = [1000, 6, 5, code, 16, 1008 if layout == "masked" else 0, rows]
    assert launch["params"] == [{"ptr": "device"}] * 4 + [{"u32": n} for n in numbers]
    assert (launch["grid"], launch["block"], launch["dynamic_smem"]) == ([5, 1, 1], [1024, 1, 1], 20)


@pytest.mark.parametrize("quant", QUANTS, ids=str)
@pytest.mark.parametrize("layout", ["psum", "masked"])
def test_what_is_launched_for_quantised_rows(launches: Any, quant: ActivationQuant, layout: Any) -> None:
    ids = jnp.zeros((1030, 6), jnp.int32)
    x = quantize(jnp.zeros((1030, 640)), quant, backend="reference")
    g = group_tokens(ids, 5, layout=layout, alignment=2, backend="reference")
    with target(Arch("sm_90a", 132)):
        rows = jax.jit(lambda x, g: permute(x, g, backend="cuda").rows)(x, g)
    (launch,) = launches()
    leads, capacity = (5, 1030) if layout == "masked" else (1, g.source.shape[0])
    words, stored = x.scales.shape[0], -(-capacity // 4) * 4
    lead = (5,) if layout == "masked" else ()
    assert (rows.values.shape, rows.scales.shape) == ((*lead, capacity, 640), (*lead, words, stored))
    pulling = -(-words // 4) * -(-leads * stored // 2048)  # blocks of 4 words of 2048 rows
    neutral = 0x3F800000 if quant.scale == "float32" else 0x7F7F7F7F
    numbers = [1030, 6, 640, words, 1032, leads, capacity, stored, 2, pulling, 4, 512, 1, 0, neutral]
    assert launch["params"] == [{"ptr": "device"}] * 6 + [{"u32": n} for n in numbers]
    assert (launch["grid"], launch["block"]) == ([pulling + 515, 1, 1], [256, 1, 1])
    assert launch["dynamic_smem"] == 45 * 1024


def test_inside_grad_scan_and_vmap(standin: Any, kernels: Any) -> None:
    del standin, kernels

    def loss(x: jax.Array, router: jax.Array) -> jax.Array:
        weights, ids = jax.lax.top_k(x @ router, 2)
        g = group_tokens(ids.astype(jnp.int32), 4, backend="cuda")
        return unpermute(permute(x, g, backend="reference").values, g.slots, weights).sum()

    def twice(x: jax.Array, router: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c + jax.checkpoint(loss)(c, router), None), x, None, length=2)[0].sum()

    x, router = jnp.ones((3, 8, 64)), jnp.ones((64, 4))
    with target(Arch("sm_90a", 132)):
        programs = [
            jax.jit(jax.grad(twice, (0, 1))).lower(x[0], router),
            jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (0, None))).lower(x, router),
        ]
    for program in programs:
        assert "@jaxmoe_sm90_group_tokens" in program.as_text()


@pytest.mark.parametrize("name", ["group_tokens", "permute_rows"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_compiles(toolchain: jit.Toolchain, arch: str, name: Any) -> None:
    assert jit.compile(kernel_source(arch, name), toolchain)[:4] == b"\x7fELF"


def test_declines(standin: Any) -> None:
    del standin  # in place of the launcher
    with pytest.raises(BackendUnavailable, match="need an NVIDIA GPU"):
        group_tokens(jnp.zeros((4, 2), jnp.int32), 3, backend="cuda")
    with target(Arch("sm_90a", 132)), pytest.raises(BackendUnavailable, match=r"ids \[0, 2\] of 3 experts"):
        group_tokens(jnp.zeros((0, 2), jnp.int32), 3, backend="cuda")
    g = group_tokens(jnp.zeros((0, 2), jnp.int32), 3)
    with target(Arch("sm_90a", 132)), pytest.raises(BackendUnavailable, match=r"rows \[0, 128\] and places \[0, 2\]"):
        permute(quantize(jnp.zeros((0, 128)), QUANTS[0], backend="reference"), g, backend="cuda")


def test_counts() -> None:
    ids = jnp.asarray([[0, 2], [2, -1], [7, 2**31 - 1], [-(2**31), 2]], jnp.int32)
    assert expert_counts(ids, 3).tolist() == [1, 0, 3]
    assert expert_counts(jnp.zeros((0, 2), jnp.int32), 2).tolist() == [0, 0]


def hostile(rng: np.random.Generator, n: int, k: int, e: int, kind: str) -> jax.Array:
    """Repeats, and ids that are no expert's, among them the extremes of int32."""
    ids = rng.integers(0, e, (n, k))
    if kind == "mixed":
        ids = np.where(rng.random((n, k)) < 0.3, rng.choice([-1, e, -(2**31), 2**31 - 1], (n, k)), ids)
    elif kind != "full":
        ids[:] = {"none": -1, "one": e - 1}[kind]
    return jnp.asarray(ids, jnp.int32)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("n", "k", "e", "alignment"),
    [(1, 1, 1, 1), (1, 8, 256, 128), (37, 3, 5, 1), (128, 8, 32, 128), (4099, 9, 384, 128)],
)
def test_places_on_a_gpu(rng: np.random.Generator, layout: Any, n: int, k: int, e: int, alignment: int) -> None:
    def run(ids: jax.Array, backend: str) -> Grouping:
        return group_tokens(ids, e, layout=layout, alignment=alignment, backend=backend)

    compiled = jax.jit(run, static_argnums=1)
    for kind in ("mixed", "full", "none", "one"):
        ids = hostile(rng, n, k, e, kind)
        got, want, again = (compiled(ids, backend) for backend in ("cuda", "reference", "cuda"))
        for a, b, c in zip(*map(jax.tree.leaves, (got, want, again)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=kind)
            np.testing.assert_array_equal(np.asarray(a), np.asarray(c), err_msg=kind)
