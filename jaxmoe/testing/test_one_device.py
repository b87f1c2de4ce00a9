"""Every format and layout on the first device: the reference against the formula, kernels against the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import get_args

import jax
import pytest

from jaxmoe.config import Execution, Layout
from jaxmoe.cuda import arch
from jaxmoe.layer.pipeline import moe
from jaxmoe.ops.grouped_gemm.deepgemm import gemm_call
from jaxmoe.quant.formats import FORMATS, WeightFormat
from jaxmoe.router import route
from jaxmoe.testing.layers import random_layer
from jaxmoe.testing.oracles import calc_diff, dense_moe

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
run = jax.jit(moe, static_argnames=("config", "execution"))


@functools.cache
def _reference(name: str, layout: Layout) -> jax.Array:
    config, params, x = random_layer(FORMATS[name])
    return run(params, x, config, Execution(backend="reference", layout=layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_reference(name: str, layout: Layout, record: Callable[[str, str, str, str], None]) -> None:
    """Plain JAX against the layer's formula in float64."""
    record("one device", name, f"reference {layout}", "ok")
    config, params, x = random_layer(FORMATS[name])
    routing = route(params.router, x, config.router)
    want = dense_moe(params, x, config, routing.ids, routing.weights)
    assert calc_diff(_reference(name, layout), want) <= 2 * config.weights.max_diff  # rows are quantised twice


def _has_kernel(fmt: WeightFormat, layout: Layout) -> bool:
    """Whether the GPU at hand has a kernel for the format, so that a refusal is a fault of the installation."""
    try:
        gemm_call(fmt, layout, arch.detect())
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_deepgemm(name: str, layout: Layout, record: Callable[[str, str, str, str], None]) -> None:
    """DeepGEMM's kernels against the reference; where there are none, a refusal that says why."""
    config, params, x = random_layer(FORMATS[name])
    column = f"deepgemm {layout}"
    try:
        y = run(params, x, config, Execution(backend="deepgemm", layout=layout))
    except NotImplementedError as refusal:
        reason = str(refusal).splitlines()[0]
        record("one device", name, column, f"–: {reason}")
        assert reason
        if _has_kernel(config.weights, layout):
            raise
        return
    record("one device", name, column, "ok")
    assert calc_diff(y, _reference(name, layout)) <= config.weights.max_diff
