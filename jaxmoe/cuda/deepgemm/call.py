"""One DeepGEMM GEMM as a JAX operation: a custom call that knows how it may be sharded and batched.

XLA cannot see into a custom call. Left alone it would gather sharded operands to full size on every device, so the
call carries a partitioning rule: dimensions along which the GEMM falls apart into independent ones are run locally,
any other sharding is refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.cuda.arch import Arch
from jaxmoe.cuda.deepgemm.gemm import Arch as GemmArch
from jaxmoe.cuda.deepgemm.gemm import Dtype, Gemm, Layout, Major
from jaxmoe.cuda.deepgemm.specs import plan_launch
from jaxmoe.cuda.kernel import run_kernel

Array = jax.Array

GEMM_ARCH: dict[str, GemmArch] = {"sm90": "sm_90", "sm100": "sm_100"}
"""The planner's architecture by kernel family."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmCall:
    """Everything static about a GEMM but its shapes, which follow from the operands.

    Attributes:
      arch: what to compile for.
      layout, a, b, d, b_major, gran_a, gran_b, expected_m: see :class:`Gemm`.
      alignment: rows that experts start at multiples of.
      num_sms: SMs to use, None for all.
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
        n = b[-1] if self.b_major == "MN" else b[-2]
        k = a[-1] * (2 if self.a == "e2m1" else 1)
        return Gemm(
            arch=GEMM_ARCH[self.arch.family],
            layout=self.layout,
            m=a[-2],
            n=n,
            k=k,
            groups=b[0] if self.layout != "dense" else 1,
            a=self.a,
            b=self.b,
            d=self.d,
            b_major=self.b_major,
            gran_a=self.gran_a,
            gran_b=self.gran_b,
            expected_m=self.expected_m,
        )

    @property
    def factors(self) -> tuple[str, ...]:
        """A letter per dimension of each operand, then of the result; equal letters are one factor."""
        a = {"masked": "g m k"}.get(self.layout, "m k")
        b = (
            ("n k" if self.b_major == "K" else "k n")
            if self.layout == "dense"
            else f"g {'n k' if self.b_major == 'K' else 'k n'}"
        )
        b = b.replace("k", "h") if self.b == "e2m1" and self.a != "e2m1" else b
        scales_a = "g s p" if self.layout == "masked" else "s p"
        scales_b = "u v" if self.layout == "dense" else "g u v"
        operands = (a, scales_a, b, scales_b) if self.scaled else (a, b)
        groups = {"dense": (), "contiguous": ("m",)}.get(self.layout, ("g",))
        return (*operands, *groups, {"masked": "g m n"}.get(self.layout, "m n"))

    @property
    def divisible(self) -> str:
        """Factors along which the GEMM is a set of independent ones."""
        if self.layout == "masked":
            return "g" if self.scaled else "gn"
        return "mn" if self.layout == "dense" and not self.scaled else ""


def call_gemm(call: GemmCall, operands: Sequence[Array]) -> Array:
    """Runs a GEMM inside a traced program; see :mod:`jaxmoe.cuda.deepgemm.specs` for operands and result.

    The kernel is compiled now unless the cubin cache has it. ``vmap`` runs the GEMMs one after another.

    Raises:
      ShapeError, BackendUnavailable: from the planner.
      ValueError: operands are sharded along a dimension the GEMM cannot be cut along (when the program is compiled).
    """
    return _batched(call)(*operands)


@functools.cache
def _batched(call: GemmCall) -> Any:
    return sequential_vmap(functools.partial(_partitioned, call))


@functools.partial(custom_partitioning, static_argnums=(0,))
def _partitioned(call: GemmCall, *operands: Array) -> Array:
    return _run(call, *operands)


def _run(call: GemmCall, *operands: Array) -> Array:
    gemm = call.gemm(operands)
    shape = (gemm.groups, gemm.m, gemm.n) if gemm.layout == "masked" else (gemm.m, gemm.n)
    result = jax.ShapeDtypeStruct(shape, jnp.float32 if call.d == "f32" else jnp.bfloat16)
    num_sms = min(call.num_sms or call.arch.num_sms, call.arch.num_sms)
    planned = plan_launch(gemm, num_sms=num_sms, mk_alignment=call.alignment, pdl=call.pdl)
    if planned is None:
        return jnp.zeros(result.shape, result.dtype)
    (out,) = run_kernel(planned, operands, [result])
    return out


def _rule(call: GemmCall, mesh: Any, arguments: Any, results: Any) -> str:
    del mesh, arguments, results
    return f"{', '.join(call.factors[:-1])} -> {call.factors[-1]}"


def _partition(call: GemmCall, mesh: Any, arguments: Any, result: Any) -> Any:
    del result
    axes: dict[str, Any] = {}
    for factors, argument in zip(call.factors[:-1], arguments, strict=True):
        spec = tuple(argument.sharding.spec)
        for factor, axis in zip(factors.split(), spec + (None,) * (len(argument.shape) - len(spec)), strict=True):
            if axis is None:
                continue
            if factor not in call.divisible or axes.setdefault(factor, axis) != axis:
                raise ValueError(
                    f"a {call.layout} GEMM has an operand {list(argument.shape)} sharded over mesh axis {axis!r} along its "
                    f"dimension '{factor}' ({factors}), along which it cannot be cut; call it inside jax.shard_map, "
                    "where each device sees its own rows and experts, or replicate the operand"
                )

    def sharding(factors: str) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(axes.get(factor) for factor in factors.split())))

    *operands, out = map(sharding, call.factors)
    return mesh, functools.partial(_run, call), out, tuple(operands)


_partitioned.def_partition(_partition, sharding_rule=_rule)
