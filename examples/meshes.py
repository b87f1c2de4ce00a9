"""``--mesh dp=2,ep=2``: devices of a command line, and what each axis does to the model.

dp and ep together cut the tokens, ep spreads the experts, tp cuts each expert's width. Where there is no GPU, the
devices are virtual ones of the CPU.
"""

from __future__ import annotations

import argparse
import math

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.parallel import ParallelLayout

AXES = ("dp", "ep", "tp")


def parse(text: str) -> dict[str, int]:
    """Sizes by axis; for ``argparse``."""
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of axes among {', '.join(AXES)}, as in dp=2,ep=2")
        sizes[axis] = int(size)
    return sizes


def make(sizes: dict[str, int] | None) -> Mesh | None:
    """The first devices as a mesh of all three axes; None without sizes.

    Raises:
      ValueError: there are too few GPUs, or JAX has started with fewer CPU devices.
    """
    if sizes is None:
        return None
    wanted = math.prod(sizes.values())
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
        pass  # JAX has started: what it has must do
    devices = jax.devices()
    if len(devices) < wanted:
        raise ValueError(f"--mesh needs {wanted} devices; there are {len(devices)} of platform {devices[0].platform}")
    return Mesh(np.array(devices[:wanted]).reshape([sizes.get(axis, 1) for axis in AXES]), AXES)


def layout(cut: int) -> ParallelLayout:
    """The MoE layers' layout for x whose axis ``cut`` holds the tokens to be shared out."""
    return ParallelLayout(
        tokens=PartitionSpec(*[None] * cut, ("dp", "ep")), experts="ep", intermediate="tp", shared="tp"
    )


def replicate(model: nnx.Module, mesh: Mesh) -> None:
    """Puts everything on all devices of the mesh, except what is there already: the cut MoE layers."""

    def put(value: jax.Array) -> jax.Array:
        there = isinstance(value.sharding, NamedSharding) and value.sharding.mesh == mesh
        return value if there else jax.device_put(value, NamedSharding(mesh, PartitionSpec()))

    nnx.update(model, jax.tree.map(put, nnx.state(model)))
