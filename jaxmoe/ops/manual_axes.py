"""Arrays inside shard_map, whose types say over which mesh axes they differ from device to device."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def vary_together[*Ts](*trees: *Ts) -> tuple[*Ts]:
    """The trees, every array of them typed as varying over the mesh axes over which any of them does.

    Loops need it of what they carry, and custom gradients of their arguments: what was the same on all devices and
    met arrays that are not has a gradient summed over devices. Outside of shard_map nothing changes.
    """
    leaves = jax.tree.leaves(trees)
    axes = frozenset().union(*(_axes(leaf) for leaf in leaves))

    def cast(leaf: Any) -> Any:
        missing = axes - _axes(leaf)
        return lax.pcast(leaf, tuple(missing), to="varying") if missing else leaf

    return jax.tree.map(cast, trees) if axes else trees


def _axes(leaf: Any) -> frozenset[Any]:
    return jax.typeof(leaf).manual_axis_type.varying
