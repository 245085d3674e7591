"""Conversion of users' integers to positions in a stack or on an axis."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_INT32 = np.iinfo(np.int32)


def exact(values: Any) -> Any:
    """Values as an array; NumPy unless already a JAX one, since JAX without x64 wraps integers."""
    plain = (bool, int, np.ndarray, np.generic)
    if all(isinstance(value, plain) for value in jax.tree.leaves(values)):
        return np.asarray(values)
    return jnp.asarray(values)


def saturated(values: Any) -> Array:
    """Converts integers of `exact` to int32, saturating."""
    module = jnp if isinstance(values, jax.Array) else np
    dtype = jnp.iinfo(values.dtype)
    if dtype.max > _INT32.max:
        values = module.minimum(values, _INT32.max)
    if dtype.min < _INT32.min:
        values = module.maximum(values, _INT32.min)
    return jnp.asarray(values.astype(jnp.int32))


def from_front(numbers: Array, size: int) -> Array:
    """Converts negative positions on an axis, which count from its end, to count from its front."""
    return jnp.where(numbers < 0, numbers + size, numbers)


def positions(index: Array, depth: int) -> Array:
    """Positions in a stack, from 0 to `depth` - 1, of an int32 index.

    Negative indices count from the end, then all are clamped, as in
    `jax.lax.dynamic_index_in_dim`.
    The kernels read an index in the same way.
    """
    return jnp.clip(from_front(index, depth), 0, depth - 1)
