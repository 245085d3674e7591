"""The search over ranges of groups: quantizers clip extremes by it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._core.format import SCALES
from .._core.groups import Groups
from .._core.scales import ratio, rows_of
from ._statistics import Statistics

# The ranges that are tried besides the full one, as parts of it: 0.97 to 0.15.
_PARTS = (0.97 ** np.arange(1, 64)).astype(np.float32)
# Scales that are powers of two have these parts: the next power up and down.
_POWERS = np.array([2, 0.5], np.float32)

Fit = tuple[Array, Array | None]


def best_ranges(groups: Groups, cost: Callable[[Array], Array]) -> Fit:
    """The scale and zero of the range with the smallest cost, of the full range and smaller ones.

    One range is tried at a time, so memory does not grow with their number.

    **Arguments:** `cost`: from errors, float32 (..., groups, size, n) in units of the widest scale
    of each group and 0 for rows of padding, to costs (..., groups, n).

    **Returns:** arrays (..., groups, n), as `Groups.fit` does.
    """
    low, high = groups.extremes()
    # Shrink ranges towards 0 if they must contain it, otherwise towards their middle.
    center = low + (high - low) / 2 if groups.format.zero == "float" else jnp.zeros_like(low)
    full = groups.fit(low, high)

    def cost_of(scale: Array, zero: Array | None) -> Array:
        exact, rounded = groups.in_steps(scale, zero)
        # Units of the widest scale keep squares from overflowing and from vanishing.
        units = rows_of(ratio(scale.astype(jnp.float32), full[0]))
        return cost(jnp.where(groups.counted, (rounded - exact) * units, 0))

    def try_part(best: Any, part: Array) -> tuple[Any, None]:
        fit = groups.fit(center + part * (low - center), center + part * (high - center))
        found = (cost_of(*fit), *fit)
        better = found[0] < best[0]
        return jax.tree.map(lambda new, old: jnp.where(better, new, old), found, best), None

    parts = _POWERS if groups.scale_dtype == SCALES["e8m0"] else _PARTS
    (_, scale, zero), _ = lax.scan(try_part, (cost_of(*full), *full), jnp.asarray(parts))
    return scale, zero


def squares(importance: Array | None = None) -> Callable[[Array], Array]:
    """The cost of errors: their squares, times the importance of their row if it is given."""

    def cost(errors: Array) -> Array:
        found = errors * errors
        return jnp.sum(found if importance is None else found * importance, axis=-2)

    return cost


def of_products(groups: Groups, statistics: Statistics | None) -> Callable[[Array], Array]:
    """The cost of errors: the expected squared error that they cause in products with inputs.

    With full second moments it counts the correlations of input features of a group, with their
    diagonal only the mean squares, and without statistics all features alike.
    """
    if statistics is None:
        return squares()
    if not statistics.full:
        mean_squares = groups.per_row(statistics.mean_squares)
        return squares(ratio(mean_squares, jnp.max(mean_squares, axis=-2, keepdims=True)))
    moments = groups.blocks(statistics.second_moments)
    moments = ratio(moments, jnp.max(moments, axis=(-2, -1), keepdims=True))
    moments = moments.reshape((1,) * (groups.values.ndim - moments.ndim) + moments.shape)

    def cost(errors: Array) -> Array:
        return jnp.sum(errors * jnp.matmul(moments, errors, precision="highest"), axis=-2)

    return cost
