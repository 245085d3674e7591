"""Random weights of a format, the same for every contender, and the test of a product by one."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlowbit import Format
from jaxlowbit._core import format as formats

_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


class Codes(NamedTuple):
    """A weight as the format's table defines it: codes (k, n), scale and zero (groups, n)."""

    qvalue: jax.Array
    scale: jax.Array
    zero: jax.Array | None


def parse_format(text: str) -> Format:
    """The format of a name such as `int4-g128` or `int8`, whose random weights are no nonsense.

    **Raises:** `ValueError` for other words, and for what `Format` refuses.
    """
    format = formats.parse_format(text)
    if format.bits == 1 and format.zero == "none":
        raise ValueError(f"{text!r} holds only -scale and 0; add -float or -integer.")
    return format


name = formats.format_name


def num_bytes(n: int, k: int, format: Format | None, dtype: str) -> int:
    """What one product must read of a weight: codes, scales and zeros, or floats without format."""
    itemsize = jnp.dtype(dtype).itemsize
    if format is None:
        return n * k * itemsize
    groups = 1 if format.group_size == -1 else -(-k // format.group_size)
    of_group = itemsize + {"none": 0, "integer": 1, "float": itemsize}[format.zero]
    return n * (k * format.bits // 8 + groups * of_group)


@functools.partial(jax.jit, static_argnames=("n", "k", "format", "dtype"))
def random_codes(key: jax.Array, n: int, k: int, format: Format, dtype: str) -> Codes:
    """Codes whose weights have mean 0 and variance 1/k.

    A chain of products so ends neither in zeros nor in infinities.
    """
    groups = 1 if format.group_size == -1 else -(-k // format.group_size)
    keys = jax.random.split(key, 3)
    levels = 2**format.bits
    # The least code is left out where the middle one stands for zero.
    least = 1 if format.zero == "none" else 0
    qvalue = jax.random.randint(keys[0], (k, n), least, levels, jnp.uint8)
    variance = ((levels - least) ** 2 - 1) / 12
    scale = jax.random.uniform(keys[1], (groups, n), jnp.float32, 0.5, 1.5)
    spread = 1 + 1 / 12  # the mean square of that factor
    if format.zero == "integer":
        variance *= 2
    scale = (scale / math.sqrt(k * variance * spread)).astype(dtype)
    zero = None
    if format.zero == "integer":
        zero = jax.random.randint(keys[2], (groups, n), 0, levels, jnp.uint8)
    elif format.zero == "float":
        zero = (-0.5 * (levels - 1) * scale.astype(jnp.float32)).astype(dtype)
    return Codes(qvalue, scale, zero)


@functools.partial(jax.jit, static_argnames="format")
def dequantize(codes: Codes, format: Format) -> jax.Array:
    """The weight (k, n) in float32, as the format defines it."""
    k = codes.qvalue.shape[0]

    def rows(values: jax.Array) -> jax.Array:
        size = k if format.group_size == -1 else format.group_size
        return jnp.repeat(values.astype(jnp.float32), size, axis=0)[:k]

    qvalue, scale = codes.qvalue.astype(jnp.float32), rows(codes.scale)
    if codes.zero is None:
        return (qvalue - format.offset) * scale
    if format.zero == "integer":
        return (qvalue - rows(codes.zero)) * scale
    return qvalue * scale + rows(codes.zero)


def error_over_bound(product: jax.Array, x: jax.Array, weight: jax.Array) -> float:
    """Largest error of `x @ weight` in units of the bound that rounding allows; NaN is infinite.

    The bound allows one rounding of each weight and of the result to the dtype of `x`, and sums in
    float32. The exact product is a float64 one on the same device.
    """
    with jax.enable_x64(True):
        return float(_error_over_bound(product, x, weight))


@jax.jit
def _error_over_bound(product: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    unit = _ROUNDOFF[x.dtype.name]
    left, right = x.astype(jnp.float64), weight.astype(jnp.float64)
    exact, size = left @ right, jnp.abs(left) @ jnp.abs(right)
    bound = (unit + x.shape[-1] * 2.0**-24) * size + unit * jnp.abs(exact)
    ratio = jnp.abs(product.astype(jnp.float64) - exact) / bound
    return jnp.where(jnp.isnan(ratio), jnp.inf, ratio).max()
