"""`Statistics`: the facts about a layer's inputs that calibrated quantizers read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from .._core import checks
from .._core.dtypes import FLOATS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of the inputs of a layer over a calibration set, a pytree.

    `Statistics.of` makes them from the inputs of one batch; `a + b` combines two. Leading axes are
    stack axes of the weights; without them all matrices of a stack share the statistics.

    - `second_moments`: float32 (..., k, k), the mean of `outer(x, x)` over rows x, as GPTQ needs
      it; or (..., k), its diagonal.
    - `absmax`: float32 (..., k), the largest magnitude of each input feature.
    - `rows`: int32 (...), the number of rows.

    ```python
    first, second = jnp.ones((8, 256)), 2 * jnp.ones((8, 256))
    statistics = Statistics.of(first) + Statistics.of(second)
    q = quantize(jnp.ones((256, 512)), "int3", statistics=statistics)
    ```
    """

    second_moments: Array
    absmax: Array
    rows: Array

    @classmethod
    def of(cls, inputs: Any, *, full: bool = False) -> "Statistics":
        """Returns the statistics of inputs.

        **Arguments:**

        - `inputs`: float32, bfloat16 or float16 (..., k), at least one row.
        - `full`: whether second moments are (k, k), instead of their diagonal.

        **Raises:** `TypeError` for a value that is no array, `ValueError` for another dtype, for no
        rows and, outside `jax.jit`, for values that are not finite.
        """
        caller = "Statistics.of"
        inputs = checks.array(caller, "inputs", inputs, "floats (..., k)")
        checks.boolean(caller, "full", full)
        if inputs.dtype not in FLOATS or inputs.ndim == 0 or inputs.size == 0:
            raise ValueError(
                f"{caller}: inputs is {checks.brief(inputs)}, but it must be float32, bfloat16 or "
                "float16 (..., k) with a row at least; cast or reshape it."
            )
        checks.finite(caller, "inputs", inputs, "leave these rows out")
        values = inputs.reshape(-1, inputs.shape[-1]).astype(jnp.float32)
        rows = values.shape[0]
        if full:
            moments = jnp.matmul(values.T, values, precision=jax.lax.Precision.HIGHEST) / rows
        else:
            moments = jnp.mean(values * values, axis=0)
        return cls(moments, jnp.max(jnp.abs(values), axis=0), jnp.int32(rows))

    def __add__(self, other: "Statistics") -> "Statistics":
        rows = self.rows + other.rows
        share = (self.rows / jnp.maximum(rows, 1)).astype(jnp.float32)
        axes = self.second_moments.ndim - self.rows.ndim
        share = jnp.expand_dims(share, tuple(range(-axes, 0)))
        moments = share * self.second_moments + (1 - share) * other.second_moments
        return Statistics(moments, jnp.maximum(self.absmax, other.absmax), rows)

    def divided(self, factor: Array) -> "Statistics":
        """The statistics of inputs that are divided by positive factors (..., k) of features."""
        squares = factor[..., :, None] * factor[..., None, :] if self.full else factor * factor
        return Statistics(self.second_moments / squares, self.absmax / factor, self.rows)

    def pooled(self) -> "Statistics":
        """The statistics of the rows of all matrices of a stack together."""
        lead = tuple(range(self.rows.ndim))
        share = self.rows / jnp.maximum(jnp.sum(self.rows), 1)
        share = jnp.expand_dims(share, range(len(lead), self.second_moments.ndim))
        moments = jnp.sum(share * self.second_moments, lead)
        return Statistics(moments, jnp.max(self.absmax, lead), jnp.sum(self.rows))

    @property
    def full(self) -> bool:
        """Whether second moments are matrices (..., k, k)."""
        return self.second_moments.ndim > self.absmax.ndim

    @property
    def mean_squares(self) -> Array:
        """The mean square of each input feature, float32 (..., k)."""
        if self.full:
            return jnp.diagonal(self.second_moments, axis1=-2, axis2=-1)
        return self.second_moments


def checked(caller: str, statistics: Any, shape: tuple[int, ...]) -> Statistics | None:
    """Statistics of the inputs of a weight (..., k, n) of `shape`, or None.

    **Raises:** `TypeError` for another value, `ValueError` for another number of features.
    """
    if statistics is None:
        return None
    if not isinstance(statistics, Statistics):
        raise TypeError(
            f"{caller}: statistics is {checks.brief(statistics)}, but it must be a Statistics; "
            "make one with jaxlowbit.quantizers.Statistics.of(inputs), or pass None."
        )
    found = jnp.shape(statistics.absmax)
    if found not in (shape[-2:-1], shape[:-1]):
        raise ValueError(
            f"{caller}: statistics has {found} input features, but a weight of shape {shape} takes "
            f"{shape[-2:-1]}, or {shape[:-1]} for each of a stack; pass those of its inputs."
        )
    if reason := not_finite(statistics):
        raise ValueError(f"{caller}: the inputs of statistics {reason}.")
    return statistics


def not_finite(statistics: Statistics) -> str | None:
    """Returns the fault of the inputs if statistics contain NaN or infinities, and the way out;
    None while tracing."""
    arrays = statistics.absmax, statistics.second_moments
    if any(isinstance(x, Tracer) for x in arrays):
        return None
    if all(bool(jnp.isfinite(x).all()) for x in arrays):
        return None
    # XLA's maximum of float32 on CPUs may ignore NaN, sums do not.
    squares, largest = np.asarray(statistics.mean_squares), float(jnp.max(statistics.absmax))
    if np.isfinite(largest) and np.isinf(squares).any() and not np.isnan(squares).any():
        return f"reach {largest:.3g}, and their squares overflow float32; scale these inputs down"
    return "are NaN or infinite; leave those rows out, or use a wider dtype of activations"
