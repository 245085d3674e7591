"""Products of normalized rows, the part of tensor-parallel blocks between two all-reduces."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._backends import cuda_calls
from .._backends.target import Target
from .._core.array import QuantizedArray
from .._matmul import epilogue
from .._matmul.call import Call, Rows, Weights, run
from .._matmul.options import Options
from .._matmul.product import multiply
from .rms_norm import rms_norm


def normalized_matmuls(
    residual: Array,
    addend: Array,
    norm: Array,
    weights: Sequence[QuantizedArray],
    *,
    epsilon: float,
) -> tuple[Array, tuple[Array, ...]]:
    """`y = residual + addend`, rounded, and the products of `rms_norm(y) * norm` with each weight.

    **Arguments:**

    - `residual`: float32, bfloat16 or float16 (..., d).
    - `addend`: (..., d), of that dtype or float32; it is rounded before the addition.
    - `norm`: scales (d,), of that dtype or float32.
    - `weights`: (d, n_i) each.
    - `epsilon`: a constant added to the mean square.

    **Returns:** y, and (..., n_i) for each weight, in the dtype of `residual`.
    """
    fields = {"activation": None, "epsilon": float(epsilon)}
    y, *products = run(
        _Normalized, (residual, addend), tuple(weights), Options(), (norm,), **fields
    )
    return y, tuple(products)


def normalized_mlp(
    residual: Array,
    addend: Array,
    norm: Array,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    *,
    activation: str,
    epsilon: float,
    dtype: Any,
) -> tuple[Array, Array]:
    """`y = residual + addend`, rounded, and `quantized_mlp` of `rms_norm(y) * norm`.

    **Arguments:** as for `normalized_matmuls` and `quantized_mlp`; `dtype` is the product's dtype.

    **Returns:** y (..., d), and (..., n).
    """
    fields = {"activation": activation, "epsilon": float(epsilon)}
    y, out = run(
        _Normalized,
        (residual, addend),
        (gate_up, down),
        Options(jnp.dtype(dtype)),
        (norm,),
        **fields,
    )
    return y, out


@dataclasses.dataclass(frozen=True)
class _Normalized(Call):
    activation: str | None  # for an MLP; None: the weights multiply the same rows
    epsilon: float

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        (residual, addend), weights, (norm,) = self.named(operands)
        y = residual + addend.astype(residual.dtype)
        rows = rms_norm(y, norm, self.epsilon)
        if self.activation is None:
            return (y, *(multiply(rows, weight, self.options) for weight in weights))
        gate_up, down = weights
        inner = self.options.replace(preferred_element_type=None)
        hidden = epilogue.gated_product(rows, gate_up, None, self.activation, inner)
        return y, multiply(hidden, down, self.options)

    @property
    def custom_calls(self) -> Mapping[str, Callable[..., tuple[Array, ...]]]:
        return {"cuda": self._cuda}

    def unsupported(self, rows: Rows, weights: Weights, target: Target) -> str | None:
        reason = cuda_calls.unsupported_norm(rows[0].shape[-1])
        return reason or super().unsupported(rows, weights, target)

    def _cuda(self, *operands: Array) -> tuple[Array, ...]:
        (residual, addend), weights, (norm,) = self.named(operands)
        return cuda_calls.normalized(
            residual,
            addend,
            norm,
            weights,
            activation=self.activation,
            epsilon=self.epsilon,
            out_dtype=self.options.out_dtype(residual),
        )
