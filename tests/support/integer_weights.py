"""Weights with known integers, for tests of exact sums."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from helpers import from_codes

from jaxlowbit import Format, QuantizedArray

FORMATS = [
    *(Format(bits) for bits in range(1, 9)),
    *(Format(bits, zero="integer") for bits in (1, 4, 8)),
    *(Format(bits, size, scale="int8") for bits, size in ((4, 64), (4, 128), (3, 32), (2, -1))),
]


def weights(
    format: Format, k: int, n: int, *lead: int, extreme: int | None = None, **options: Any
) -> tuple[np.ndarray, QuantizedArray]:
    """Integers (*lead, k, n), int64, and a weight with these integers and scales other than 1.

    `extreme`: -1 for the smallest integer everywhere, 1 for the largest, None for random ones.
    """
    rng = np.random.default_rng(format.bits)
    groups = 1 if format.group_size == -1 else -(-k // format.group_size)
    size = format.group_size if groups > 1 else k
    signed, most = format.zero == "none", 2**format.bits
    low = -most // 2 if signed else 0
    values = rng.integers(low, low + most, (*lead, k, n))
    zero = rng.integers(0, most, (*lead, groups, n))
    if extreme is not None:
        values[:] = low if extreme < 0 else low + most - 1
        zero[:] = most - 1 if extreme < 0 else 0
    scale: Any = rng.uniform(0.5, 2, (*lead, groups, n)).astype(np.float32)
    integers = values if signed else values - np.repeat(zero, size, -2)[..., :k, :]
    if format.scales_channels:
        scale = rng.integers(0, format.max_scale + 1, (*lead, groups, n)).astype(np.int8)
        if extreme is not None:
            scale[:] = format.max_scale
        integers = values * np.repeat(scale.astype(np.int64), size, -2)[..., :k, :]
        options["tensor_scale"] = rng.uniform(0.5, 2, (*lead, n)).astype(np.float32)
    zero = None if signed else zero.astype(np.uint8)
    if options.keys() <= {"tensor_scale"}:
        return integers, from_codes(values - low, scale, zero, format, **options)
    own = values.astype(np.int8 if signed else np.uint8)
    return integers, QuantizedArray.from_integers(own, scale, zero, format=format, **options)


def values(*shape: int, extreme: int | None = None) -> jnp.ndarray:
    """int8 values: random, or -128 or 127 everywhere."""
    found = np.random.default_rng(9).integers(-128, 128, shape, np.int8)
    if extreme is not None:
        found[:] = -128 if extreme < 0 else 127
    return jnp.asarray(found)


def exact(values: Any, integers: np.ndarray) -> np.ndarray:
    """The product in int64."""
    return np.asarray(values).astype(np.int64) @ integers
