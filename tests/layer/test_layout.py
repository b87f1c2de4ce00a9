"""The rule by which rows get their layout."""

from __future__ import annotations

import pytest

from jaxmoe.config import Execution
from jaxmoe.layer.layout import choose_layout
from jaxmoe.ops.permute import buffer_rows


def chosen(tokens: int, choices: int = 8, experts: int = 256, **options: int) -> tuple[str, str]:
    return choose_layout(Execution(**options), tokens, choices, experts, alignment=128)


@pytest.mark.parametrize(("tokens", "experts", "layout"), [(1, 256, "psum"), (128, 32, "masked"), (4096, 32, "psum")])
def test_by_phase(tokens: int, experts: int, layout: str) -> None:
    assert chosen(tokens, experts=experts)[0] == layout


def test_masked_reserves_no_more_rows_than_psum_unless_allowed() -> None:
    for tokens in (1, 100, 128, 129, 256, 512, 2048):
        layout, why = chosen(tokens)
        rows = {name: buffer_rows(name, tokens, tokens * 8, 256, 128) for name in ("masked", "psum")}
        assert (layout == "masked") == (rows["masked"] <= rows["psum"])
        assert layout == "masked" or str(rows["masked"]) in why
    assert chosen(512)[0] == "psum"
    assert chosen(512, masked_rows=512 * 256)[0] == "masked"
    assert chosen(512, masked_rows=512 * 256 - 1)[0] == "psum"


def test_a_capacity_too_small_is_psum() -> None:
    layout, why = chosen(100, masked_capacity=99)
    assert layout == "psum" and "99 does not hold 100 tokens" in why


def test_the_environment_decides_where_the_run_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXMOE_LAYOUT", "contiguous")
    assert chosen(1) == ("contiguous", "asked for by JAXMOE_LAYOUT")
    assert choose_layout(Execution(layout="psum"), 1, 8, 256, alignment=128)[0] == "psum"
    monkeypatch.setenv("JAXMOE_LAYOUT", "mask")
    with pytest.raises(ValueError, match="'mask'; choose 'auto' or one of psum, masked, contiguous"):
        chosen(1)
