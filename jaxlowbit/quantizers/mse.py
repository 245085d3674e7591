"""Clips: each group gets the range with the smallest squared error, of the full one and 63 smaller.

The full range is one of them, so no group is worse than with absmax. With statistics, the squared
error of each row is multiplied by the mean square of its input feature: the sum is the expected
squared error of the product, if features are uncorrelated.

The search over ranges is the `mse` option of GPTQ's reference code (Frantar et al., 2023, which
sums powers of 2.4). AWQ (Lin et al., 2024) judges the same ranges by the output of the layer;
llama.cpp's importance matrix is the mean squares of inputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._core.array import QuantizedArray
from .._core.format import SCALES, Format
from .._core.groups import Groups
from .._core.scales import ratio, rows_of
from .._core.scales import unsupported as unsupported
from ._statistics import Statistics

# The ranges that are tried besides the full one, as parts of it: 0.97 to 0.15.
_PARTS = (0.97 ** np.arange(1, 64)).astype(np.float32)
# Scales that are powers of two have these parts: the next power up and down.
_POWERS = np.array([2, 0.5], np.float32)


def quantize(
    weight: Array, format: Format, statistics: Statistics | None, **options: Any
) -> QuantizedArray:
    """Rounds a weight; one range is tried at a time, so memory does not grow with their number."""
    groups = Groups.of(weight, format, **options)
    low, high = groups.extremes()
    # Shrink ranges towards 0 if they must contain it, otherwise towards their middle.
    center = low + (high - low) / 2 if format.zero == "float" else jnp.zeros_like(low)
    full = groups.fit(low, high)
    importance = None if statistics is None else _importance(groups, statistics)

    def error(scale: Array, zero: Array | None) -> Array:
        exact, rounded = groups.in_steps(scale, zero)
        # Units of the widest scale keep squares from overflowing and from vanishing.
        units = rows_of(ratio(scale.astype(jnp.float32), full[0]))
        missed = jnp.where(groups.counted, (rounded - exact) * units, 0)
        squares = missed * missed
        return jnp.sum(squares if importance is None else squares * importance, axis=-2)

    def try_part(best: Any, part: Array) -> tuple[Any, None]:
        fit = groups.fit(center + part * (low - center), center + part * (high - center))
        found = (error(*fit), *fit)
        better = found[0] < best[0]
        return jax.tree.map(lambda new, old: jnp.where(better, new, old), found, best), None

    parts = _POWERS if groups.scale_dtype == SCALES["e8m0"] else _PARTS
    (_, scale, zero), _ = lax.scan(try_part, (error(*full), *full), jnp.asarray(parts))
    return groups.pack(scale, zero)


def _importance(groups: Groups, statistics: Statistics) -> Array:
    """The weight of each row's error, relative to the largest of its group."""
    squares = groups.per_row(statistics.mean_squares)
    largest = jnp.max(squares, axis=-2, keepdims=True)
    return ratio(squares, largest)
