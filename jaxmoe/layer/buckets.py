"""The serving entry: any number of tokens, a few compiled sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import Execution, MoEConfig
from jaxmoe.errors import ShapeError
from jaxmoe.layer.checks import check_inputs
from jaxmoe.layer.params import MoEParams
from jaxmoe.layer.pipeline import moe
from jaxmoe.router import Routing

Array = jax.Array


def bucket_sizes(max_tokens: int, smallest: int = 8) -> tuple[int, ...]:
    """The padded sizes: powers of two from ``smallest`` up, below ``max_tokens``, and ``max_tokens`` itself."""
    sizes = []
    while smallest < max_tokens:
        sizes.append(smallest)
        smallest *= 2
    return (*sizes, max_tokens)


class Bucketed:
    """One MoE layer for requests of all lengths.

    T tokens are padded to the smallest of :attr:`sizes` that holds them, so at most ``len(sizes)`` programs of the
    layer are ever compiled. Padding rows take no expert and change no bit of the others.

    Example::

      >>> serve = Bucketed(config, max_tokens=301)
      >>> serve.sizes
      (8, 16, 32, 64, 128, 256, 301)
      >>> y = serve(params, x)

    Attributes:
      config, execution: of the layer.
      sizes: the padded token counts, rising.
    """

    def __init__(self, config: MoEConfig, execution: Execution | None = None, *, max_tokens: int):
        """Sets the sizes up; compiles nothing yet.

        Args:
          config, execution: of the layer.
          max_tokens: the most tokens of one call.
        """
        if max_tokens < 1:
            raise ShapeError(f"max_tokens is {max_tokens}; it must be at least 1")
        self.config = config
        self.execution = Execution() if execution is None else execution
        self.sizes = bucket_sizes(max_tokens)
        self._moe = jax.jit(moe, static_argnames=("config", "execution"))

    def __call__(
        self,
        params: MoEParams,
        x: Array | np.ndarray,
        *,
        token_ids: Array | np.ndarray | None = None,
        valid: Array | np.ndarray | None = None,
        routing: Routing | None = None,
    ) -> Array:
        """Runs the layer on x [T, H]; the arguments are those of :func:`jaxmoe.moe`.

        NumPy arrays are padded on the host; padding and cutting JAX arrays costs two tiny programs per T.

        Returns:
          [T, H].

        Raises:
          ShapeError: T is above ``max_tokens``, or the inputs do not fit.
        """
        check_inputs(x, self.config, token_ids=token_ids, valid=valid, routing=routing)
        if x.ndim != 2:
            raise ShapeError(f"x is {list(x.shape)}; the serving entry takes [T, H]")
        t = x.shape[0]
        if t > self.sizes[-1]:
            raise ShapeError(f"{t} tokens are above max_tokens {self.sizes[-1]}; raise it or split the request")
        if not t:
            return jnp.zeros_like(x)
        size = next(s for s in self.sizes if s >= t)
        valid = np.ones(t, bool) if valid is None else valid
        if routing is not None:
            routing = Routing(_pad(routing.ids, size, -1), _pad(routing.weights, size, 0))
        y = self._moe(
            params,
            _pad(x, size, 0),
            config=self.config,
            execution=self.execution,
            token_ids=None if token_ids is None else _pad(token_ids, size, 0),
            valid=_pad(valid, size, False),
            routing=routing,
        )
        return y if t == size else y[:t]


def _pad(a: Array | np.ndarray, size: int, fill: int | bool) -> Array:
    if a.shape[0] == size:
        return jnp.asarray(a)
    pad = np.pad if isinstance(a, np.ndarray) else jnp.pad
    widths = [(0, size - a.shape[0])] + [(0, 0)] * (a.ndim - 1)
    return jnp.asarray(pad(a, widths, constant_values=np.asarray(fill, a.dtype)))
