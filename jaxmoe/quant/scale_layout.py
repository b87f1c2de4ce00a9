"""Scale layouts the GEMM kernels read, and the way back.

Both are "MN-major": a row of the result belongs to one scale group, and consecutive words to consecutive rows. With M
rows, Ma = M rounded up to 4 (16-byte steps), S groups along K and P = ⌈S/4⌉ words:

* float32 (Hopper): the scale of row m, group s of matrix g is float ``(g·S + s)·Ma + m``.
* packed e8m0 (Blackwell): byte ``s % 4`` (the lowest is byte 0) of word ``(g·P + s // 4)·Ma + m``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.errors import ShapeError
from jaxmoe.sizes import round_up

Array = jax.Array

NEUTRAL_BYTE = 127
"""The e8m0 byte of 1.0."""

NEUTRAL_WORD = NEUTRAL_BYTE * 0x01010101
"""Four of them, as scales are packed."""


def _pad(x: Array, rows: int, groups: int, fill: int | float) -> Array:
    spare = [(0, 0)] * (x.ndim - 2) + [(0, rows - x.shape[-2]), (0, groups - x.shape[-1])]
    return jnp.pad(x, spare, constant_values=jnp.asarray(fill, dtype=x.dtype))


@jax.jit
def mn_major_f32(scales: Array) -> Array:
    """Lays float scales out for the kernels.

    Args:
      scales: float32 [..., M, S].

    Returns:
      float32 [..., S, Ma]; rows past M are 1.
    """
    scales = jnp.asarray(scales, dtype=jnp.float32)
    m, s = scales.shape[-2:]
    return jnp.swapaxes(_pad(scales, round_up(m, 4), s, 1.0), -1, -2)


@functools.partial(jax.jit, static_argnums=1)
def row_major_f32(scales: Array, m: int) -> Array:
    """Inverse of :func:`mn_major_f32`.

    Args:
      scales: float32 [..., S, Ma]. m: M.

    Returns:
      float32 [..., M, S].

    Raises:
      ShapeError: Ma is not m rounded up to 4.
    """
    _check_rows(scales.shape[-1], m)
    return jnp.swapaxes(scales, -1, -2)[..., :m, :]


@functools.partial(jax.jit, static_argnames="fill")
def pack_ue8m0(scales: Array, *, fill: int = NEUTRAL_BYTE) -> Array:
    """Packs exponent bytes four to a word and lays the words out for the kernels.

    Args:
      scales: uint8 [..., M, S].
      fill: byte at places that no scale belongs to: groups past S in the last word, rows past M. A kernel meets no K
        there and never combines such rows with real ones, so any byte but 255 gives the same result. 127 (scale 1) is
        what we store; it keeps every byte of the array in 1..254. DeepGEMM's own packing leaves 0: pass that to
        compare bits with it.

    Returns:
      int32 [..., P, Ma].
    """
    scales = jnp.asarray(scales, dtype=jnp.uint8)
    m, s = scales.shape[-2:]
    ma, p = round_up(m, 4), -(-s // 4)
    e = _pad(scales, ma, 4 * p, fill).reshape(*scales.shape[:-2], ma, p, 4).astype(jnp.uint32)
    words = e[..., 0] | (e[..., 1] << 8) | (e[..., 2] << 16) | (e[..., 3] << 24)
    return jnp.swapaxes(lax.bitcast_convert_type(words, jnp.int32), -1, -2)


@functools.partial(jax.jit, static_argnums=(1, 2))
def unpack_ue8m0(words: Array, m: int, s: int) -> Array:
    """Inverse of :func:`pack_ue8m0`.

    Args:
      words: int32 [..., P, Ma]. m: M. s: S.

    Returns:
      uint8 [..., M, S].

    Raises:
      ShapeError: P or Ma does not fit S or M.
    """
    _check_rows(words.shape[-1], m)
    if words.shape[-2] != -(-s // 4):
        raise ShapeError(f"{words.shape[-2]} words a row do not hold {s} scale groups; expected {-(-s // 4)}")
    words = lax.bitcast_convert_type(jnp.swapaxes(words, -1, -2)[..., :m, :], jnp.uint32)
    e = jnp.stack([(words >> (8 * j)).astype(jnp.uint8) for j in range(4)], axis=-1)
    return e.reshape(*words.shape[:-1], 4 * words.shape[-1])[..., :s]


def _check_rows(ma: int, m: int) -> None:
    if ma != round_up(m, 4):
        raise ShapeError(f"a scale array for {m} rows has row stride {round_up(m, 4)}, got {ma}")
