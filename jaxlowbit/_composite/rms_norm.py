"""The normalization between products."""

import jax.numpy as jnp
from jax import Array, lax


def rms_norm(x: Array, scales: Array, epsilon: float) -> Array:
    """`x / sqrt(mean(x**2) + epsilon) * scales` along the last axis, computed in float32 and
    rounded to the dtype of x.

    **Arguments:**

    - `x`: float32, bfloat16 or float16 (..., d).
    - `scales`: floats (d,).
    """
    wide = x.astype(jnp.float32)
    factor = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    scales = lax.expand_dims(scales.astype(jnp.float32), range(x.ndim - 1))
    return (wide * factor * scales).astype(x.dtype)
