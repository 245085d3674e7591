"""Lookups in a quantized table, as `nnx.Embed` and `nn.Embed` do them."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from .._core import checks
from .._core.array import QuantizedArray
from .._core.columns import take_columns


def tokens_of(inputs: Any) -> Array:
    """Inputs as an array of integers.

    **Raises:** `TypeError` for what is no array, `ValueError` for one of others.
    """
    tokens = checks.array("QuantizedEmbed", "inputs", inputs, "tokens, an array of integers")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"QuantizedEmbed: the inputs are {tokens.dtype}, but tokens are integers; cast them."
        )
    return tokens


def lookup(table: QuantizedArray, tokens: Array, dtype: Any) -> Array:
    """The columns of a table (features, vocabulary) that stand for `tokens`, (..., features)."""
    if table.n == 1:  # as in Flax, the only embedding is that of any token
        tokens = jnp.zeros_like(tokens)
    return take_columns(table, tokens, dtype)
