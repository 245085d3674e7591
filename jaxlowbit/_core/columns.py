"""Lookup of columns of a quantized matrix, for embedding tables."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from . import indexing, layout, padding, permutations
from .array import QuantizedArray
from .dequantize import codes_of, dequantize_columns, in_units


def take_columns(array: QuantizedArray, columns: Array, dtype: Any) -> Array:
    """`array.dequantize(dtype).T[columns]` of a (k, n) matrix, without dequantizing other columns.

    Indices are as for `jnp.take`: negative ones count from the end, out of range gives NaN.

    **Arguments:**

    - `array`: a single matrix, not a stack.
    - `columns`: integers (...).
    - `dtype`: the dtype of the result; float32 weights are rounded to it once.

    **Returns:** (..., k).
    """
    array.check_words()
    numbers = indexing.from_front(indexing.saturated(columns.reshape(-1)), array.n)
    exists = (numbers >= 0) & (numbers < array.n)
    numbers = jnp.where(exists, numbers, 0)
    numbers = padding.spread_position(numbers, array.n, array.shards[1], layout.ATOM)
    weight = dequantize_columns(
        array.packed,
        codes_of(array.scale),
        array.zero,
        numbers,
        format=array.format,
        k=array.padded_shape[0],
    )
    unit = array.unit
    if unit is not None and array.format.scales_channels:
        unit = unit[..., numbers]
    weight = in_units(weight, unit)
    weight = padding.join(weight, -2, array.shards[0], array.k)
    if array.permutation is not None:
        weight = permutations.restore(weight, array.permutation, array.shards[0], axis=-2)
    weight = jnp.where(exists, weight.astype(dtype), jnp.asarray(jnp.nan, dtype))
    return weight.T.reshape(*columns.shape, array.k)
