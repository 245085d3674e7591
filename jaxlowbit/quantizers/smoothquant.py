"""SmoothQuant: moves outliers of activations into weights, for activations of 8 bits.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", 2022. Rows of a weight are multiplied by factors before rounding, and its inputs divided by
them (`smoothing_factor`, equation 4). The operation before the matrix takes the division
(`Calibration`). Weights are rounded as by absmax.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._core.array import QuantizedArray
from .._core.format import Format
from .._core.scales import unsupported as unsupported
from . import absmax
from ._smoothing import smoothing_factor
from ._statistics import Statistics

STATISTICS = "diagonal"
REQUIRED = True  # of models


def quantize(
    weight: Array, format: Format, statistics: Statistics | None, **options: Any
) -> QuantizedArray:
    """Rounds a weight to nearest; the factors come before."""
    return absmax.quantize(weight, format, statistics, **options)


def factors(
    weights: Sequence[Array],
    formats: Sequence[Format],
    statistics: Statistics,
    importance: Any = None,
) -> Array:
    """The factors (k,) of the rows of weights (k, n) that share inputs."""
    del formats, importance
    joined = jnp.concatenate([weight.astype(jnp.float32) for weight in weights], axis=1)
    return smoothing_factor(statistics.absmax, joined)
