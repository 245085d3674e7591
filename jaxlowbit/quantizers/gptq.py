"""GPTQ: rounds row by row, and lets the rows after it make up for the error of each.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
2023. Rows are input features. The compensation that minimizes the squared error of the product is a
row of the Cholesky factor of the inverse of the inputs' second moments (equations 2 and 3 and step
3 of the paper). Rows are processed in blocks; one matrix product per block updates all later rows.

- Order: rows with the largest mean square come first (`act-order`). Groups still consist of
  neighbouring rows, so the result needs no permutation (`static_groups` in the reference code).
- Clipping: the range of each group minimizes the squared errors of its rows, each divided by the
  diagonal of the factor: that is the error after compensation.
- Sweeps: coordinate descent then rounds each row once more, given all other rows (Behdin et al.,
  "QuantEase", 2023, equation 8).

Rows whose input is always 0 are rounded to nearest. A singular matrix of moments gets more damping,
ten times each time, until it has a Cholesky factor.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .._core.array import QuantizedArray
from .._core.format import Format
from .._core.groups import Groups
from .._core.scales import unsupported as unsupported
from ._ranges import best_ranges, squares
from ._statistics import Statistics

STATISTICS = "full"
REQUIRED = True  # of models

_DAMPING = 0.01
_BLOCK = 128  # rows per block
_HIGHEST = lax.Precision.HIGHEST


def quantize(
    weight: Array,
    format: Format,
    statistics: Statistics | None,
    *,
    damping: float = _DAMPING,
    act_order: bool = True,
    clip: bool = True,
    sweeps: int = 0,
    **options: Any,
) -> QuantizedArray:
    """Rounds a weight, given full second moments of its inputs.

    **Arguments:**

    - `damping`: the part of the mean of the diagonal that is added to the diagonal of the moments.
    - `act_order`: whether rows with larger inputs are rounded first.
    - `clip`: whether to search for the range of each group; else it reaches the extremes.
    - `sweeps`: number of sweeps of coordinate descent after GPTQ.

    **Raises:** `ValueError` without full second moments.
    """
    statistics = with_moments("gptq", statistics)
    groups = Groups.of(weight, format, **options)
    settings = {"damping": damping, "act_order": act_order, "clip": clip, "sweeps": sweeps}
    return groups.pack(*rounded(groups, statistics, **settings))


def with_moments(quantizer: str, statistics: Statistics | None) -> Statistics:
    """Raises `ValueError` for statistics without full second moments."""
    if statistics is None or not statistics.full:
        found = "none" if statistics is None else "their diagonal"
        raise ValueError(
            f"quantize: quantizer={quantizer!r} needs full second moments of the inputs, the "
            f"statistics have {found}; pass calibration= to the function that quantizes the model, "
            "or Statistics.of(inputs, full=True) to quantize."
        )
    return statistics


def rounded(
    groups: Groups,
    statistics: Statistics,
    *,
    damping: float = _DAMPING,
    act_order: bool = True,
    clip: bool = True,
    sweeps: int = 0,
) -> tuple[Array, Array | None, Array]:
    """The scale, zero and rounded values of a weight: the arguments of `Groups.pack`."""
    *lead, count, size, n = groups.values.shape
    moments = moments_of(groups, statistics)
    factored = mapped(lambda x: _factor(x, damping, act_order), len(lead), moments)
    if clip:
        importance = factored.importance.reshape(*lead, count, size, 1)
        scale, zero = best_ranges(groups, squares(importance))
    else:
        scale, zero = groups.fit(*groups.extremes())
    represented = groups.represented(scale, zero)

    def found(values: Array, factor: _Factor, scale: Array, zero: Array | None) -> Array:
        rounding = _Rounding(groups, scale, zero, size)
        values = values.reshape(count * size, n)
        new = _compensated(values, factor, rounding)
        for _ in range(sweeps):
            new = _swept(values, new, factor, rounding)
        return new.reshape(count, size, n)

    return scale, zero, mapped(found, len(lead), groups.values, factored, *represented)


def moments_of(groups: Groups, statistics: Statistics) -> Array:
    """Full second moments (..., rows, rows) for each matrix, in the order of the groups' rows."""
    moments = groups.moments(statistics.second_moments)
    return jnp.broadcast_to(moments, (*groups.values.shape[:-3], *moments.shape[-2:]))


def importance(statistics: Statistics) -> Array:
    """Weights (k,) of the squared error of each row, whose sum is the error of the products after
    compensation; the reciprocal squares of the diagonal of the factor."""
    return _factor(statistics.second_moments, _DAMPING, True).importance


def mapped(function: Any, axes: int, *operands: Any) -> Any:
    """`function` for each matrix of stacks, one at a time."""
    if axes == 0:
        return function(*operands)
    return lax.map(lambda x: mapped(function, axes - 1, *x), operands)


class _Factor(NamedTuple):
    """A factor of the inverse of the damped moments, rows in the order of rounding.

    - `order`: int32 (rows,), the row at each place of the order.
    - `moments`: float32 (rows, rows), damped.
    - `upper`: float32 (rows, rows), upper triangular; its Gram matrix is the inverse of `moments`.
    - `importance`: float32 (rows,), in the order of the groups: the reciprocal squares of the
      diagonal of `upper`.
    """

    order: Array
    moments: Array
    upper: Array
    importance: Array


def _factor(moments: Array, damping: float, act_order: bool) -> _Factor:
    diagonal = jnp.diagonal(moments)
    rows = len(diagonal)
    order = jnp.argsort(-diagonal, stable=True) if act_order else jnp.arange(rows)
    order = order.astype(jnp.int32)
    mean = jnp.mean(diagonal)
    mean = jnp.where(mean > 0, mean, 1.0)
    ordered = moments[order][:, order]
    eye = jnp.eye(rows, dtype=jnp.float32)

    def factored(damping: Array) -> tuple[Array, Array, Array]:
        damped = ordered + damping * mean * eye
        # The lower factor of the reversed matrix, reversed, is an upper one.
        return damping, damped, jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]

    def failed(state: tuple[Array, Array, Array]) -> Array:
        return ~jnp.all(jnp.isfinite(state[2])) & (state[0] < 1e4)

    first = factored(jnp.float32(damping))
    _, damped, root = lax.while_loop(failed, lambda x: factored(10 * x[0]), first)
    upper = lax.linalg.triangular_solve(root, eye, left_side=True, lower=False)
    importance = jnp.zeros(rows, jnp.float32).at[order].set(1 / jnp.square(jnp.diagonal(upper)))
    return _Factor(order, damped, upper, importance)


class _Rounding(NamedTuple):
    """Rounding of rows: `scale` and `zero` are (groups, n), and a group has `size` rows."""

    groups: Groups
    scale: Array
    zero: Array | None
    size: int

    def of(self, values: Array, row: Array) -> Array:
        """The nearest numbers to the values (n,) of a row."""
        group = row // self.size
        zero = None if self.zero is None else self.zero[group]
        return self.groups.nearest(values, self.scale[group], zero)


def _compensated(values: Array, factor: _Factor, rounding: _Rounding) -> Array:
    """The rounded rows of GPTQ, float32 (rows, n), in the order of the groups."""
    rows = len(values)
    block = min(_BLOCK, rows)
    missing = -rows % block
    pad = ((0, missing), (0, missing))
    upper = jnp.pad(factor.upper, pad) + _padding(rows, missing)
    order = jnp.pad(factor.order, (0, missing), mode="edge")

    def next_block(number: Array, values: Array) -> Array:
        start = number * block
        across = lax.dynamic_slice_in_dim(upper, start, block)
        corner = lax.dynamic_slice_in_dim(across, start, block, axis=1)
        tile = lax.dynamic_slice_in_dim(values, start, block)

        def next_row(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            tile, errors = state
            found = rounding.of(tile[i], order[start + i])
            error = (tile[i] - found) / corner[i, i]
            after = jnp.where(jnp.arange(block) > i, corner[i], 0)
            tile = tile - after[:, None] * error[None]
            return tile.at[i].set(found), errors.at[i].set(error)

        tile, errors = lax.fori_loop(0, block, next_row, (tile, jnp.zeros_like(tile)))
        after = jnp.where(jnp.arange(rows + missing)[None] >= start + block, across, 0)
        values = values - jnp.matmul(after.T, errors, precision=_HIGHEST)
        return lax.dynamic_update_slice_in_dim(values, tile, start, 0)

    ordered = jnp.pad(values[factor.order], ((0, missing), (0, 0)))
    ordered = lax.fori_loop(0, (rows + missing) // block, next_block, ordered)
    return jnp.zeros_like(values).at[factor.order].set(ordered[:rows])


def _padding(rows: int, missing: int) -> Array:
    """A diagonal matrix, 1 for the rows of padding."""
    return jnp.diag((jnp.arange(rows + missing) >= rows).astype(jnp.float32))


def _swept(values: Array, found: Array, factor: _Factor, rounding: _Rounding) -> Array:
    """Rounds each row once more, given all others. Rows are in the order of the groups."""
    rows = len(values)
    block = min(_BLOCK, rows)
    missing = -rows % block
    pad = ((0, missing), (0, missing))
    moments = jnp.pad(factor.moments, pad) + _padding(rows, missing)
    order = jnp.pad(factor.order, (0, missing), mode="edge")

    def next_block(number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        found, slope = state
        start = number * block
        across = lax.dynamic_slice_in_dim(moments, start, block)
        corner = lax.dynamic_slice_in_dim(across, start, block, axis=1)
        before = lax.dynamic_slice_in_dim(found, start, block)
        own = lax.dynamic_slice_in_dim(slope, start, block)

        def next_row(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            tile, own = state
            new = rounding.of(tile[i] + own[i] / corner[i, i], order[start + i])
            own = own - corner[i][:, None] * (new - tile[i])[None]
            return tile.at[i].set(new), own

        tile, _ = lax.fori_loop(0, block, next_row, (before, own))
        slope = slope - jnp.matmul(across.T, tile - before, precision=_HIGHEST)
        return lax.dynamic_update_slice_in_dim(found, tile, start, 0), slope

    ordered = jnp.pad(found[factor.order], ((0, missing), (0, 0)))
    error = jnp.pad((values - found)[factor.order], ((0, missing), (0, 0)))
    slope = jnp.matmul(moments, error, precision=_HIGHEST)
    ordered, _ = lax.fori_loop(0, (rows + missing) // block, next_block, (ordered, slope))
    return jnp.zeros_like(values).at[factor.order].set(ordered[:rows])
