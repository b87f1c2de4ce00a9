"""Text that every Python carries: the language reference in ``pydoc_data.topics``, as bytes."""

from __future__ import annotations

from pydoc_data import topics

import numpy as np
from model import END

HELD_OUT = 0.05


def corpus() -> tuple[np.ndarray, np.ndarray]:
    """Tokens to train on and tokens held out, int32; a topic starts with ``END``.

    Topics quote each other, so a paragraph counts where it comes first only: nothing held out was trained on. The text
    is that of the running Python and differs a little between its versions.
    """
    seen: set[str] = set()
    stream: list[int] = []
    for _, text in sorted(topics.topics.items()):
        paragraphs = [p for p in text.split("\n\n") if p not in seen]
        seen.update(paragraphs)
        stream += [END, *"\n\n".join(paragraphs).encode()]
    tokens = np.asarray(stream, np.int32)
    cut = round(len(tokens) * (1 - HELD_OUT))
    return tokens[:cut], tokens[cut:]
