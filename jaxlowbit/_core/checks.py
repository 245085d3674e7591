"""Checks of values and shards that callers pass, which name the caller and the operand."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer


def finite(caller: str, name: str, values: Array, reason: str) -> None:
    """Refuses NaN and infinities. Does nothing while tracing."""
    if isinstance(values, Tracer) or (finite := jnp.isfinite(values)).all():
        return
    bad = np.argwhere(~np.asarray(finite))
    first = tuple(map(int, bad[0]))
    raise ValueError(
        f"{caller}: {name} has {len(bad)} values that are NaN or infinite, the first at {first} "
        f"({values[first]}); {reason}."
    )


def shards(caller: str, shape: tuple[int, ...], shards: tuple[int, int]) -> None:
    """Refuses shards that do not divide a matrix (..., k, n)."""
    for axis, size, count in zip("kn", shape[-2:], shards, strict=True):
        if count < 1 or size % count:
            raise ValueError(
                f"{caller}: shards={shards!r} cuts {axis}={size} into {count} parts, but the parts "
                f"are equal, so their number divides {size}."
            )
