"""A DeepGEMM kernel as a JAX operation: a custom call that knows how it may be sharded and batched.

XLA cannot see into a custom call. Left alone it would gather sharded operands to full size on every device, so the
call carries a partitioning rule: dimensions along which the GEMM falls apart into independent ones are run locally,
any other sharding is refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.deepgemm.gemm import Arch as GemmArch
from jaxmoe.cuda.deepgemm.gemm import Dtype, Gemm, Layout, Major
from jaxmoe.cuda.deepgemm.prenorm import Prenorm, plan_prenorm
from jaxmoe.cuda.deepgemm.specs import plan_launch
from jaxmoe.cuda.deepgemm.zero import plan_empty
from jaxmoe.cuda.kernel import run_kernels
from jaxmoe.cuda.launch import LaunchSpec
from jaxmoe.cuda.source import KernelSource

Array = jax.Array

GEMM_ARCH: dict[str, GemmArch] = {"sm90": "sm_90", "sm100": "sm_100"}
"""The planner's architecture by kernel family."""


Planned = tuple[KernelSource, LaunchSpec]
Factors = tuple[tuple[str, ...], tuple[str, ...]]


class Call(Protocol):
    """Everything static about a custom call but its shapes, which follow from the operands. Hashable."""

    @property
    def layout(self) -> str:
        """What kind of GEMM, for messages."""
        ...

    @property
    def factors(self) -> Factors:
        """A letter per dimension of each operand, and of each result; equal letters are one factor."""
        ...

    @property
    def divisible(self) -> str:
        """Factors along which the GEMM is a set of independent ones."""
        ...

    def plan(self, operands: Sequence[Any]) -> list[Planned]:
        """What runs over operands of these shapes, in order."""
        ...

    def results(self, operands: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Results over operands of these shapes."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmCall:
    """A GEMM of :mod:`jaxmoe.cuda.deepgemm.specs`; see :class:`Call`.

    Attributes:
      arch: what to compile for.
      layout, a, b, d, b_major, gran_a, gran_b, expected_m: see :class:`Gemm`.
      alignment: rows that experts start at multiples of.
      num_sms: SMs to use at most, even; None for all.
      pdl: programmatic stream serialisation.
    """

    arch: Arch
    layout: Layout
    a: Dtype
    b: Dtype
    d: Dtype = "bf16"
    b_major: Major = "K"
    gran_a: int = 128
    gran_b: int = 128
    expected_m: int = 0
    alignment: int = 128
    num_sms: int | None = None
    pdl: bool = False

    @property
    def scaled(self) -> bool:
        """Whether A and B come with scales."""
        return self.a != "bf16"

    def gemm(self, operands: Sequence[Any]) -> Gemm:
        """The GEMM over operands of these shapes, in the order of :mod:`jaxmoe.cuda.deepgemm.specs`."""
        a, b = operands[0].shape, operands[2 if self.scaled else 1].shape
        m, k = reversed(a) if self.layout == "k_grouped" else a[-2:]
        groups = operands[2].shape[0] if self.layout == "k_grouped" else 1 if self.layout == "dense" else b[0]
        return Gemm(
            arch=GEMM_ARCH[self.arch.family],
            layout=self.layout,
            m=m,
            n=b[-1] if self.b_major == "MN" else b[-2],
            k=k * (2 if self.a == "e2m1" else 1),
            groups=groups,
            a=self.a,
            b=self.b,
            d=self.d,
            b_major=self.b_major,
            gran_a=self.gran_a,
            gran_b=self.gran_b,
            expected_m=self.expected_m,
        )

    def plan(self, operands: Sequence[Any]) -> list[Planned]:
        """Sources and launches over operands of these shapes; see :func:`plan_launch`, also for the errors."""
        gemm = self.gemm(operands)
        num_sms = self.arch.num_sms if self.num_sms is None else min(self.num_sms, self.arch.num_sms)
        planned = plan_launch(gemm, num_sms=num_sms, mk_alignment=self.alignment, pdl=self.pdl)
        if planned is None:
            return []
        return [planned, plan_empty(self.arch.name, gemm)] if gemm.k_grouped else [planned]

    def results(self, operands: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """d over operands of these shapes."""
        gemm = self.gemm(operands)
        shape = (gemm.groups, gemm.m, gemm.n) if gemm.layout in ("masked", "k_grouped") else (gemm.m, gemm.n)
        return (jax.ShapeDtypeStruct(shape, jnp.float32 if self.d == "f32" else jnp.bfloat16),)

    @property
    def factors(self) -> Factors:
        """``h`` is k in bytes of two values; ``s``, ``p``, ``u`` and ``v`` are extents of scales."""
        if self.layout == "k_grouped":
            return ("k m", "k n", "g"), ("g m n",)
        masked, g = self.layout == "masked", "" if self.layout == "dense" else "g "
        k = "h" if self.b != self.a else "k"
        a, scales_a, d = ("g m k", "g s p", "g m n") if masked else ("m k", "s p", "m n")
        b = g + (f"n {k}" if self.b_major == "K" else f"{k} n")
        operands = (a, scales_a, b, f"{g}u v") if self.scaled else (a, b)
        group = {"dense": (), "contiguous": ("m",)}.get(self.layout, ("g",))
        return (*operands, *group), (d,)

    @property
    def divisible(self) -> str:
        """Experts of masked rows, and what no scale array and no group is indexed by."""
        if self.layout == "masked":
            return "g" if self.scaled else "gn"
        return "mn" if self.layout in ("dense", "k_grouped") and not self.scaled else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrenormCall:
    """The hyper-connection GEMM of :mod:`jaxmoe.cuda.deepgemm.prenorm`, unsplit; see :class:`Call`."""

    arch: Arch
    layout = "prenorm"
    factors = ("m k", "n k"), ("m n", "m")
    divisible = "m"

    def plan(self, operands: Sequence[Any]) -> list[Planned]:
        """Source and launch over x [m, k] and weight [n, k]; see :func:`plan_prenorm`, also for the errors."""
        (m, k), n = operands[0].shape, operands[1].shape[0]
        planned = plan_prenorm(Prenorm(arch=GEMM_ARCH[self.arch.family], m=m, n=n, k=k))
        return [planned] if planned else []

    def results(self, operands: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The product and the squared norms."""
        m, n = operands[0].shape[0], operands[1].shape[0]
        return jax.ShapeDtypeStruct((m, n), jnp.float32), jax.ShapeDtypeStruct((m,), jnp.float32)


def call_kernel(call: Call, operands: Sequence[Array]) -> tuple[Array, ...]:
    """Runs a kernel inside a traced program; see :mod:`jaxmoe.cuda.deepgemm.specs` for the GEMMs' operands.

    It is compiled now unless the cubin cache has it. ``vmap`` runs the GEMMs one after another.

    Raises:
      ShapeError, BackendUnavailable: from the planner.
      JaxRuntimeError: when the program is compiled: operands are sharded along a dimension the GEMM cannot be cut
        along; the text, a ValueError's, names operand, mesh axis and the way out.
    """
    return _batched(call)(*operands)


@functools.cache
def _batched(call: Call) -> Any:
    return sequential_vmap(functools.partial(_partitioned, call))


@functools.partial(custom_partitioning, static_argnums=(0,))
def _partitioned(call: Call, *operands: Array) -> tuple[Array, ...]:
    return _run(call, *operands)


def _run(call: Call, *operands: Array) -> tuple[Array, ...]:
    results, planned = call.results(operands), call.plan(operands)
    if not planned:
        return tuple(jnp.zeros(result.shape, result.dtype) for result in results)
    return run_kernels(planned, operands, results, name=f"jaxmoe_{planned[0][1].name}")


def _rule(call: Call, mesh: Any, arguments: Any, results: Any) -> str:
    del mesh, arguments, results
    return " -> ".join(map(", ".join, call.factors))


def _partition(call: Call, mesh: Any, arguments: Any, results: Any) -> Any:
    del results
    axes: dict[str, Any] = {}
    factor_of: dict[str, str] = {}
    for factors, argument in zip(call.factors[0], arguments, strict=True):
        for factor, axis in zip(factors.split(), argument.sharding.spec, strict=False):
            if axis is None:
                continue
            names = axis if isinstance(axis, tuple) else (axis,)
            cut_otherwise = axes.setdefault(factor, axis) != axis
            if (
                factor not in call.divisible
                or cut_otherwise
                or {factor_of.setdefault(n, factor) for n in names} != {factor}
            ):
                raise ValueError(
                    f"a {call.layout} GEMM has an operand {list(argument.shape)} sharded over mesh axis {axis!r} along "
                    f"dimension {factor!r} of ({factors}), along which it cannot be cut; call it inside jax.shard_map, "
                    "where each device sees its own rows and experts, or replicate the operand"
                )

    def sharding(factors: str) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(axes.get(factor) for factor in factors.split())))

    operands, outs = (tuple(map(sharding, factors)) for factors in call.factors)
    return mesh, functools.partial(_run, call), outs, operands


_partitioned.def_partition(_partition, sharding_rule=_rule)
