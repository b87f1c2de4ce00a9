"""The arithmetic of tensor-parallel cuts, over all sizes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.checkpoint.load import _cut


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 400), st.integers(1, 16), st.sampled_from([1, 32, 128]), st.integers(0, 500))
def test_parts_cover_the_width_once_and_start_on_blocks(part, ranks, grid, first):
    cuts = [_cut("width", part * ranks, (rank, ranks), grid, first) for rank in range(ranks)]
    assert [c.start for c in cuts] == [first + part * r for r in range(ranks)]
    assert all(c.stop - c.start == part and c.low % grid == 0 and 0 <= c.start - c.low < grid for c in cuts)
    assert len({c.width for c in cuts}) == 1
    assert all(c.stop - c.low <= c.width < part + 2 * grid for c in cuts)
    if all(c.start % grid == 0 for c in cuts):
        assert cuts[0].width == part
