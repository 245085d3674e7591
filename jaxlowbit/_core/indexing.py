"""Integers that callers pass, and which matrix of a stack or column they number."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_INT32 = np.iinfo(np.int32)


def exact(values: Any) -> Any:
    """Values as an array, of NumPy unless JAX holds one: without x64 JAX wraps wide integers."""
    plain = (bool, int, np.ndarray, np.generic)
    if all(isinstance(value, plain) for value in jax.tree.leaves(values)):
        return np.asarray(values)
    return jnp.asarray(values)


def saturated(values: Any) -> Array:
    """Integers of `exact` as int32; those beyond its range become its least or largest."""
    module = jnp if isinstance(values, jax.Array) else np
    dtype = jnp.iinfo(values.dtype)
    if dtype.max > _INT32.max:
        values = module.minimum(values, _INT32.max)
    if dtype.min < _INT32.min:
        values = module.maximum(values, _INT32.min)
    return jnp.asarray(values.astype(jnp.int32))


def from_front(numbers: Array, size: int) -> Array:
    """Counts positions on an axis from its front; negative ones count from its end."""
    return jnp.where(numbers < 0, numbers + size, numbers)


def positions(index: Array, depth: int) -> Array:
    """Positions in a stack, from 0 to `depth` - 1, that an int32 index points to.

    Negative ones count from the end, then all are clamped, as in `jax.lax.dynamic_index_in_dim`.
    The kernels read an index in the same way.
    """
    return jnp.clip(from_front(index, depth), 0, depth - 1)
