"""The weight gradient's GEMM: tiles that stay inside a group, clusters that do too, refusals, and that it compiles."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from jaxmoe.cuda import jit
from jaxmoe.cuda.deepgemm import Gemm, choose, plan_launch
from jaxmoe.cuda.launch import Integer, TensorMap
from jaxmoe.errors import BackendUnavailable

SMS = {"sm_90": 132, "sm_100": 148}


def gemm(arch="sm_90", m=256, n=192, k=1024, groups=4, **changes) -> Gemm:
    return Gemm(arch=arch, layout="k_grouped", m=m, n=n, k=k, groups=groups, b_major="MN", **changes)


@pytest.mark.parametrize("arch", SMS)
def test_tiles_and_clusters_stay_inside_a_group(arch):
    """An odd number of tiles in a group, of which upstream's choice pairs the last with the next group's first, too."""
    pairs = 0
    for m, n, groups in itertools.product((64, 192, 320, 1408, 2880, 4096), (8, 72, 136, 1408, 2880, 7168), (1, 5, 32)):
        problem = gemm(arch, m, n, 32 * 1024, groups)
        c = choose(problem, num_sms=SMS[arch])
        assert m % c.block_m == 0, (problem, c)
        assert (m // c.block_m) % c.cluster_m == -(-n // c.block_n) % c.cluster_n == 0, (problem, c)
        assert c.stages >= 3 and c.num_sms % c.cluster == 0
        pairs += c.cluster == 2
    assert pairs


@pytest.mark.parametrize("arch", SMS)
def test_launch(arch):
    """Rows are never compiled in; operands lie as rows, the result as a matrix for each group."""
    problem = gemm(arch, m=256, n=192, k=1024, groups=5)
    planned = plan_launch(problem, num_sms=SMS[arch])
    assert planned is not None
    source, spec = planned
    more = plan_launch(dataclasses.replace(problem, k=1088), num_sms=SMS[arch])
    assert more is not None and more[0] == source
    assert "256, 192, 0" in source.code and "KGroupedContiguous" in source.code
    assert spec.params[1:4] == (Integer(256), Integer(192), Integer(1024))
    maps = [p for p in spec.params if isinstance(p, TensorMap)]
    assert [p.dims for p in maps] == [(256, 1024), (192, 1024), (192, 5 * 256)]
    assert all(p.box[1] == 64 for p in maps[:2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": 96}, "m is 96, not a multiple of 64.* pad m to 128"),
        ({"n": 100}, "n is 100, not a multiple of 8"),
        ({"a": "e4m3", "b": "e4m3"}, "k_grouped is for bf16 operands"),
        ({"b_major": "K"}, "k_grouped is for bf16 operands"),
        ({"d": "f32"}, "float32 output is for dense"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(BackendUnavailable, match=message):
        plan_launch(dataclasses.replace(gemm(), **change), num_sms=132)


def test_groups_that_a_tile_of_rows_would_straddle():
    with pytest.raises(
        BackendUnavailable, match="groups are multiples of 32 rows; set mk_alignment to a multiple of 64"
    ):
        plan_launch(gemm(), num_sms=132, mk_alignment=32)
    assert plan_launch(gemm("sm_100"), num_sms=148, mk_alignment=32)


def test_it_compiles(toolchain):
    shapes = [(arch, m, n) for arch in SMS for m, n in ((4096, 7168), (320, 72))]
    planned = [plan_launch(gemm(arch, m, n), num_sms=SMS[arch]) for arch, m, n in shapes]
    cubins = dict(jit.compile_many([p[0] for p in planned if p], toolchain=toolchain))
    assert len(cubins) == len(shapes)
    for source, cubin in cubins.items():
        (name,) = jit.kernel_names(cubin)
        assert f"{source.name[: source.name.index('_k_')]}_gemm_impl" in name
