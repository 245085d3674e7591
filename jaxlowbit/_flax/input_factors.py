"""Products and lookups of weights with factors that divide their inputs.

AWQ and SmoothQuant multiply the rows of a weight by factors (..., k), and its inputs are divided by
them: an elementwise operation, which XLA fuses with the operation that computes the inputs.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from .._composite.ragged_dot import groups_of_rows, quantized_ragged_dot
from .._core.array import QuantizedArray
from .._core.columns import take_columns
from .._core.smoothing import divided
from .._matmul.api import quantized_matmul

FACTOR = "lhs_factor"
"""The name of the variable with the factors of a weight."""


def multiply(
    lhs: Array, kernel: QuantizedArray, factor: Array | None, *, lhs_qtype: Any, **options: Any
) -> Array:
    """`quantized_matmul` of inputs divided by `factor`, (k,) or (*lead, k), unless it is None."""
    if factor is None:
        return quantized_matmul(lhs, kernel, lhs_qtype=lhs_qtype, **options)
    if lhs_qtype is not None and factor.ndim == 1:
        options |= {"lhs_qtype": lhs_qtype, "lhs_factor": factor}
        return quantized_matmul(lhs, kernel, **options)
    lhs = divided(lhs, factor).astype(lhs.dtype)
    return quantized_matmul(lhs, kernel, lhs_qtype=lhs_qtype, **options)


def multiply_groups(
    lhs: Array, kernel: QuantizedArray, sizes: Array, factor: Array | None, **options: Any
) -> Array:
    """`quantized_ragged_dot` of rows divided by the factors (groups, k) of their groups, unless
    `factor` is None."""
    if factor is not None:
        group = groups_of_rows(sizes, len(lhs))
        lhs = divided(lhs, factor[group]).astype(lhs.dtype)
    return quantized_ragged_dot(lhs, kernel, sizes, **options)


def lookup(table: QuantizedArray, tokens: Array, dtype: Any, factor: Array | None = None) -> Array:
    """The embeddings (..., features) of `tokens` in a packed table (features, vocabulary)."""
    if table.n == 1:  # as in Flax, every token gets the only embedding
        tokens = jnp.zeros_like(tokens)
    found = take_columns(table, tokens, dtype)
    return found if factor is None else divided(found, factor).astype(dtype)
