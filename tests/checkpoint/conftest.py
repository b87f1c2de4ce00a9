"""Tensors of generated layers, by name and by what they mean."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

BF16, E4M3, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Layer:
    """Tensors by name, and what they mean in float64."""

    def __init__(self, rng, prefix):
        self.rng, self.prefix, self.tensors = rng, prefix, {}

    def bf16(self, name, *shape, scale=0.5):
        a = (self.rng.normal(size=shape) * scale).astype(BF16)
        self.tensors[self.prefix + name] = a
        return a.astype(np.float64)

    def fp8(self, name, n, k, suffix="weight_scale_inv", scale_dtype=np.float32):
        codes = self.rng.normal(size=(n, k)).astype(E4M3)
        shape = -(-n // 128), -(-k // 128)
        scale = (2.0 ** self.rng.integers(-3, 2, shape)).astype(scale_dtype)
        if scale_dtype == np.float32:
            scale *= 1.3
        self.tensors[f"{self.prefix}{name}.weight"] = codes
        self.tensors[f"{self.prefix}{name}.{suffix}"] = scale
        return codes.astype(np.float64) * np.repeat(np.repeat(scale.astype(np.float64), 128, 0), 128, 1)[:n, :k]

    def fp4(self, name, n, k):
        codes = self.rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
        scale = (2.0 ** self.rng.integers(-4, 1, (n, k // 32))).astype(E8M0)
        self.tensors[f"{self.prefix}{name}.weight"] = codes.view(np.int8)
        self.tensors[f"{self.prefix}{name}.scale"] = scale
        values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(n, k)
        return values * np.repeat(scale.astype(np.float64), 32, 1)

    def mlp(self, name, width, hidden=64, names=("gate_proj", "up_proj", "down_proj"), make=None, **options):
        make = make or (lambda part, *shape: self.bf16(f"{part}.weight", *shape, scale=shape[1] ** -0.5))
        shapes = (width, hidden), (width, hidden), (hidden, width)
        return [make(f"{name}.{part}", *shape, **options) for part, shape in zip(names, shapes, strict=True)]


@pytest.fixture
def new_layer(rng: np.random.Generator) -> Callable[[str], Layer]:
    """``new_layer(prefix)``: a layer without tensors, whose names will start with the prefix."""
    return lambda prefix: Layer(rng, prefix)
