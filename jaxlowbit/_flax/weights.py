"""Quantizing one weight of a layer, which may be abstract."""

from collections.abc import Callable
from typing import Any

import jax

from .._array import QuantizedArray
from .._formats import Format
from .._quantize import quantize


def quantize_weight(
    weight: Any, format: Format, matrix: Callable[[Any], Any] = lambda weight: weight
) -> QuantizedArray:
    """`quantize(matrix(weight), format)`, of an abstract weight to an abstract array."""
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda weight: quantize(matrix(weight), format), weight)
    return quantize(matrix(weight), format)
