"""Buffers that all ranks of an expert-parallel group write to, set up before the first program runs."""

from __future__ import annotations

import dataclasses
import os
import threading
from types import TracebackType
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxmoe.cuda import arch as arches
from jaxmoe.cuda import ffi
from jaxmoe.cuda.deepep import sizes as _sizes
from jaxmoe.cuda.deepep.sizes import Sizes, Wire
from jaxmoe.cuda.driver import driver
from jaxmoe.cuda.kernel import compile_kernels
from jaxmoe.cuda.source import KernelSource
from jaxmoe.dispatch.deepep import peers
from jaxmoe.dispatch.deepep.calls import Calls
from jaxmoe.errors import EpFailure, FormatError, ShapeError
from jaxmoe.quant.formats import BF16, ActivationQuant, WeightFormat
from jaxmoe.sizes import round_up


class EpContext:
    """Peer buffers of the :class:`DeepEP` transport: one on each local device of a mesh axis, known to all its ranks.

    Making one is collective: every process of the mesh makes the same contexts in the same order. It allocates outside
    of XLA's memory pool, zeroes the workspace, exchanges addresses, and compiles the kernels of the ``v2`` format;
    those of other formats, of ``deterministic=False`` and of gradients are compiled when a program that uses them is
    traced. ``close()``, or the end of a ``with`` block, gives the memory back; programs that use the context must have
    been traced while it was open and fail with its number afterwards.

    A kernel that waits longer than ``timeout_seconds`` for another rank stops with an error that ends the CUDA context
    of its process: nothing on that device works afterwards, and the process must be started again, as must those of
    the other ranks, which time out in turn. Inside a ``with`` block the error becomes an :class:`EpFailure`.

    Args:
      mesh: of the program. axis: mesh axis or axes, major first, of the R ranks; each group along them is separate.
      tokens: M, the most tokens a rank sends at once.
      hidden: H. num_experts: E of all ranks. top_k: K, fused shared experts included.
      replicated: fused shared experts, which every rank holds.
      weights: format of the experts. wire: ``"auto"`` sends rows as the format's GEMMs take them, quantised once;
        ``"bf16"`` as they are, which is what has gradients; ``"fp8"`` insists on quantised ones.
      alignment: rows that experts start at multiples of in ``v2_psum`` and ``ll``.
      num_sms: SMs that send; None takes :func:`jaxmoe.cuda.deepep.sizes.suggested_sms`.
      timeout_seconds: how long a kernel waits for the other ranks.
      command_buffers: whether XLA may record exchanges into its command buffers (CUDA graphs), which spares the host
        their launches. Not with a scheduling mode that lets independent calls of a buffer run at the same time: all
        calls of a context use one buffer. XLA's default, LHS, keeps their order.

    Attributes:
      sizes, wire, quant: what follows from the arguments. axis, hidden, num_experts, replicated: as given.

    Raises:
      ShapeError: numbers that do not fit each other or the kernels. FormatError: wire and weights contradict.
      BackendUnavailable: not NVIDIA GPUs with kernels, several hosts, GPUs without peer access, no compiler.
      MemoryError: too little free memory for the buffer.
    """

    def __init__(
        self,
        mesh: Mesh,
        axis: str | tuple[str, ...],
        *,
        tokens: int,
        hidden: int,
        num_experts: int,
        top_k: int,
        replicated: int = 0,
        weights: WeightFormat = BF16,
        wire: Literal["auto", "bf16", "fp8"] = "auto",
        alignment: int = 128,
        num_sms: int | None = None,
        timeout_seconds: float = 100.0,
        command_buffers: bool = False,
    ):
        flags = os.environ.get("XLA_FLAGS", "")
        if command_buffers and "command_buffer_scheduling_mode=CONCURRENT" in flags:
            raise ValueError(
                f"command_buffers=True with XLA_FLAGS {flags!r}, which run calls of a command buffer concurrently, as "
                "two exchanges of a context must not; take xla_gpu_command_buffer_scheduling_mode=LHS, or "
                "command_buffers=False"
            )
        self.axis, self.hidden, self.num_experts, self.replicated = axis, hidden, num_experts, replicated
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._buffers: peers.Buffers | None = None
        self.quant, self.wire = choose_wire(hidden, weights, wire)
        groups = peers.groups_of(mesh, axis)
        self.sizes = Sizes(
            ranks=len(groups[0]),
            tokens=tokens,
            hidden=hidden,
            experts=num_experts + len(groups[0]) * replicated,
            top_k=top_k,
            alignment=alignment,
        )
        if num_experts % self.sizes.ranks:
            raise ShapeError(
                f"{num_experts} experts do not divide over the {self.sizes.ranks} ranks of mesh axis {axis!r}; use a "
                f"number of ranks that divides {num_experts}"
            )
        own = [d for group in groups for d in group if d.process_index == jax.process_index()]
        if not own:
            raise ValueError(f"no device of mesh axis {axis!r} belongs to process {jax.process_index()}")
        arch = arches.detect(own[0])
        sms = _sizes.suggested_sms(self.sizes, available=arch.num_sms) if num_sms is None else num_sms
        if sms > arch.num_sms:
            raise ShapeError(f"num_sms is {sms}; {own[0].device_kind} has {arch.num_sms}")
        cycles = int(timeout_seconds * driver().clock_hz(own[0].local_hardware_id))
        if cycles < 1:
            raise ValueError(f"timeout_seconds is {timeout_seconds}; it must be above 0")
        self.sizes = dataclasses.replace(self.sizes, num_sms=sms, epilogue_sms=arch.num_sms, timeout_cycles=cycles)
        kernels = self._kernels(Calls(arch.name, self.sizes, 0))
        self._buffers = peers.Buffers(groups, self.sizes, self.wire, str(self))
        self._calls = Calls(arch.name, self.sizes, self._buffers.context, command_buffers)
        try:
            compile_kernels(kernels)
            self._buffers.publish(ffi.library())
        except BaseException:
            self.close()
            raise

    def _kernels(self, calls: Calls) -> list[KernelSource]:
        """Those that the class says are compiled now."""
        plans = (
            calls.plan_dispatch(self.wire, self.sizes.tokens, mode="given", expand=False),
            calls.plan_combine(self.sizes.tokens, expand=False),
        )
        return [source for call in plans for source, _ in call.launches]

    @property
    def calls(self) -> Calls:
        """The custom calls that use the buffers.

        Raises:
          RuntimeError: the context is closed.
        """
        if self._buffers is None:
            raise RuntimeError(f"the {self} is closed; make another one, and trace programs that use it again")
        return self._calls

    def close(self) -> None:
        """Waits for the devices and gives the memory back; collective. A second call does nothing."""
        with self._lock:
            buffers, self._buffers = self._buffers, None
        if buffers is not None:
            buffers.close()

    def explain(self, error: BaseException) -> EpFailure | None:
        """What an error of a program that used the context means, if a kernel of this process has failed, else None."""
        failed = None if self._buffers is None else self._buffers.failed()
        if failed is None:
            return None
        return EpFailure(
            f"the {self}: a kernel failed ({failed}). If its output names a time-out, a rank did not arrive within "
            f"{self.timeout_seconds:g} s: it died, ran another program, or is slower than that (see timeout_seconds). "
            f"The CUDA context of this process is lost; start all ranks again. First error: {error}"
        )

    def __enter__(self) -> EpContext:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        failure = None if error is None else self.explain(error)
        self.close()
        if failure is not None:
            raise failure from error

    def __repr__(self) -> str:
        at = f"tokens={self.sizes.tokens}, hidden={self.hidden}" if hasattr(self, "sizes") else f"hidden={self.hidden}"
        return f"EpContext over {self.axis!r} ({at})"


def choose_wire(hidden: int, weights: WeightFormat, wire: str) -> tuple[ActivationQuant | None, Wire]:
    """How rows of width H travel to experts of a format.

    Raises:
      FormatError: FP8 rows for experts that take bf16. ValueError: ``wire`` is unknown.
    """
    if wire not in ("auto", "bf16", "fp8"):
        raise ValueError(f"wire is {wire!r}; 'auto', 'bf16' or 'fp8' is needed")
    quant = None if wire == "bf16" else weights.activation
    if quant is None and wire == "fp8":
        raise FormatError(
            f"wire='fp8' with {weights.name} experts, which take bf16 rows; use wire='auto' or quantised weights"
        )
    if quant is None:
        return None, _sizes.combine_wire(hidden)
    width = round_up(hidden, 128)
    groups, packed = width // quant.block, quant.scale == "ue8m0"
    scale_dtype = jnp.int32 if packed else jnp.float32
    return quant, Wire(jnp.float8_e4m3fn, width, scale_dtype, -(-groups // 4) if packed else groups)
