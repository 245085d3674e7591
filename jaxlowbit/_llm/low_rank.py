"""`LowRank`: a matrix plus the product of two small ones, as in a LoRA adapter.

Source: LoRA, arXiv:2106.09685. Names as in PEFT; matrices multiply from the right.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from .._core.array import QuantizedArray
from .sharding import MatrixVariable


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scaling"]
)
@dataclasses.dataclass(frozen=True)
class LowRank:
    """The weight `base + scaling * a @ b` (k, n), of a (k, rank) and b (rank, n)."""

    base: Any
    a: Array
    b: Array
    scaling: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def add(self, product: Array, x: Array, dtype: Any) -> Array:
        """`x @ self` in `dtype`, from `product`, which is `x @ base`."""
        inner = jnp.matmul(x, self.a.astype(x.dtype), preferred_element_type=jnp.float32)
        outer = jnp.matmul(
            inner.astype(x.dtype), self.b.astype(x.dtype), preferred_element_type=jnp.float32
        )
        return (product.astype(jnp.float32) + self.scaling * outer).astype(dtype)

    def dense(self) -> Array:
        """The whole weight, float32 (k, n)."""
        base = self.base.dequantize(jnp.float32) if quantized(self.base) else self.base
        added = jnp.matmul(self.a, self.b, preferred_element_type=jnp.float32, precision="highest")
        return base.astype(jnp.float32) + self.scaling * added


Weight = QuantizedArray | Array


class Adapted(nnx.Module):
    """The variables of a `LowRank`. The adapter's are `nnx.LoRAParam`s, for training."""

    def __init__(self, weight: LowRank):
        self.base = variable(weight.base)
        self.lora_a = nnx.LoRAParam(weight.a)
        self.lora_b = nnx.LoRAParam(weight.b)
        self.scaling = weight.scaling

    def get_value(self) -> LowRank:
        a, b = self.lora_a.get_value(), self.lora_b.get_value()
        return LowRank(self.base.get_value(), a, b, self.scaling)


def variable(weight: Weight | LowRank) -> Any:
    """A weight as a variable, or several."""
    if isinstance(weight, LowRank):
        return Adapted(weight)
    if isinstance(weight, QuantizedArray):
        return MatrixVariable(weight)
    return nnx.Param(jnp.asarray(weight))


def quantized(weight: Any) -> bool:
    """Whether a weight is quantized, whether or not it has an adapter."""
    return isinstance(base_of(weight), QuantizedArray)


def base_of(weight: Any) -> Any:
    """A weight without its adapter."""
    return weight.base if isinstance(weight, LowRank) else weight
