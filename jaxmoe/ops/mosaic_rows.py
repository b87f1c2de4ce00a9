"""Row kernels in Pallas Mosaic GPU: columns in, a function of them in f32, values with or without scales out.

A warpgroup owns ``rows`` rows of a few *units* of 64 columns. Eight neighbouring lanes hold a unit's row, 16 bytes of
bf16 each, so that every load of a warp is four whole 128-byte lines and a block's largest magnitude is three shuffles
away. All loads of a tile are issued before anything is computed; several tiles live on an SM, and no shared memory is
needed. Row numbers are index-typed, so offsets have 64 bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmoe.ops.manual_axes import vary_together
from jaxmoe.ops.mosaic import UNIT, Tile
from jaxmoe.quant.codecs import E4M3_MAX, FLOOR, ue8m0_exponent
from jaxmoe.quant.formats import ActivationQuant
from jaxmoe.quant.scale_layout import NEUTRAL_WORD
from jaxmoe.quant.tensors import QuantizedRows

Array = jax.Array
Ref = Any

_FLOOR_BITS = int(np.float32(FLOOR).view(np.int32))
_F32_MAX_BITS = 0x7F7FFFFF
_SHIFT = 0x00FFFFFF

_EVERYWHERE = plgpu.Layout.TILED(
    plgpu.Tiling(((1,),)), warp_dims=(plgpu.Replicated(4),), lane_dims=(plgpu.Replicated(32),), vector_dim=-1
)
"""Every thread holds everything, so that a reduction is no exchange."""


@dataclasses.dataclass(frozen=True)
class RowOp:
    """What a row kernel computes, one output unit from one unit of each stripe.

    Attributes:
      stripes: first columns of the stripes that are read, multiples of 64.
      width: columns of a stripe, and logical columns of the result, a multiple of 64.
      compute: f32 units, one per stripe, to the f32 unit that is stored or quantised.
      out_dtype: of plain results; None with ``quant``.
      quant: how to quantise; the result is then padded to a multiple of 128 columns.
      approximate: exponentials and reciprocal roots may be the hardware's.
    """

    stripes: tuple[int, ...]
    width: int
    compute: Callable[..., Array]
    out_dtype: Any
    quant: ActivationQuant | None
    approximate: bool = False

    @property
    def units(self) -> int:
        """Output units, padding included."""
        return -(-self.width // 128) * 2 if self.quant else self.width // UNIT

    @property
    def block(self) -> int:
        """Columns of the innermost dimension of the kernel's view, 0: all columns in one dimension."""
        return 32 if self.quant and self.quant.block == 32 else 0


def run(op: RowOp, x: Array, valid: Array | None, tile: Tile) -> Array | QuantizedRows:
    """Runs a row kernel.

    Args:
      op: what to compute.
      x: [..., M, W].
      valid: bool [..., M]; other rows become 0 with scales 1 and are read only if their tile has a valid one.
      tile: see :class:`Tile`.

    Returns:
      [..., M, width] in ``out_dtype``, or quantised rows.
    """
    *lead, m, w = x.shape
    e = math.prod(lead)
    block, quant = op.block, op.quant
    split = (lambda n: (n // block, block)) if block else (lambda n: (n,))
    operands = [x.reshape(e, m, *split(w))]
    if valid is not None:
        operands.append(valid.reshape(e, m).astype(jnp.int32))
    columns = op.units * UNIT
    out = [jax.ShapeDtypeStruct((e, m, *split(columns)), jnp.float8_e4m3fn if quant else op.out_dtype)]
    ma = -(-m // 4) * 4
    if quant:
        s = columns // quant.block
        shape = (e, s, ma) if quant.scale == "float32" else (e, -(-s // 4), ma)
        out.append(jax.ShapeDtypeStruct(shape, jnp.float32 if quant.scale == "float32" else jnp.int32))
    # A tile writes whole words of scales, or at least whole blocks.
    step = (8 if quant.scale == "ue8m0" and quant.block == 128 else 2) if quant else 1
    width = -(-tile.units // step) * step
    scratch = []
    if tile.staged:
        chunk = math.gcd(width, 4)
        one = plgpu.SMEM((width // chunk, tile.rows, *split(chunk * UNIT)), x.dtype)
        scratch = [*[one] * len(op.stripes), plgpu.Barrier(num_arrivals=len(op.stripes) * (width // chunk))]
    grid = e * -(-m // tile.rows) * -(-op.units // width)
    results = plgpu.kernel(
        functools.partial(_body, op=op, tile=dataclasses.replace(tile, units=width), masked=valid is not None),
        out_type=out,
        grid=(grid,),
        grid_names=("tile",),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=op.approximate,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
        ),
    )(*operands)
    results, _ = vary_together(results, operands)  # Pallas loses what their types say of mesh axes
    values = results[0].reshape(*lead, m, columns)
    if quant is None:
        return values
    scales = results[1].reshape(*lead, *results[1].shape[1:])
    if ma != m:
        one = jnp.asarray(1 if quant.scale == "float32" else NEUTRAL_WORD, dtype=scales.dtype)
        scales = scales.at[..., m:].set(one)
    return QuantizedRows(values, scales, quant)


def _body(x: Ref, *refs: Ref, op: RowOp, tile: Tile, masked: bool) -> None:
    mask, refs = (refs[0], refs[1:]) if masked else (None, refs)
    outputs, scratch = (refs[:2], refs[2:]) if op.quant else (refs[:1], refs[1:])
    m, rows = x.shape[1], tile.rows
    across, down = -(-op.units // tile.units), -(-m // rows)
    t = lax.axis_index("tile")
    column, t = lax.rem(t, across), lax.div(t, across)
    row, e = lax.rem(t, down), lax.div(t, down)
    window = pl.ds(jnp.minimum(row * rows, m - rows), rows)
    work = _Work(op, tile, x, outputs, scratch, e, window, column * tile.units)

    def emit(units: int, real: int) -> None:
        if mask is None:
            work.compute(units, real, None)
        else:
            here = mask.at[e, window]
            some = jnp.max(plgpu.load(here, layout=_EVERYWHERE, optimized=False)) > 0
            lax.cond(some, lambda: work.compute(units, real, here), lambda: work.fill(units))

    before = (across - 1) * tile.units
    last = (op.units - before, op.width // UNIT - before)
    if last == (tile.units, tile.units):
        emit(*last)
    elif across == 1:
        emit(*last)
    else:
        lax.cond(column < across - 1, lambda: emit(tile.units, tile.units), lambda: emit(*last))


@dataclasses.dataclass(frozen=True)
class _Work:
    """One tile: rows ``window`` of matrix ``e``, units from ``first``."""

    op: RowOp
    tile: Tile
    x: Ref
    outputs: tuple[Ref, ...]
    scratch: tuple[Ref, ...]
    e: Array
    window: Any
    first: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.tile.rows, UNIT // self.op.block, self.op.block) if self.op.block else (self.tile.rows, UNIT)

    @property
    def layout(self) -> Any:
        """A warp holds 4 rows, 8 lanes a row, 8 columns a lane and register."""
        inner = self.shape[1:]
        tiling = plgpu.Tiling(((16, *inner), (4, *inner), (8,)))
        if self.op.block:
            return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-4, -3, -2), vector_dim=-1)
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)

    def _rows(self, x: Array, axes: tuple[int, ...] = (0,)) -> Array:
        """Broadcasts what is known per row (and block) to a unit."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, axes), self.layout)

    def _full(self, value: float) -> Array:
        return plgpu.layout_cast(jnp.full(self.shape, value, jnp.float32), self.layout)

    def _at(self, ref: Ref, unit: Any, units: int = 1) -> Ref:
        step = UNIT // (self.op.block or 1)
        return ref.at[self.e, self.window, pl.ds(unit * step, units * step)]

    def _loader(self, units: int) -> Callable[[int, int], Array]:
        def load(stripe: int, unit: int) -> Array:
            start = self.op.stripes[stripe] // UNIT + self.first + unit
            return plgpu.load(self._at(self.x, start), layout=self.layout, optimized=False)

        if not self.tile.staged:
            return load
        *stages, barrier = self.scratch
        chunk = stages[0].shape[2] * (self.op.block or 1) // UNIT
        for stripe, stage in zip(self.op.stripes, stages, strict=True):
            for i in range(stage.shape[0]):
                start = stripe // UNIT + self.first + i * chunk
                plgpu.copy_gmem_to_smem(self._at(self.x, start, chunk), stage.at[i], barrier)
        plgpu.barrier_wait(barrier)
        step = UNIT // (self.op.block or 1)

        def staged(stripe: int, unit: int) -> Array:
            part = stages[stripe].at[unit // chunk, :, pl.ds(unit % chunk * step, step)]
            return plgpu.load(part, layout=self.layout, optimized=False)

        return staged

    def compute(self, units: int, real: int, mask: Ref | None) -> None:
        """Computes and stores ``units`` units, of which ``real`` have columns to read."""
        load = self._loader(real)
        raw = [[load(s, u) for s in range(len(self.op.stripes))] for u in range(real)]
        keep = keep_unit = None
        if mask is not None:
            rows = self.layout.reduce(tuple(range(1, len(self.shape))))
            keep = plgpu.load(mask, layout=rows, optimized=False)
            keep_unit = self._rows(keep) > 0

        def value(u: int) -> Array:
            if u >= real:
                return self._full(0.0)
            y = self.op.compute(*[x.astype(jnp.float32) for x in raw[u]])
            return y if keep_unit is None else jnp.where(keep_unit, y, self._full(0.0))

        if self.op.quant is None:
            for u in range(units):
                self._at(self.outputs[0], self.first + u)[...] = value(u).astype(self.op.out_dtype)
        elif self.op.block:
            self._quantize_32(units, value, keep)
        else:
            self._quantize_128(units, value, keep)

    def _store(self, unit: int, x: Array, inverse: Array, axes: tuple[int, ...] = (0,)) -> None:
        # The hardware's conversion saturates.
        codes = (x * self._rows(inverse, axes)).astype(jnp.float8_e4m3fn)
        self._at(self.outputs[0], self.first + unit)[...] = codes

    def _store_scale(self, index: Any, scale: Array, keep: Array | None) -> None:
        if keep is not None:
            neutral = 1.0 if scale.dtype == jnp.float32 else NEUTRAL_WORD
            scale = jnp.where(keep > 0, scale, jnp.asarray(neutral, dtype=scale.dtype))
        self.outputs[1][self.e, index, self.window] = scale

    def _quantize_128(self, units: int, value: Callable[[int], Array], keep: Array | None) -> None:
        quant = self.op.quant
        assert quant is not None
        word = None
        for group in range(units // 2):
            pair = [value(2 * group), value(2 * group + 1)]
            order = functools.reduce(jnp.maximum, [jnp.max(_order(x), axis=1) for x in pair])
            scale, inverse = _scale(order, quant.scale)
            for i, x in enumerate(pair):
                self._store(2 * group + i, x, inverse)
            if quant.scale == "float32":
                self._store_scale(lax.div(self.first, 2) + group, scale, keep)
                continue
            byte = group % 4
            word = scale if word is None else word | (scale << (8 * byte))
            if byte == 3 or group == units // 2 - 1:
                word = word | jnp.int32(NEUTRAL_WORD & ~((1 << 8 * (byte + 1)) - 1))
                self._store_scale(lax.div(self.first, 8) + group // 4, word, keep)
                word = None

    def _quantize_32(self, units: int, value: Callable[[int], Array], keep: Array | None) -> None:
        quant = self.op.quant
        assert quant is not None
        blocks = self.layout.reduce((2,))
        which = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, self.shape[:2], 1), blocks)
        for word in range(units // 2):
            total = None
            for half in range(2):
                unit = 2 * word + half
                x = value(unit)
                scale, inverse = _scale(jnp.max(_order(x), axis=2), quant.scale)
                self._store(unit, x, inverse, (0, 1))
                if quant.scale == "float32":
                    for b in range(2):
                        one = jnp.sum(jnp.where(which == b, scale, jnp.zeros_like(scale)), axis=1)
                        self._store_scale(2 * (self.first + unit) + b, one, keep)
                else:
                    part = jnp.sum(scale << (8 * which + 16 * half), axis=1)
                    total = part if total is None else total | part
            if total is not None:
                self._store_scale(lax.div(self.first, 2) + word, total, keep)

    def fill(self, units: int) -> None:
        """Writes a tile without a valid row."""
        quant, zero = self.op.quant, self._full(0.0)
        for u in range(units):
            self._at(self.outputs[0], self.first + u)[...] = zero.astype(self.outputs[0].dtype)
        if quant is None:
            return
        rows = self.layout.reduce(tuple(range(1, len(self.shape))))
        columns = quant.block * (1 if quant.scale == "float32" else 4)
        dtype, value = (jnp.float32, 1.0) if quant.scale == "float32" else (jnp.int32, NEUTRAL_WORD)
        neutral = plgpu.layout_cast(jnp.full(self.tile.rows, value, dtype), rows)
        for i in range(-(-units * UNIT // columns)):
            self.outputs[1][self.e, lax.div(self.first * UNIT, columns) + i, self.window] = neutral


def _order(x: Array) -> Array:
    """uint32 in the order of magnitudes, NaN below everything: twice the bits, so without the sign, shifted to wrap."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return bits + bits + jnp.uint32(_SHIFT)


def _scale(order: Array, kind: str) -> tuple[Array, Array]:
    """Scale (f32, or int32 exponent byte) and factor from a block's largest :func:`_order`, as in the codecs."""
    floor, top = (jnp.uint32(2 * b + _SHIFT) for b in (_FLOOR_BITS, _F32_MAX_BITS))
    order = jnp.minimum(jnp.maximum(order, floor), top)
    amax = lax.bitcast_convert_type((order - jnp.uint32(_SHIFT)) >> jnp.uint32(1), jnp.float32)
    if kind == "float32":
        scale = amax * jnp.float32(1 / E4M3_MAX)
        return scale, _reciprocal(scale)
    byte = jnp.minimum(jnp.maximum(ue8m0_exponent(amax, E4M3_MAX), 1), 254)
    return byte, lax.bitcast_convert_type((254 - byte) << 23, jnp.float32)


def _reciprocal(x: Array) -> Array:
    """1/x rounded to nearest for normal x > 0, from a quotient that may be off by one unit in the last place.

    With x = m·2^a and the quotient q·2^b (m and q of 24 bits), m·q is 2^46 or 2^47 up to an error e that decides the
    last bit; it is small, so that the product's low 32 bits are -e. No quotient lies midway between two floats.
    """
    quotient = lax.bitcast_convert_type(1.0 / x, jnp.int32)
    m, q = ((bits & 0x7FFFFF) | 0x800000 for bits in (lax.bitcast_convert_type(x, jnp.int32), quotient))
    e = -(m * q)
    step = jnp.where(2 * e > m, 1, jnp.where(2 * e < -m, -1, jnp.zeros_like(e)))
    return lax.bitcast_convert_type(quotient + step, jnp.float32)
