"""What each axis of a device mesh does to a layer."""

from __future__ import annotations

import dataclasses
import math

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxmoe.config import MoEConfig
from jaxmoe.errors import ShapeError

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Which mesh axes cut tokens, experts, and each expert's intermediate width; any sizes, any product of axes.

    The names that such layouts go by, with one mesh axis ``"d"`` or two of them:

    =================== ============== ======= ============
    attention × experts tokens         experts intermediate
    =================== ============== ======= ============
    TP × TP             P()                    "d"
    DP × TP             P("d")                 "d"
    TP × EP             P()            "d"
    DP × EP             P("d")         "d"
    DP × EP and TP      P("d")         "d"     "t"
    CP × EP             P(None, "d")   "d"
    CP × TP             P(None, "d")           "d"
    DP, experts copied  P("d")
    =================== ============== ======= ============

    CP is for x [B, S, H], whose axis S is cut by context segment.

    What happens follows from which sets an axis is in:

    * tokens and intermediate: tokens are gathered over it, and partial sums reduced and scattered;
    * intermediate only: partial sums are reduced over it;
    * experts, not tokens: each device takes its slice of the tokens, results are gathered;
    * experts: tokens travel to their experts' devices and back.

    Attributes:
      tokens: how the leading axes of x are cut, as x comes in and y goes out.
      experts: axes over which the E experts are spread, major first; a fused shared expert is on all of them.
      intermediate: axes over which each expert's I is cut, gate and up alike.
      shared: axes over which a shared expert kept apart is cut; none: every device has all of it.
    """

    tokens: PartitionSpec = dataclasses.field(default_factory=PartitionSpec)
    experts: Axes | str = ()
    intermediate: Axes | str = ()
    shared: Axes | str = ()

    def __post_init__(self) -> None:
        for name in ("experts", "intermediate", "shared"):
            axes = getattr(self, name)
            object.__setattr__(self, name, (axes,) if isinstance(axes, str) else tuple(axes))
        for name, axes in self.named_axes.items():
            twice = [a for a in axes if axes.count(a) > 1]
            if twice:
                raise ValueError(f"layout.{name} names mesh axis {twice[0]!r} twice; an axis can cut a thing once")
        both = [a for a in self.experts if a in self.intermediate]
        if both:
            raise ValueError(
                f"mesh axis {both[0]!r} is in layout.experts and in layout.intermediate; it can either spread experts "
                "or cut each of them"
            )

    @property
    def named_axes(self) -> dict[str, Axes]:
        """The axes of each attribute."""
        tokens = [a for part in self.tokens for a in (part if isinstance(part, tuple) else (part,)) if a is not None]
        return {
            "tokens": tuple(tokens),
            "experts": tuple(self.experts),
            "intermediate": tuple(self.intermediate),
            "shared": tuple(self.shared),
        }

    @property
    def sliced(self) -> Axes:
        """Axes that spread experts but not tokens: each device takes its slice of the tokens there."""
        return tuple(a for a in self.experts if a not in self.named_axes["tokens"])

    @property
    def home(self) -> Axes:
        """Axes over which tokens differ while they are routed."""
        return self.named_axes["tokens"] + self.sliced

    def check(self, mesh: Mesh | AbstractMesh, config: MoEConfig) -> None:
        """Refuses a layout that does not fit the mesh or the layer.

        Raises:
          ValueError: an axis is not in the mesh, or a fused shared expert is to be cut unlike the routed ones.
          ShapeError: E, I or the shared width does not divide.
        """
        for name, axes in self.named_axes.items():
            for axis in axes:
                if axis not in mesh.shape:
                    have = ", ".join(f"{a!r} ({n})" for a, n in mesh.shape.items())
                    raise ValueError(f"layout.{name} names axis {axis!r}; the mesh has {have}")
        sizes = [
            ("experts", "experts", config.router.num_experts),
            ("intermediate", "intermediate", config.intermediate),
        ]
        if config.shared is not None and not config.shared.fused:
            sizes.append(("shared", "shared intermediate", config.shared.intermediate))
        elif config.shared is not None and self.shared not in ((), self.intermediate):
            raise ValueError(
                f"layout.shared is {self.shared} but the shared experts are fused with the routed ones, which are cut "
                f"over {self.intermediate}; leave it out, or set fused=False"
            )
        for name, what, size in sizes:
            n = devices(mesh, self.named_axes[name])
            if size % n:
                raise ShapeError(
                    f"{what} {size} does not divide by the {n} devices of layout.{name} {self.named_axes[name]}; "
                    f"use a number of devices that divides {size}"
                )


def devices(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
    """How many devices differ along some axes."""
    return math.prod(mesh.shape[a] for a in axes)
