"""Our MoE in place of a Flax model's feed-forward block, for NNX and for Linen.

  python examples/integrate.py

``Nnx`` and ``Linen`` are blocks as many models have them. What changes is one line of each; the rest trains and runs
them, to show that parameters, gradients and jit are what they were. The experts compute in bf16, which GPU kernels
take, from weights that are kept in f32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

import jaxmoe.nn.linen

H, I, E, K = 64, 128, 4, 2  # noqa: E741
Array = jax.Array


class Nnx(nnx.Module):
    def __init__(self, ffn: nnx.Module, rngs: nnx.Rngs):
        self.norm, self.ffn = nnx.RMSNorm(H, rngs=rngs), ffn

    def __call__(self, x: Array) -> Array:
        return x + self.ffn(self.norm(x))


def nnx_blocks(rngs: nnx.Rngs) -> tuple[Nnx, Nnx]:
    before = nnx.Sequential(nnx.Linear(H, I, rngs=rngs), nnx.silu, nnx.Linear(I, H, rngs=rngs))
    after = jaxmoe.nn.MoE(H, I, E, top_k=K, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=rngs)
    return Nnx(before, rngs), Nnx(after, rngs)


class Linen(linen.Module):
    experts: bool

    @linen.compact
    def __call__(self, x: Array) -> Array:
        y = linen.RMSNorm()(x)
        if self.experts:
            moe = jaxmoe.nn.linen.MoE(H, I, E, top_k=K, dtype=jnp.bfloat16, param_dtype=jnp.float32, name="ffn")
            return x + moe(y)
        return x + linen.Dense(H)(linen.silu(linen.Dense(I)(y)))


def train_nnx(block: Nnx, x: Array, target: Array, steps: int) -> list[float]:
    """Losses. Selection bias and hash table are no ``nnx.Param``, so that the optimiser leaves them alone."""
    optimizer = nnx.Optimizer(block, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(block: Nnx, optimizer: Any) -> Array:
        loss, gradients = nnx.value_and_grad(lambda block: jnp.mean((block(x) - target) ** 2))(block)
        optimizer.update(block, gradients)
        return loss

    return [float(step(block, optimizer)) for _ in range(steps)]


def train_linen(block: Linen, x: Array, target: Array, steps: int) -> list[float]:
    """Losses. What is trained is the collection ``params``; others, such as ``buffers``, stay as they are."""
    variables = linen.unbox(jax.jit(block.init)(jax.random.key(0), x))
    params, others = variables.pop("params"), variables
    adam = optax.adam(3e-3)

    @jax.jit
    def step(params: Any, state: Any) -> tuple[Any, Any, Array]:
        def loss(params: Any) -> Array:
            y: Any = block.apply({"params": params, **others}, x)
            return jnp.mean((y - target) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = adam.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    state, losses = adam.init(params), []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses


def main() -> dict[str, list[float]]:
    x = jax.random.normal(jax.random.key(1), (4, 32, H))
    target = jnp.sin(3 * jnp.roll(x, 1, axis=-1))
    dense, experts = nnx_blocks(nnx.Rngs(0))
    losses = {
        "NNX, dense": train_nnx(dense, x, target, 60),
        "NNX, MoE": train_nnx(experts, x, target, 60),
        "Linen, dense": train_linen(Linen(experts=False), x, target, 60),
        "Linen, MoE": train_linen(Linen(experts=True), x, target, 60),
    }
    for name, run in losses.items():
        print(f"{name:13} loss {run[0]:.3f} -> {run[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
