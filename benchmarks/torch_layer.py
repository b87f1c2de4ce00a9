"""The same layer as a torch user runs it: products by sgl-deep-gemm, every room between them one Triton kernel.

Rooms as SGLang orders them: experts' rows padded to 128 after each other for many tokens (prefill), one buffer per
expert for few (decode). Sizes are static and nothing waits for the host, so that a CUDA graph can hold a call.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import peers
from jaxmoe.bench import timing
from jaxmoe.bench.layer import random_params
from jaxmoe.config import MoEConfig
from jaxmoe.cuda import target
from jaxmoe.layer.layout import FEW_ROWS, expected_rows
from jaxmoe.layer.params import MoEParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.sizes import round_up
from jaxmoe.testing import calc_diff


def require() -> None:
    """Ends the program with a word on what to do, unless the torch layer can run here. Imports nothing of torch."""
    missing = [name for name in ("torch", "triton", "tvm_ffi", "deep_gemm") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"--torch needs {', '.join(missing)}: pip install torch triton sgl-deep-gemm==0.1.4.post1 (which compiles "
            "its kernels with a CUDA toolkit's nvcc), or leave --torch out"
        )
    if target.current().family != "sm90":
        raise SystemExit(f"--torch lays scales out for Hopper, and this is {target.current().name}; leave --torch out")


class TorchLayer:
    """One layer for the tokens x [T, H], bf16; a call writes ``y`` [T, H]. All parameters are torch tensors.

    ``overlap`` runs the shared expert on a second stream, beside router and dispatch.
    """

    def __init__(
        self, torch: Any, deep_gemm: Any, params: MoEParams, config: MoEConfig, x: Any, *, overlap: bool = False
    ) -> None:
        from benchmarks import torch_kernels

        self.torch, self.gemm, self.kernels = torch, deep_gemm, torch_kernels
        self.params, self.config, self.x = params, config, x
        self.side = torch.cuda.Stream() if overlap else None
        t, hidden, width, e = x.shape[0], config.hidden, config.intermediate, config.router.num_experts
        choices = t * config.router.top_k
        self.expected = expected_rows(choices, e)
        self.masked = self.expected <= FEW_ROWS
        self.each = round_up(t, 128) if self.masked else (choices + 127 * e) // 128 * 128
        grouped = (e, self.each) if self.masked else (self.each,)

        bf16, f32, int32 = torch.bfloat16, torch.float32, torch.int32
        empty = functools.partial(torch.empty, device=x.device)
        self.x32, self.logits, self.weights = empty(t, hidden, dtype=f32), empty(t, e, dtype=f32), empty(choices)
        self.ids, self.places, self.rows = (empty(choices, dtype=int32) for _ in range(3))
        self.counts, self.labels = empty(e, dtype=int32), empty(self.each, dtype=int32)
        self.tokens = torch.arange(t, dtype=int32, device=x.device)

        def quantised(*shape: int) -> tuple[Any, Any]:
            *groups, rows, k = shape
            scales = empty(*groups, k // 128, round_up(rows, 4), dtype=f32)
            return empty(*shape, dtype=torch.float8_e4m3fn), scales.transpose(-1, -2)[..., :rows, :]

        self.quantised, self.permuted = quantised(t, hidden), quantised(*grouped, hidden)
        self.h, self.act = empty(*grouped, 2 * width, dtype=bf16), quantised(*grouped, width)
        self.shared_h, self.shared_act = empty(t, 2 * width, dtype=bf16), quantised(t, width)
        self.out, self.shared, self.y = (empty(*n, hidden, dtype=bf16) for n in (grouped, (t,), (t,)))

    def __call__(self) -> None:
        """Runs the layer on the current stream."""
        (t, hidden), cuda, experts = self.x.shape, self.torch.cuda, self.params.experts
        self._quantise(self.x, self.quantised, t, round_up(t, 4))
        if self.side is None:
            self._shared()
        else:
            self.side.wait_stream(cuda.current_stream())
            with cuda.stream(self.side):
                self._shared()
        self._route()
        self._scatter()
        self._grouped(self.permuted, experts.gate_up, self.h)
        self._quantise(self.h, self.act, self.rows.shape[0], self.each, self.rows)
        self._grouped(self.act, experts.down, self.out)
        if self.side is not None:
            cuda.current_stream().wait_stream(self.side)
        addends = self.out, self.rows, self.weights, self.shared
        self.kernels.gather[(t, -(-hidden // 1024))](*addends, self.y, hidden, K=self.config.router.top_k, BLOCK=1024)

    def _route(self) -> None:
        router, r, t = self.params.router, self.config.router, self.x.shape[0]
        self.x32.copy_(self.x)
        self.torch.mm(self.x32, router.kernel, out=self.logits)
        self.counts.zero_()
        given = self.logits, router.correction_bias
        made = self.ids, self.weights, self.places, self.counts
        sizes = dict(E=r.num_experts, K=r.top_k, GROUPS=r.num_groups, TOP=r.top_groups, ROWS=8)
        self.kernels.route[(-(-t // 8),)](*given, *made, t, r.scaling_factor, **sizes, num_warps=1)

    def _quantise(self, x: Any, to: tuple[Any, Any], count: int, each: int, rows: Any = None) -> None:
        width = to[0].shape[-1]
        self.kernels.quantise[(count, -(-width // 1024))](x, *to, rows, width, each, GATED=rows is not None, BLOCKS=8)

    def _scatter(self) -> None:
        (t, hidden), int64, r = self.x.shape, self.torch.int64, self.config.router
        if not self.masked:
            self.labels.fill_(-1)
        given = self.quantised[0].view(int64), self.quantised[1], self.ids, self.places, self.counts
        made = self.permuted[0].view(int64), self.permuted[1], self.rows, self.labels
        words, blocks = hidden // 8, hidden // 128
        sizes = dict(E=r.num_experts, K=r.top_k, BLOCK=512, SCALES=1 << (blocks - 1).bit_length())
        self.kernels.scatter[(t, -(-words // 512))](
            *given, *made, words, blocks, round_up(t, 4), self.each, MASKED=self.masked, **sizes
        )

    def _grouped(self, rows: tuple[Any, Any], weight: Any, out: Any) -> None:
        pair = weight.values, weight.scales
        if self.masked:
            self.gemm.fp8_m_grouped_gemm_nt_masked(rows, pair, out, self.counts, self.expected)
        else:
            self.gemm.m_grouped_fp8_gemm_nt_contiguous(rows, pair, out, self.labels)

    def _shared(self) -> None:
        assert self.params.shared is not None and self.params.shared.experts is not None
        mlp, t = self.params.shared.experts, self.x.shape[0]
        up, down = ((w.values[0], w.scales[0]) for w in (mlp.gate_up, mlp.down))  # pyright: ignore[reportOptionalSubscript]
        self.gemm.fp8_gemm_nt(self.quantised, up, self.shared_h, compiled_dims="nk")
        self._quantise(self.shared_h, self.shared_act, t, round_up(t, 4), self.tokens)
        self.gemm.fp8_gemm_nt(self.shared_act, down, self.shared, compiled_dims="nk")


def graph(torch: Any, call: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of the call, made after two calls that compile what it needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):  # XLA's threads do as they like
        call()
    return captured.replay


WAYS: tuple[str, ...] = ("eager", "graph", "graph, 2 streams")


def compare(config: MoEConfig, tokens: int, turns: int = 8) -> dict[str, float]:
    """Seconds of our layer and of torch's by WAYS, and how far each result of torch's is from ours."""
    peer = peers.TorchDeepGEMM()
    torch = peer.torch
    params = random_params(config)
    x = jax.random.normal(jax.random.key(1), (tokens, config.hidden), jax.numpy.bfloat16)
    ours = jax.jit(functools.partial(moe, config=config))
    mine = jax.block_until_ready(ours(params, x).astype(jax.numpy.float32))
    theirs = jax.tree.map(peer.share, params), config, peer.share(x)
    one, two = (TorchLayer(torch, peer.deep_gemm, *theirs, overlap=on) for on in (False, True))
    calls = dict(zip(WAYS, (one, graph(torch, one), graph(torch, two)), strict=True))
    figures: dict[str, float] = {}
    inner = {}
    for (way, call), layer in zip(calls.items(), (one, one, two), strict=True):
        for written in (layer.h, layer.out, layer.shared_h, layer.shared, layer.y):
            written.fill_(float("nan"))  # so that a kernel missing from the graph would show
        call()
        figures[f"difference, {way}"] = calc_diff(layer.y.float().cpu().numpy(), mine)
        inner[way] = min(max(1, int(0.05 / peer.seconds(call, inner=4, repeats=1))), 2000)
    # In turns, each way first as often as last: what runs after a pause finds higher clocks.
    times: dict[str, list[float]] = {way: [] for way in ("ours", *WAYS)}
    for turn in range(turns):
        for way in [*times][turn % len(times) :] + [*times][: turn % len(times)]:
            if way == "ours":
                times[way].append(timing.seconds(ours, params, x, repeats=1))
            else:
                times[way].append(peer.seconds(calls[way], inner=inner[way], repeats=1))
    return figures | {way: statistics.median(seconds) for way, seconds in times.items()}


def text(figures: dict[str, float]) -> str:
    """A line per way to run it."""
    ours = figures["ours"]
    rows = [(w, figures[w] * 1e6, figures[w] / ours, f"{figures[f'difference, {w}']:.1e}") for w in WAYS]
    head = f"the same layer of torch and sgl-deep-gemm; ours in the same turns {ours * 1e6:.1f} us\n"
    return head + timing.table(("torch", "us", "torch / ours", "difference"), rows)
