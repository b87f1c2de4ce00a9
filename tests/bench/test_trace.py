"""What is made of a profiler's events."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.bench import trace as tracing
from jaxmoe.bench.trace import Kernel, Trace


def kernel(start: float, seconds: float, scope: str = "") -> Kernel:
    return Kernel("k", "op", scope, start, seconds)


def test_overlapping_kernels_are_busy_once() -> None:
    trace = Trace((kernel(0, 2), kernel(1, 0.5), kernel(1.5, 1.5), kernel(4, 1)), 5)
    assert trace.busy == 4 and trace.idle == 1


def test_rooms_by_scope() -> None:
    scopes = ["jit(moe)/router/dot", "jit(moe)/gemm1/jit(f)/gemm2/x", "", "jit(moe)/gemm1/y", "jit(moe)/add"]
    trace = Trace(tuple(kernel(i, i + 1, scope) for i, scope in enumerate(scopes)), 10)
    assert trace.by_room(("router", "gemm1", "gemm2")) == {"router": 1, "gemm1": 6, "gemm2": 0, "other": 8}


class _Compiled:
    def __init__(self, text: str) -> None:
        self.text = text

    def as_text(self) -> str:
        return self.text

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        return args


class _Program:
    """A jitted function whose compiled text and profile are given."""

    def __init__(self, compiled: _Compiled) -> None:
        self.compiled, self.options = compiled, []

    def lower(self, *args: Any) -> _Program:
        return self

    def compile(self, options: Any) -> _Compiled:
        self.options.append(options)
        return self.compiled


def profile(*durations: int) -> Any:
    """Kernels of these nanoseconds, 10 ns apart, on a GPU plane that has derived lines as well."""
    events, start = [], 1000
    for i, duration in enumerate(durations):
        stats = [("hlo_op", f"fusion.{i}"), ("other", 3)]
        events.append(types.SimpleNamespace(name=f"k{i}", start_ns=start, duration_ns=duration, stats=stats))
        start += duration + 10
    lines = [types.SimpleNamespace(name="Stream #13(Compute)", events=events)]
    lines.append(types.SimpleNamespace(name="XLA Ops", events=events))
    planes = [types.SimpleNamespace(name="/host:CPU", lines=lines)]
    return types.SimpleNamespace(planes=[*planes, types.SimpleNamespace(name="/device:GPU:0", lines=lines)])


def test_the_call_of_median_length_with_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '  %fusion.0 = f32[] fusion(), metadata={op_type="x" op_name="jit(f)/router/dot" source_line=3}\n'
    text += '  ROOT fusion.1 = f32[] fusion(%fusion.0), metadata={op_name="jit(f)/gemm1/dot"}\n'
    program, profiles = _Program(_Compiled(text)), iter([profile(5, 5), profile(50, 50), profile(20, 30)])
    monkeypatch.setattr(jax.profiler.ProfileData, "from_file", lambda path: next(profiles))
    got = tracing.trace(program, jnp.zeros(3))
    assert [(k.name, k.scope, round(k.seconds * 1e9)) for k in got.kernels] == [
        ("k0", "jit(f)/router/dot", 20),
        ("k1", "jit(f)/gemm1/dot", 30),
    ]
    assert got.span == pytest.approx(60e-9) and got.idle == pytest.approx(10e-9)
    assert program.options == [{"xla_gpu_enable_command_buffer": ""}]


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="saw no kernel; it needs a GPU"):
        tracing.trace(jax.jit(jnp.sin), jnp.zeros(3))


def test_compiled_programs_name_their_scopes() -> None:
    def f(x: jax.Array) -> jax.Array:
        with jax.named_scope("gemm1"):
            return jnp.sin(x @ x)

    text = jax.jit(f).lower(jnp.zeros((8, 8))).compile().as_text()
    assert any("/gemm1/" in scope for scope in dict(tracing._METADATA.findall(text)).values())
