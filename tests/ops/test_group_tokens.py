"""The kernel that places choices: what is launched, that it compiles, and its integers on a GPU."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.cuda import jit
from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.target import target
from jaxmoe.errors import BackendUnavailable
from jaxmoe.ops.permute import expert_counts, group_tokens
from jaxmoe.ops.permute.cuda import kernel_source
from jaxmoe.ops.permute.grouping import Grouping

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


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_compiles(arch: str) -> None:
    try:
        toolchain = jit.find_toolchain()
    except BackendUnavailable as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
    assert jit.compile(kernel_source(arch), toolchain)[:4] == b"\x7fELF"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what happens without a GPU")
def test_declines() -> None:
    with pytest.raises(BackendUnavailable, match="need an NVIDIA GPU"):
        group_tokens(jnp.zeros((4, 2), jnp.int32), 3, backend="cuda")
    with target(Arch("sm_90a", 132)), pytest.raises(BackendUnavailable, match=r"ids \[0, 2\] of 3 experts"):
        group_tokens(jnp.zeros((0, 2), jnp.int32), 3, backend="cuda")


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
