"""Integers from outside, and the meaning of those that number matrices of a stack or columns."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_INT32 = np.iinfo(np.int32)


def exact(values: Any) -> Any:
    """An array, of NumPy where JAX, which wraps wide integers without x64, holds none of it yet."""
    plain = (bool, int, np.ndarray, np.generic)
    if all(isinstance(value, plain) for value in jax.tree.leaves(values)):
        return np.asarray(values)
    return jnp.asarray(values)


def saturated(values: Any) -> Array:
    """Integers, as `exact` gives them, as int32; those beyond it become its least or largest."""
    module = jnp if isinstance(values, jax.Array) else np
    dtype = jnp.iinfo(values.dtype)
    if dtype.max > _INT32.max:
        values = module.minimum(values, _INT32.max)
    if dtype.min < _INT32.min:
        values = module.maximum(values, _INT32.min)
    return jnp.asarray(values.astype(jnp.int32))


def from_front(numbers: Array, size: int) -> Array:
    """Numbers of which negative ones count from the end of an axis, all counted from its front."""
    return jnp.where(numbers < 0, numbers + size, numbers)


def positions(index: Array, depth: int) -> Array:
    """Where an int32 index points in a stack, from 0 to `depth` - 1.

    As in `jax.lax.dynamic_index_in_dim`: negative ones count from the end; then all are clamped.
    The kernels read an index in the same way.
    """
    return jnp.clip(from_front(index, depth), 0, depth - 1)
