"""Template arguments and source of each kernel."""

from __future__ import annotations

from jaxmoe.cuda.deepep.sizes import NOTIFY_WARPS, Sizes, Wire, combine_width
from jaxmoe.cuda.source import KernelSource, own_code

_QUEUE_PAIRS = 1  # of the network interface, which is never used
_CHANNELS = _SCALEOUT_RANKS = 1
_NVLINK, _REDUCE_AT_SENDER = True, True


def dispatch_source(arch: str, s: Sizes, wire: Wire, *, given_slots: bool, notify: bool) -> KernelSource:
    """Sends tokens to ranks; with ``given_slots`` to places that the caller chose."""
    cpu_sync = False
    warps = (NOTIFY_WARPS if notify else 0, s.dispatch_warps(wire, notify=notify))
    sizes = (s.ranks, wire.row_bytes, wire.scales, s.tokens, s.experts, s.top_k, s.alignment)
    args = (_NVLINK, cpu_sync, given_slots, s.num_sms, *warps, *sizes, _QUEUE_PAIRS, s.timeout_cycles)
    return _source("dispatch", arch, s, args)


def copy_source(arch: str, s: Sizes, wire: Wire, *, expand: bool, given_rows: bool) -> KernelSource:
    """Copies what arrived out of the buffer, into rows that the caller gives or the kernel counts up."""
    zero_padding = False
    sizes = (s.ranks, wire.row_bytes, wire.scales, s.tokens, s.experts, s.top_k, s.alignment)
    launch = (s.epilogue_sms, _CHANNELS, s.copy_warps(wire), _SCALEOUT_RANKS)
    return _source("dispatch_copy_epilogue", arch, s, (expand, given_rows, zero_padding, *launch, *sizes))


def combine_source(arch: str, s: Sizes, *, expand: bool) -> KernelSource:
    """Sends results back."""
    sizes = (s.num_sms, s.combine_warps, s.ranks, combine_width(s.hidden), s.tokens, s.experts, s.top_k)
    return _source("combine", arch, s, (_NVLINK, expand, _REDUCE_AT_SENDER, *sizes, _QUEUE_PAIRS, s.timeout_cycles))


def reduce_source(arch: str, s: Sizes, *, expand: bool) -> KernelSource:
    """Adds up over ranks what came back."""
    sizes = (s.ranks, combine_width(s.hidden), s.tokens, s.experts, s.top_k)
    launch = (s.epilogue_sms, s.reduce_warps, _SCALEOUT_RANKS)
    return _source("combine_reduce_epilogue", arch, s, (expand, _REDUCE_AT_SENDER, *launch, *sizes))


def gather_source(arch: str, s: Sizes) -> KernelSource:
    """Gives every rank all ranks' ids; our own."""
    instance = f"jaxmoe_gather_ids<{_shown((s.ranks, s.timeout_cycles))}>"
    return _kernel("gather_ids", arch, s, own_code("gather_ids"), instance)


def _source(header: str, arch: str, s: Sizes, args: tuple[int | bool, ...]) -> KernelSource:
    code = f"#include <deep_ep/impls/{header}.cuh>\nusing namespace deep_ep::elastic;\n"
    return _kernel(header, arch, s, code, f"{header}_impl<{_shown(args)}>")


def _shown(args: tuple[int | bool, ...]) -> str:
    return ", ".join(str(a).lower() if isinstance(a, bool) else f"{a}ll" if a >= 2**31 else str(a) for a in args)


def _kernel(what: str, arch: str, s: Sizes, code: str, instance: str) -> KernelSource:
    code += f"void jaxmoe_instantiate() {{ (void)&{instance}; }}\n"
    return KernelSource(name=f"deepep_{what}_r{s.ranks}_m{s.tokens}", arch=arch, code=code, package="deep_ep")
