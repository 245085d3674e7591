"""A product with its epilogue: one kernel computes both on a CUDA device."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._backends import cuda_calls
from .._backends.target import Target
from .._core.array import QuantizedArray
from . import epilogue
from .call import Product, Rows, Weights


def checked(
    lhs: Array | jax.ShapeDtypeStruct,
    rhs: QuantizedArray,
    bias: Any,
    activation: Any,
    residual: Any,
) -> tuple[Array | None, Array | None]:
    """The bias and the residual of `quantized_matmul` as arrays.

    **Raises:** `ValueError` for other shapes and dtypes, and for an unknown activation.
    """
    epilogue.check_activation("quantized_matmul", activation, optional=True)
    stack, n = rhs.shape[:-2], rhs.n
    batch = jnp.broadcast_shapes(lhs.shape[:-2], stack)
    result: Any = (*batch, *lhs.shape[-2:-1], n)
    return (
        epilogue.checked_addend("quantized_matmul", "bias", bias, (*stack, n), "(*stack, n)"),
        epilogue.checked_addend("quantized_matmul", "residual", residual, result, "the result"),
    )


@dataclasses.dataclass(frozen=True)
class Fused(Product):
    """`activation(lhs @ rhs + bias) + residual`."""

    activation: str | None

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        (lhs, residual), (rhs,), (bias,) = self.named(operands)
        return (epilogue.product(lhs, rhs, bias, self.activation, residual, self.options),)

    @property
    def custom_calls(self) -> Mapping[str, Callable[..., tuple[Array, ...]]]:
        return {"cuda": self._cuda}

    def unsupported(self, rows: Rows, weights: Weights, target: Target) -> str | None:
        (lhs, _), (rhs,) = rows, weights
        stack = rhs.shape[:-2]
        if stack and jnp.broadcast_shapes(lhs.shape[:-2], stack) != stack:
            return "the stack of weights is broadcast"
        return super().unsupported(rows, weights, target)

    def _cuda(self, *operands: Array) -> tuple[Array, ...]:
        (lhs, residual), (rhs,), (bias,) = self.named(operands)
        stack, n = rhs.shape[:-2], rhs.n
        shape = lhs.shape[-2:-1] if stack else lhs.shape[:-1]
        out = cuda_calls.fused(
            jnp.broadcast_to(lhs, (*stack, *shape, rhs.k)),
            rhs,
            bias,
            residual,
            rows=shape,
            activation=self.activation,
            out_dtype=self.options.out_dtype(lhs),
            accumulate_float16=self.options.accumulate_float16,
        )
        return (out.reshape(*stack, *shape, n),)
