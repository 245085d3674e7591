"""Equinox: replaces each `eqx.nn.Linear` by a layer with a `QuantizedArray`.

`quantize_model` is for Flax; for Equinox, a custom layer takes a dozen lines.
"""

from typing import Any

import common
import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlowbit import INT8, Format, QuantizedArray, quantize


class QuantizedLinear(eqx.Module):
    """`eqx.nn.Linear` with its weight (out, in) packed as the transpose (in, out)."""

    weight: QuantizedArray
    bias: jax.Array | None

    def __init__(self, linear: eqx.nn.Linear, format: Format) -> None:
        self.weight = quantize(linear.weight.T, format)
        self.bias = linear.bias

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


def is_linear(node: Any) -> bool:
    return isinstance(node, eqx.nn.Linear)


def quantized(model: Any, format: Format) -> Any:
    """The model with all linear layers quantized."""
    return jax.tree.map(
        lambda node: QuantizedLinear(node, format) if is_linear(node) else node,
        model,
        is_leaf=is_linear,
    )


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, 256, key=keys[0])
        self.mlp = eqx.nn.MLP(256, 256, 512, depth=1, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.vmap(self.mlp)(self.attention(x, x, x))


def nbytes(model: Any) -> int:
    """Bytes of float matrices."""
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    return sum(array.nbytes for array in arrays if array.ndim == 2)


model = Block(jax.random.key(0))
x = jax.random.normal(jax.random.key(1), (common.LENGTH, 256))
small = quantized(model, INT8)
coverage = 1 - nbytes(small) / nbytes(model)
common.check("equinox", "attention and MLP", eqx.filter_jit(small)(x), model(x), coverage)
assert jnp.isfinite(jax.grad(lambda x: small(x).sum())(x)).all()
