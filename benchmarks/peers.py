"""What a user would pick instead of jaxmoe, each behind one small function; a peer that cannot run says why."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.bench.timing import kernel_seconds
from jaxmoe.config import MoEConfig
from jaxmoe.layer.params import MoEParams
from jaxmoe.router import route

Array = jax.Array


def ragged_dot(rows: Array, weight: Array, sizes: Array) -> float:
    """Seconds of ``jax.lax.ragged_dot`` on bf16 rows [M, K] sorted by expert, weight [E, N, K]."""
    return kernel_seconds(_ragged_dot, rows, weight, sizes, inner=1, repeats=3)


@jax.jit
def _ragged_dot(x: Array, w: Array, s: Array) -> Array:
    return jax.lax.ragged_dot(x, w.mT, s)


def ragged_weight_gradient(dy: Array, rows: Array, sizes: Array) -> float:
    """Seconds of dL/dweight [E, N, K] by ``jax.lax.ragged_dot_general``; dy [M, N] and rows [M, K] sorted by expert."""
    return kernel_seconds(_ragged_weight_gradient, dy, rows, sizes, inner=1, repeats=3)


@jax.jit
def _ragged_weight_gradient(dy: Array, x: Array, s: Array) -> Array:
    over_rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(dy, x, s, over_rows)


def ragged_layer(params: MoEParams, config: MoEConfig, tokens: int) -> float:
    """Seconds of :func:`ragged_dot_layer`."""
    x = jax.random.normal(jax.random.key(1), (tokens, config.hidden), jnp.bfloat16)
    return kernel_seconds(jax.jit(lambda x, params: ragged_dot_layer(config)(params, x)), x, params, inner=1, repeats=3)


def ragged_dot_layer(config: MoEConfig) -> Callable[[MoEParams, Array], Array]:
    """A bf16 layer as one writes it with ``jax.lax.ragged_dot``: sort by expert, two products, sort back."""

    def mlp(rows: Array, up: Array, down: Array, sizes: Array | None) -> Array:
        product = jnp.dot if sizes is None else lambda a, b: jax.lax.ragged_dot(a, b, sizes)
        gate, value = jnp.split(product(rows, up).astype(jnp.float32), 2, axis=-1)
        return product((jax.nn.silu(gate) * value).astype(rows.dtype), down)

    def layer(params: MoEParams, x: Array) -> Array:
        k, e = config.router.top_k, config.router.num_experts
        routing = route(params.router, x, config.router)
        order = jnp.argsort(routing.ids.reshape(-1), stable=True)
        rows = mlp(
            x[order // k],
            params.experts.gate_up.values.mT,
            params.experts.down.values.mT,
            jnp.bincount(routing.ids.reshape(-1), length=e).astype(jnp.int32),
        )
        back = jnp.zeros_like(rows).at[order].set(rows).reshape(*routing.ids.shape, -1).astype(jnp.float32)
        y = jnp.einsum("tkh,tk->th", back, routing.weights)
        if params.shared is not None and params.shared.experts is not None:
            shared = params.shared.experts
            y = y + mlp(x, shared.gate_up.values[0].T, shared.down.values[0].T, None).astype(jnp.float32)
        return y.astype(x.dtype)

    return layer


# (block_m, block_n, max_concurrent_steps, grid_block_n): the first for many rows per expert, the last for few.
_MOSAIC = ((128, 128, 4, 4), (64, 128, 6, 8), (64, 64, 6, 8))


def mosaic(rows: Array, weight: Array, sizes: Array) -> float:
    """Seconds of JAX's own Mosaic GPU grouped GEMM, the best of the configurations that suit the number of rows."""
    many = rows.shape[0] >= 128 * weight.shape[0]
    fitting = [c for c in (_MOSAIC[:2] if many else _MOSAIC[1:]) if weight.shape[1] % c[1] == 0]
    if not fitting:
        raise ValueError(f"no configuration for N = {weight.shape[1]}")
    return min(kernel_seconds(_mosaic(*c), rows, weight, sizes, repeats=3) for c in fitting)


@functools.cache
def _mosaic(block_m: int, block_n: int, steps: int, grid: int) -> Callable[..., Array]:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    config = dict(block_m=block_m, block_n=block_n, block_k=64, max_concurrent_steps=steps, grid_block_n=grid)
    return jax.jit(lambda x, w, s: ragged_dot_mgpu.ragged_dot(x, w, group_sizes=s, transpose_rhs=True, **config))


def mosaic_weight_gradient(dy: Array, rows: Array, sizes: Array) -> float:
    """Seconds of dL/dweight by JAX's own Mosaic GPU kernel, the better of two configurations."""
    fitting = [c for c in _MOSAIC[:2] if dy.shape[1] % c[0] == rows.shape[1] % c[1] == 0]
    if not fitting:
        raise ValueError(f"no configuration for N = {dy.shape[1]}, K = {rows.shape[1]}")
    return min(kernel_seconds(_mosaic_weight_gradient(*c), dy, rows, sizes, inner=1, repeats=3) for c in fitting)


@functools.cache
def _mosaic_weight_gradient(block_m: int, block_n: int, steps: int, grid: int) -> Callable[..., Array]:
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as mgpu

    config = dict(block_m=block_m, block_n=block_n, block_k=64, max_concurrent_steps=steps, grid_block_n=grid)
    return jax.jit(lambda dy, x, s: mgpu.transposed_ragged_dot(dy, x, group_sizes=s, **config))


def tokamax(rows: Array, weight: Array, sizes: Array) -> float:
    """Seconds of tokamax's ragged_dot as installed, without autotuning."""
    return kernel_seconds(_tokamax(), rows, weight, sizes, inner=2, repeats=3)


@functools.cache
def _tokamax() -> Callable[..., Array]:
    import tokamax

    return jax.jit(lambda x, w, s: tokamax.ragged_dot(x, w.mT, s, implementation="mosaic"))


class TorchDeepGEMM:
    """The torch package sgl-deep-gemm on the very same buffers, shared through DLPack."""

    def __init__(self) -> None:
        import deep_gemm
        import torch

        self.torch, self.deep_gemm = torch, deep_gemm

    def share(self, array: Array) -> Any:
        """A torch view of a JAX array; fp8 crosses as bytes."""
        if array.dtype == jnp.float8_e4m3fn:
            data = jax.block_until_ready(jax.jit(lambda a: jax.lax.bitcast_convert_type(a, jnp.uint8))(array))
            return self.torch.from_dlpack(data).view(self.torch.float8_e4m3fn)
        return self.torch.from_dlpack(jax.block_until_ready(array))

    def grouped(
        self,
        layout: str,
        a: Array,
        scales_a: Array | None,
        b: Array,
        scales_b: Array | None,
        group: Array,
        expected_m: int,
    ) -> tuple[Callable[[], None], Any]:
        """A call that runs the package's GEMM, and the tensor it writes. ``layout`` is contiguous or masked."""
        left, right, labels = self.share(a), self.share(b), self.share(group)
        out = self.torch.empty((*left.shape[:-1], right.shape[1]), dtype=self.torch.bfloat16, device="cuda")
        extra = (expected_m,) if layout == "masked" else ()
        if scales_a is None:
            run = getattr(self.deep_gemm, f"m_grouped_bf16_gemm_nt_{layout}")
            return (lambda: run(left, right, out, labels, *extra)), out
        scales = self.share(scales_a).transpose(-1, -2)[..., : left.shape[-2], :]
        fp8 = {"contiguous": "m_grouped_fp8_gemm_nt_contiguous", "masked": "fp8_m_grouped_gemm_nt_masked"}
        run = getattr(self.deep_gemm, fp8[layout])
        right_scales = self.share(scales_b)
        return (lambda: run((left, scales), (right, right_scales), out, labels, *extra)), out

    def seconds(self, call: Callable[[], None], inner: int = 16, repeats: int = 5) -> float:
        """Median device time of a call, from CUDA events around batches of ``inner`` calls."""
        call()
        times = []
        for _ in range(repeats):
            begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.torch.cuda.synchronize()
            begin.record()
            for _ in range(inner):
                call()
            end.record()
            self.torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3 / inner)
        return sorted(times)[repeats // 2]

    def bytes_of(self, out: Any) -> Any:
        """The written tensor as NumPy bytes."""
        self.torch.cuda.synchronize()
        return out.view(self.torch.int16).cpu().numpy()
