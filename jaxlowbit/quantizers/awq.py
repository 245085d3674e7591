"""AWQ: factors of input features that keep the errors of the important ones small, and clipping.

Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and
Acceleration", 2024. Rows of a weight are multiplied by factors before rounding, and its inputs
divided by them. The operation before the matrix takes the division (`Calibration`). The factors are
a power, found by a grid search, of the size of each input feature (equations 4 and 5 of the paper).
Sizes are root mean squares here, the paper's are mean magnitudes. The cost of a power is the
squared error of the products, from the second moments of the inputs; before GPTQ it is the squared
error that compensation leaves.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._core.array import QuantizedArray
from .._core.format import Format
from .._core.groups import Groups
from .._core.scales import unsupported as unsupported
from . import mse
from ._statistics import Statistics

_POWERS = (np.arange(20) / 20).astype(np.float32)

STATISTICS = "full"
REQUIRED = True  # of models


def quantize(
    weight: Array, format: Format, statistics: Statistics | None, **options: Any
) -> QuantizedArray:
    """Rounds a weight to nearest, within the best range of each group. `factors` come before."""
    return mse.quantize(weight, format, statistics, **options)


def factors(
    weights: Sequence[Array],
    formats: Sequence[Format],
    statistics: Statistics,
    importance: Callable[[Statistics], Array] | None = None,
) -> Array:
    """The factors (k,) of the rows of weights (k, n) that share inputs.

    They are 1 if no power lowers the error.

    **Arguments:**

    - `statistics`: with full second moments.
    - `importance`: None, or the function of the quantizer that follows, such as `gptq.importance`.
    """
    rows = None if importance is None else importance(statistics)[:, None]
    sizes = jnp.sqrt(statistics.mean_squares)
    sizes = jnp.where(sizes > 0, sizes, jnp.max(sizes))

    def factor_of(power: Array) -> Array:
        found = jnp.maximum(sizes / jnp.maximum(jnp.max(sizes), 1e-30), 1e-4) ** power
        return found / jnp.sqrt(jnp.max(found) * jnp.min(found))

    def cost(power: Array) -> Array:
        factor = factor_of(power)[:, None]
        total = jnp.float32(0)
        for weight, format in zip(weights, formats, strict=True):
            groups = Groups.of(weight.astype(jnp.float32) * factor, format)
            scale, zero = groups.fit(*groups.extremes())
            rounded = groups.pack(scale, zero).dequantize(jnp.float32)
            error = rounded / factor - weight
            moved = jnp.matmul(statistics.second_moments, error) if rows is None else rows * error
            total += jnp.sum(error * moved)
        return total

    costs = lax.map(cost, jnp.asarray(_POWERS))
    return factor_of(jnp.asarray(_POWERS)[jnp.argmin(costs)])
