"""The load of experts to look at: bars of text, or a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.errors import ShapeError


def load_bars(load: Any, *, ranks: int = 1, width: int = 40) -> str:
    """A line per expert, its bar ``width`` long for the fullest; with ranks, a line for each rank's sum before its own.

    Args:
      load: [E], at least 0: choices per expert.
      ranks: R, to each of which E/R experts belong in order.
      width: characters of the longest bar.

    Raises:
      ShapeError: the load is not [E], or R does not divide E.
    """
    load = _checked(load, ranks)
    most, total, mean = max(load.max(), 1), max(load.sum(), 1), load.sum() / ranks
    digits, lines = len(str(len(load) - 1)), []
    for rank, own in enumerate(load.reshape(ranks, -1)):
        if ranks > 1:
            lines.append(f"rank {rank}: {own.sum()} rows, {own.sum() / max(mean, 1):.2f} of the mean")
        for e, count in enumerate(own, start=rank * own.size):
            bar = "█" * round(width * count / most) or ("▏" if count else "")
            lines.append(f"expert {e:>{digits}} {bar:<{width}} {count} ({100 * count / total:.1f} %)")
    return "\n".join(lines)


def plot_load(load: Any, path: str | Path, *, ranks: int = 1, title: str = "") -> Path:
    """Draws the load of one layer or several as a PNG; needs matplotlib (``pip install "jaxmoe[examples]"``).

    Args:
      load: [E] or [layers, E], at least 0.
      path: where to write.
      ranks: R; experts of one rank have one colour, and a line marks the mean of all experts.
      title: above the picture.

    Returns:
      ``path``.

    Raises:
      ImportError: matplotlib is not installed. ShapeError: as :func:`load_bars`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError('plot_load needs matplotlib; run: pip install "jaxmoe[examples]"') from missing
    layers = [_checked(layer, ranks) for layer in np.atleast_2d(np.asarray(load))]
    figure = Figure(figsize=(8, 1 + 1.6 * len(layers)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = np.atleast_1d(figure.subplots(len(layers), 1, sharex=True))
    for n, (plot, counts) in enumerate(zip(axes, layers, strict=True)):
        experts = np.arange(len(counts))
        colours = [f"C{rank % 10}" for rank in np.repeat(np.arange(ranks), len(counts) // ranks)]
        plot.bar(experts, counts, color=colours)
        plot.axhline(counts.mean(), color="black", linewidth=0.8)
        plot.set_ylabel(f"layer {n}" if len(layers) > 1 else "choices")
    axes[-1].set_xlabel("expert")
    if title:
        figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)
    return Path(path)


def _checked(load: Any, ranks: int) -> np.ndarray:
    load = np.asarray(load)
    if load.ndim != 1 or not load.size:
        raise ShapeError(f"the load is {list(load.shape)}; it must be [E]")
    if ranks < 1 or len(load) % ranks:
        raise ShapeError(f"{len(load)} experts do not divide over {ranks} ranks; use a number that divides them")
    return load
