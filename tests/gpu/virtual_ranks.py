"""Several ranks on one GPU, each with its own buffer, stream and few SMs: our launches through our launcher, no JAX.

A rank is a peer context of its own on the one device. What the kernels give is compared with the model of
``tests/dispatch/model.py``, exactly. ``python virtual_ranks.py [--ranks 2,4,8]`` prints a line per case.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import time
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.cuda import cubin_cache
from jaxmoe.cuda.deepep import specs
from jaxmoe.cuda.deepep.sizes import Sizes, Wire, combine_width, combine_wire
from jaxmoe.cuda.source import KernelSource
from jaxmoe.dispatch.deepep import formats
from jaxmoe.testing.files import load_file

HERE = pathlib.Path(__file__).parent
LAUNCHER = load_file(HERE / "rank_launcher.py")
VirtualRanks, FIRST_CONTEXT, POISON = LAUNCHER.VirtualRanks, LAUNCHER.FIRST_CONTEXT, LAUNCHER.POISON


def load_model() -> Any:
    return load_file(HERE.parent / "dispatch" / "model.py")


def same(what: str, got: np.ndarray, want: np.ndarray) -> None:
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    assert got.shape == want.shape and got.dtype == want.dtype, (what, got.shape, want.shape, got.dtype, want.dtype)
    unlike = got.reshape(-1).view(np.uint8) != want.reshape(-1).view(np.uint8)
    if unlike.any():
        i = int(np.argmax(unlike)) // got.dtype.itemsize
        at = np.unravel_index(i, got.shape)
        raise AssertionError(
            f"{what}: {int((got != want).sum())} of {got.size} differ, first at {tuple(map(int, at))}: "
            f"{got[at]} instead of {want[at]}"
        )


def make_ids(rng: np.random.Generator, kind: str, tokens: int, experts: int, k: int, ranks: int) -> np.ndarray:
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    if kind == "holes":
        ids[rng.random(ids.shape) < 0.3] = -1
        ids[::7] = -1
    if kind == "one_rank":
        ids = np.where(ids < experts // ranks, ids, -1).astype(np.int32)
    if kind == "none":
        ids[:] = -1
    return ids


@dataclasses.dataclass(frozen=True)
class Case:
    ranks: int
    tokens: tuple[int, ...]  # per rank
    kind: str = "holes"
    fp8: bool = False
    expand: bool = False
    mode: specs.Mode = "given"
    hidden: int = 1024
    experts: int = 16
    top_k: int = 4
    limit: int = 64


DEEPSEEK: dict[str, int] = {"hidden": 7168, "experts": 256, "top_k": 8, "limit": 128}


def sizes_of(case: Case, sms: int) -> tuple[Sizes, Wire, Wire]:
    """Sizes, what travels there, and what gradients travel in."""
    s = Sizes(
        ranks=case.ranks,
        tokens=case.limit,
        hidden=case.hidden,
        experts=case.experts,
        top_k=case.top_k,
        alignment=16,
        num_sms=sms,
        epilogue_sms=sms,
        timeout_cycles=10_000_000_000,
    )
    plain = combine_wire(case.hidden)
    fp8 = Wire(jnp.float8_e4m3fn, case.hidden, jnp.float32, case.hidden // 128)
    return s, fp8 if case.fp8 else plain, plain


def sources_of(case: Case, arch: str = "sm_90a", sms: int = 8) -> list[KernelSource]:
    """Every kernel that :func:`check` launches."""
    s, wire, plain = sizes_of(case, sms)
    calls = (
        specs.dispatch(arch, s, wire, 0, 1, mode=case.mode, expand=case.expand),
        specs.combine(arch, s, 0, 1, expand=case.expand, weights=True),
        specs.dispatch(arch, s, plain, 0, 1, mode="again", expand=case.expand, weights=False),
    )
    calls = (*calls, specs.gather(arch, s, 0, 1))
    return [source for call in calls for source, _ in call.launches]


def check(case: Case, model: Any, devices: list[int] | None = None, sms: int = 8) -> None:
    """Gather, dispatch, combine with weights, and the dispatch again of its gradient, against the model, to the bit."""
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    s, wire, plain = sizes_of(case, sms)
    ranks = VirtualRanks(s, wire, devices)
    try:
        _check(case, model, ranks, s, wire, plain, rng, case.limit)
    finally:
        ranks.close()


def _check(case: Case, model: Any, ranks: Any, s: Sizes, wire: Wire, plain: Wire, rng: Any, m: int) -> None:
    r, k, h = case.ranks, case.top_k, case.hidden
    receive = jax.jit(model.receive, static_argnums=(0, 1), static_argnames=("mode", "expand"))
    bring_back = jax.jit(model.bring_back, static_argnums=0, static_argnames="expand")
    most = max(max(case.tokens), 1)
    ids = np.full((r, most, k), -1, np.int32)
    for rank, tokens in enumerate(case.tokens):
        ids[rank, :tokens] = make_ids(rng, case.kind, tokens, case.experts, k, r)
    bits = rng.integers(0, 256, (r, most, wire.width * np.dtype(wire.dtype).itemsize), np.uint8)
    bits = np.where(bits % 128 == 127, bits - 1, bits).astype(np.uint8)  # no NaN in e4m3, nor a large bf16 exponent
    x = bits.view(wire.dtype) if case.fp8 else rng.standard_normal((r, most, wire.width)).astype(wire.dtype)
    weights = rng.random((r, most, k)).astype(np.float32)
    every = {"x": x, "ids": ids, "weights": weights}
    if case.fp8:
        every["scales"] = rng.random((r, wire.scales, -(-most // 4) * 4)).astype(np.float32)
    me = [jnp.int32(i) for i in range(r)]
    if case.mode != "plain":
        every["slots"] = np.stack([np.asarray(formats.slots_of(jnp.asarray(ids[i]), s, me[i])) for i in range(r)])
    given = [{n: a[i] for n, a in every.items()} for i in range(r)]
    if case.mode == "again":
        for i in range(r):
            places = {n: np.asarray(a) for n, a in formats.expanded_places(jnp.asarray(ids), s, me[i]).items()}
            given[i] |= {"ranks": places["ranks"], "metadata": places["metadata"]}
    options: dict[str, Any] = {"mode": case.mode, "expand": case.expand}
    for _ in range(3):  # all ranks' ids; with other ranks' parts of earlier calls in the way
        given_ids = rng.integers(-1, case.experts, (r, m, k)).astype(np.int32)
        gathers = [specs.gather(ranks.arch, s, FIRST_CONTEXT + i, m) for i in range(r)]
        for i, one in enumerate(ranks.run(gathers, [{"ids": a} for a in given_ids])):
            same(f"rank {i} gather", one["all_ids"], given_ids)
    # Ranks may have different numbers of tokens: each launches its own.
    calls = [
        specs.dispatch(ranks.arch, s, wire, FIRST_CONTEXT + i, max(t, 1), **options) for i, t in enumerate(case.tokens)
    ]
    cut = [_cut(a, max(t, 1)) for a, t in zip(given, case.tokens, strict=True)]
    got = ranks.run(calls, cut)

    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = {n: jnp.asarray(a) for n, a in every.items()}
        for i in range(r):
            on_rank = {n: jnp.asarray(a) for n, a in given[i].items()}
            want, _ = receive(s, wire, on_cpu, me[i], expand=case.expand, mode=case.mode, given=on_rank)
            compare(case, f"rank {i}", got[i], {n: np.asarray(a) for n, a in want.items()}, given[i], every, s)

    ways = []
    for i in range(r):
        way = {n: (got[i] | cut[i])[n] for n in ("ids", "slots", "ranks", "metadata")}
        rows = s.expanded if case.expand else s.received
        y = rng.standard_normal((rows, combine_width(h))).astype(plain.dtype)
        row_weights = rng.random((rows,) if case.expand else (rows, k)).astype(np.float32)
        ways.append(way | {"rows": y, "weights": row_weights})
    calls = [
        specs.combine(ranks.arch, s, FIRST_CONTEXT + i, max(t, 1), expand=case.expand, weights=True)
        for i, t in enumerate(case.tokens)
    ]
    back = ranks.run(calls, ways)
    with jax.default_device(jax.devices("cpu")[0]):
        joined = {n: jnp.stack([jnp.asarray(w[n]) for w in ways]) for n in ("rows", "weights", "metadata", "ranks")}
        joined["ids"] = jnp.asarray(ids)
        for i, t in enumerate(case.tokens):
            want = bring_back(s, joined, me[i], expand=case.expand)
            for name in ("y", "token_weights"):
                same(f"rank {i} combine {name}", back[i][name][:t], np.asarray(want[name])[:t])

    d_y = [rng.standard_normal((max(t, 1), combine_width(h))).astype(plain.dtype) for t in case.tokens]
    calls = [
        specs.dispatch(
            ranks.arch, s, plain, FIRST_CONTEXT + i, max(t, 1), mode="again", expand=case.expand, weights=False
        )
        for i, t in enumerate(case.tokens)
    ]
    again = ranks.run(calls, [w | {"x": d} for w, d in zip(ways, d_y, strict=True)])
    for i in range(r):
        for row in range(int(ways[i]["ranks"][-1])):
            sender, token = divmod(int(ways[i]["metadata"][row, 0]), m)
            at = [row] if not case.expand else [x for x in ways[i]["metadata"][row, 2:] if x >= 0]
            for place in at:
                same(f"rank {i} again row {place}", again[i]["rows"][place], d_y[sender][token])


def _cut(arrays: dict[str, np.ndarray], tokens: int) -> dict[str, np.ndarray]:
    whole = ("ranks", "metadata")
    out = {n: a if n in whole else a[:tokens] for n, a in arrays.items() if n != "scales"}
    if "scales" in arrays:
        out["scales"] = arrays["scales"][:, : -(-tokens // 4) * 4]
    return out


def compare(case: Case, who: str, got: Any, want: Any, given: Any, every: Any, s: Sizes) -> None:
    """Kernel against model; where the kernel chooses places, what is in each place."""
    if case.mode != "again":
        for name in ("ranks", "counts", "ends"):
            same(f"{who} {name}", got[name], want[name])
    table = got | given if case.mode == "again" else got
    n = int(table["ranks"][-1])
    if not case.expand and case.mode == "given":
        for name in ("rows", "row_ids", "row_weights"):
            same(f"{who} {name}", got[name][:n], want[name][:n])
        same(f"{who} metadata", got["metadata"][:n, :2], want["metadata"][:n, :2])
        if case.fp8:
            same(f"{who} row_scales", got["row_scales"][:, :n], want["row_scales"][:, :n])
    if case.mode == "again":
        used = np.unique(table["metadata"][:n, 2:])
        used = used[used >= 0]
        for name in ("rows", "row_weights"):
            same(f"{who} {name}", got[name][used], want[name][used])
    seen: set[int] = set()
    sources = np.sort(table["metadata"][:n, 0])
    same(
        f"{who} sources",
        sources.astype(np.int32),
        np.sort(want["metadata"][:n, 0]) if case.mode != "again" else sources,
    )
    me, el = int(who.split()[1]), s.local_experts
    for row in range(n):
        sender, token = divmod(int(table["metadata"][row, 0]), s.tokens)
        ids = every["ids"][sender, token]
        lanes = [j for j in range(s.top_k) if ids[j] >= 0 and ids[j] // el == me]
        assert int(table["metadata"][row, 1]) == sender * s.top_k + lanes[-1], (who, row, table["metadata"][row], lanes)
        places = table["metadata"][row, 2:] if case.expand else np.where(np.isin(range(s.top_k), lanes[:1]), row, -1)
        assert [j for j in range(s.top_k) if places[j] >= 0] == (lanes if case.expand else lanes[:1]), (
            who,
            row,
            places,
        )
        for j in lanes if case.expand else lanes[:1]:
            place = int(places[j])
            assert place not in seen, (who, place)
            seen.add(place)
            same(f"{who} row {place}", got["rows"][place], every["x"][sender, token])
            if case.fp8:
                same(f"{who} scales of row {place}", got["row_scales"][:, place], every["scales"][sender, :, token])
            if case.expand:
                same(f"{who} weight {place}", got["row_weights"][place], every["weights"][sender, token, j])
    rows = got["rows"].view(np.uint8).reshape(got["rows"].shape[0], -1)
    untouched = np.setdiff1d(np.arange(rows.shape[0]), list(seen))
    assert (rows[untouched] == POISON).all(), f"{who}: rows were written that nothing arrived in"


def cases(counts: list[int]) -> list[Case]:
    """Every mode for two ranks, the main ones for other numbers."""
    found = []
    for r in counts:
        uneven = tuple((37, 0, 64, 1)[i % 4] for i in range(r))
        even = (64,) * r
        found += [Case(r, even), Case(r, uneven, expand=True, mode="plain", fp8=True)]
        found += [Case(r, uneven, expand=True, mode="again")]
        if r == 2:
            found += [
                Case(r, even, fp8=True),
                Case(r, uneven, mode="plain"),
                Case(r, even, expand=True),
                Case(r, even, kind="one_rank", fp8=True, expand=True, mode="again"),
                Case(r, even, kind="none"),
                Case(r, (0,) * r, kind="none", expand=True, mode="plain", fp8=True),
                Case(1, (128,), expand=True, mode="plain", fp8=True, **DEEPSEEK),  # as many experts as one rank takes
                Case(1, (128,), **DEEPSEEK),
            ]
        if r == 8:
            found.append(Case(r, even, top_k=2, experts=32))  # fewer choices than ranks
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    wanted = cases([int(r) for r in arguments.ranks.split(",")])
    start = time.time()
    keys = cubin_cache.ensure([source for case in wanted for source in sources_of(case)])
    print(f"{len(keys)} kernels compiled in {time.time() - start:.1f} s", flush=True)
    model, failed, start = load_model(), 0, time.time()
    for case in wanted:
        if time.time() - start > arguments.seconds:
            print("out of time", flush=True)
            return 1
        began = time.time()
        try:
            check(case, model)
            print(f"ok   {time.time() - began:.1f} s {case}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAIL {time.time() - began:.1f} s {case}\n     {type(error).__name__}: {error}", flush=True)
            if "CUDA_ERROR" in str(error):
                return 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
