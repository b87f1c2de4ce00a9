"""The rule by which rows get their layout."""

from __future__ import annotations

import pytest

from jaxmoe.config import Execution, MoEConfig, RouterConfig, SharedExperts
from jaxmoe.cuda.arch import Arch
from jaxmoe.layer.kernels import kernels_for
from jaxmoe.layer.layout import choose_layout
from jaxmoe.ops.permute import buffer_rows
from jaxmoe.quant.formats import BF16, FP8Block


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


def test_deterministic_mode_runs_the_same_kernels_for_every_number_of_tokens() -> None:
    router = RouterConfig(num_experts=16, top_k=4)
    for fmt in (BF16, FP8Block):
        config = MoEConfig(
            hidden=1024, intermediate=512, router=router, weights=fmt, shared=SharedExperts(intermediate=640)
        )
        lists = {
            on: [
                set(kernels_for(config, Arch("sm_90a", 132), [t], Execution(deterministic=on)))
                for t in (1, 7, 64, 129, 512, 700, 8192)
            ]
            for on in (True, False)
        }
        assert all(kernels == lists[True][0] for kernels in lists[True])
        assert any(kernels != lists[False][0] for kernels in lists[False])


def test_the_environment_decides_where_the_run_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXMOE_LAYOUT", "contiguous")
    assert chosen(1) == ("contiguous", "asked for by JAXMOE_LAYOUT")
    assert choose_layout(Execution(layout="psum"), 1, 8, 256, alignment=128)[0] == "psum"
    monkeypatch.setenv("JAXMOE_LAYOUT", "mask")
    with pytest.raises(ValueError, match="'mask'; choose 'auto' or one of psum, masked, contiguous"):
        chosen(1)
