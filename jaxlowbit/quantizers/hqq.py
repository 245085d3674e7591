"""HQQ: moves the zero of each group, or without zeros its scale, to where outliers weigh less.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023. It needs no
data. The cost of a group is the sum of abs(error) ** 0.7, errors in units of the scale. Each step
takes the part of the errors that a shrinkage operator leaves as outliers out of the weights, and
gives the group the zero with the smallest squared error of the rest. The best of all steps is kept;
the first is the range with the smallest squared error (`_ranges`).

The paper has formats with zeros. In other formats each step gives the group the scale with the
smallest squared error, without outliers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._core.array import QuantizedArray
from .._core.format import Format
from .._core.groups import Groups
from .._core.scales import ratio, rows_of
from .._core.scales import unsupported as unsupported
from ._ranges import Fit, best_ranges, squares

_POWER = 0.7
_STEPS = 20
_BETA, _GROWTH = 10.0, 1.01  # weight of the quadratic penalty, and its growth with each step

STATISTICS = None


def quantize(weight: Array, format: Format, statistics: Any, **options: Any) -> QuantizedArray:
    """Rounds a weight; statistics change nothing."""
    groups = Groups.of(weight, format, **options)
    fit = best_ranges(groups, squares())
    if format.scale is not None:
        return groups.pack(*fit)  # scales of few values, which small steps do not move
    return groups.pack(*_improved(groups, fit))


def _cost(errors: Array, zero: Array | None) -> Array:
    return jnp.sum(jnp.abs(errors) ** (2 if zero is None else _POWER), axis=-2)


def _improved(groups: Groups, fit: Fit) -> Fit:
    def measured(scale: Array, zero: Array | None) -> tuple[Array, Array, Array]:
        """The cost, the errors in units of the scale, and the rounded values."""
        exact, rounded = groups.in_steps(scale, zero)
        errors = jnp.where(groups.counted, exact - rounded, 0)
        units = ratio(scale.astype(jnp.float32), fit[0])
        return _cost(errors * rows_of(units), zero), errors, rounded

    def step(state: Any, beta: Array) -> tuple[Any, None]:
        best, (scale, zero) = state
        _, errors, rounded = measured(scale, zero)
        size = jnp.maximum(jnp.abs(errors), 1e-8)
        outliers = jnp.sign(errors) * jax.nn.relu(size - size ** (_POWER - 1) / beta)
        outliers = jnp.zeros_like(outliers) if zero is None else outliers
        moved = _moved(groups, scale, zero, errors - outliers, rounded)
        found = (measured(*moved)[0], *moved)
        better = found[0] < best[0]
        best = jax.tree.map(lambda new, old: jnp.where(better, new, old), found, best)
        return (best, moved), None

    betas = _BETA * _GROWTH ** jnp.arange(_STEPS, dtype=jnp.float32)
    first = (measured(*fit)[0], *fit)
    ((_, scale, zero), _), _ = lax.scan(step, (first, fit), betas)
    return scale, zero


def _moved(groups: Groups, scale: Array, zero: Array | None, errors: Array, rounded: Array) -> Fit:
    """The zero, or without one the scale, with the smallest squared error for these values."""
    if zero is None:
        # Rounded values times (1 + change) are nearest to the values.
        squares = jnp.sum(jnp.where(groups.counted, rounded * rounded, 0), axis=-2)
        change = ratio(jnp.sum(errors * rounded, axis=-2), squares)
        wide = scale.astype(jnp.float32)
        moved = (wide * (1 + jnp.clip(change, -0.5, 0.5))).astype(scale.dtype)
        return jnp.where((squares > 0) & (moved > 0), moved, scale), None
    counted = jnp.where(groups.counted, jnp.ones_like(errors), 0)
    mean = jnp.sum(errors, axis=-2) / jnp.sum(counted, axis=-2)
    if groups.format.zero == "float":
        wide = zero.astype(jnp.float32) + mean * scale.astype(jnp.float32)
        return scale, wide.astype(zero.dtype)
    levels = 2**groups.format.bits - 1
    return scale, jnp.clip(jnp.round(zero.astype(jnp.float32) - mean), 0, levels).astype(zero.dtype)
