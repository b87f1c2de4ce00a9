"""A layer's figures as text, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxmoe.bench import timing
from jaxmoe.bench.layer import ROOMS, Figures

ORDER = (*ROOMS, "other", "whole layer", "idle")
"""Rooms in the order in which a token passes them."""


def text(figures: Figures, *, kernels: bool = False) -> str:
    """A few lines and a table of rooms; ``kernels`` lists everything that ran as well."""
    p, floor, c = figures.plan, figures.floor, figures.plan.config
    share = floor.seconds / figures.seconds
    off = 100 * (figures.peak / p.memory.peak - 1)
    lines = [
        f"{p.tokens} tokens, {c.router.num_experts} experts, hidden {c.hidden}, intermediate {c.intermediate}, "
        f"{c.weights.name}, {p.layout}",
        f"  {figures.seconds * 1e6:.1f} us, {share:.2f} of the rate of its floor, {floor.seconds * 1e6:.1f} us: "
        f"GEMMs alone {floor.gemms * 1e6:.1f}, all else at copy rate {floor.moved * 1e6:.1f}",
        f"  memory {figures.peak / 1e9:.3f} GB, planned {p.memory.peak / 1e9:.3f} GB, off by {off:+.1f} %",
    ]
    if figures.trace is not None and figures.replay is not None:
        replay = figures.replay
        copies = [k for k in figures.trace.kernels if k.name.lower().startswith("memcpy") or "transpose" in k.name]
        lines.append(
            f"  one traced call: {replay.span * 1e6:.1f} us from first to last of {len(replay.kernels)} kernels, of "
            f"which {replay.idle * 1e6:.1f} us idle; copies and transposes: {len(copies)}, "
            f"{sum(k.seconds for k in copies) * 1e6:.1f} us"
        )
        rooms = figures.rooms
        total = sum(rooms.values())
        rows = [(room, seconds * 1e6, 100 * seconds / total) for room, seconds in rooms.items()]
        lines.append(timing.table(("room", "us", "%"), rows))
        if kernels:
            rows = [(k.name[:60], k.start * 1e6, k.seconds * 1e6, k.op, k.scope[-60:]) for k in figures.trace.kernels]
            lines.append(timing.table(("kernel", "start us", "us", "op", "scope"), rows))
    return "\n".join(lines)


def as_json(figures: Figures) -> dict[str, Any]:
    """Every figure, in seconds and bytes."""
    p = figures.plan
    return {
        "machine": timing.machine(),
        "tokens": p.tokens,
        "layout": p.layout,
        "format": p.config.weights.name,
        "seconds": figures.seconds,
        "floor_gemms": figures.floor.gemms,
        "floor_moved": figures.floor.moved,
        "peak_bytes": figures.peak,
        "planned_bytes": p.memory.peak,
        "rooms": figures.rooms,
        "traced": None if figures.replay is None else {"span": figures.replay.span, "idle": figures.replay.idle},
    }


def picture(figures: Sequence[Figures], path: str) -> None:
    """Draws one bar per number of tokens, its rooms end to end, beside its floor, into a PNG.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ValueError(f"a picture needs matplotlib: pip install 'jaxmoe[examples]' ({missing})") from missing
    parts = [f.rooms or {"whole layer": f.seconds} for f in figures]
    names = sorted({name for part in parts for name in part}, key=lambda name: (name == "idle", ORDER.index(name)))
    colours = {name: f"C{i}" for i, name in enumerate(names)} | {"idle": "lightgrey"}
    canvas = Figure(figsize=(9, 1.4 + 1.1 * len(figures)), layout="constrained")
    axes = canvas.subplots()
    for i, (f, part) in enumerate(zip(figures, parts, strict=True)):
        left, total = 0.0, sum(part.values())
        for name in names:
            share = 100 * part.get(name, 0.0) / total
            axes.barh(i, share, left=left, color=colours[name], label=name if i == 0 else None)
            left += share
        axes.plot([100 * f.floor.seconds / total] * 2, [i - 0.45, i + 0.45], color="black", linewidth=2)
    axes.set_yticks(range(len(figures)), [f"{f.plan.tokens} tokens\n{f.seconds * 1e6:.0f} µs" for f in figures])
    axes.invert_yaxis()
    axes.set_xlabel("% of one call; the black line is the floor")
    axes.set_title(f"{figures[0].plan.config.weights.name} layer, {timing.machine()}", fontsize=9)
    canvas.legend(loc="outside lower center", ncols=5, fontsize=8)
    canvas.savefig(path, dpi=150)
