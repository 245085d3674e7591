"""Quantizing one weight of a layer, which may be abstract."""

from typing import Any

import jax

from .._array import QuantizedArray
from .._formats import Format
from .._quantize import quantize


def quantize_weight(weight: Any, format: Format) -> QuantizedArray:
    """`quantize`, of an abstract weight to an abstract array."""
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda weight: quantize(weight, format), weight)
    return quantize(weight, format)
