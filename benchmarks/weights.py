"""Random weights of a format, the same for all contenders, and the check of a product."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowbit import Format
from jaxlowbit._core import format as formats

_E8M0_BIAS = 127
_E4M3_UNIT = 128  # typical e4m3 scale: keeps scales between 2^-6 and 448
_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


class Codes(NamedTuple):
    """A weight in terms of its format: codes (k, n), scale and zero (groups, n).

    8-bit scales are given as their bits, uint8, which all frameworks support.
    """

    qvalue: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    tensor_scale: jax.Array | None = None  # ()


def parse_format(text: str) -> Format:
    """Parses the name of a format that has random weights, such as `int4-g128` or `int8`.

    **Raises:** `ValueError` for unknown names and invalid formats.
    """
    format = formats.parse_format(text)
    if format.bits == 1 and format.zero == "none":
        raise ValueError(f"{text!r} represents only -scale and 0; add -float or -integer.")
    if format.scale == "int8":
        raise ValueError(
            f"{text!r} has integer scales, but there are no random weights with these."
        )
    return format


name = formats.format_name


def num_bytes(n: int, k: int, format: Format | None, dtype: str) -> int:
    """Bytes of a weight that a product reads: codes, scales and zeros; without a format, floats."""
    itemsize = jnp.dtype(dtype).itemsize
    if format is None:
        return n * k * itemsize
    groups = 1 if format.group_size == -1 else -(-k // format.group_size)
    of_group = 1 if format.scale else itemsize
    of_group += {"none": 0, "integer": 1, "float": itemsize}[format.zero]
    of_tensor = 4 if format.has_tensor_scale else 0
    return n * (k * format.bits // 8 + groups * of_group) + of_tensor


@functools.partial(jax.jit, static_argnames=("n", "k", "format", "dtype"))
def random_codes(key: jax.Array, n: int, k: int, format: Format, dtype: str) -> Codes:
    """Codes of weights with mean 0 and variance 1/k (approximately with e8m0 scales).

    So a chain of products neither underflows nor overflows.
    """
    if format.codebook is not None or format.scale is not None:
        return _random_numbers(key, n, k, format, dtype)
    groups = 1 if format.group_size == -1 else -(-k // format.group_size)
    keys = jax.random.split(key, 3)
    levels = 2**format.bits
    # If the middle code is zero, omit the smallest code, so that weights are symmetric.
    least = 1 if format.zero == "none" else 0
    qvalue = jax.random.randint(keys[0], (k, n), least, levels, jnp.uint8)
    variance = ((levels - least) ** 2 - 1) / 12
    scale = jax.random.uniform(keys[1], (groups, n), jnp.float32, 0.5, 1.5)
    spread = 1 + 1 / 12  # mean square of that factor
    if format.zero == "integer":
        variance *= 2
    scale = (scale / math.sqrt(k * variance * spread)).astype(dtype)
    zero = None
    if format.zero == "integer":
        zero = jax.random.randint(keys[2], (groups, n), 0, levels, jnp.uint8)
    elif format.zero == "float":
        zero = (-0.5 * (levels - 1) * scale.astype(jnp.float32)).astype(dtype)
    return Codes(qvalue, scale, zero)


def _random_numbers(key: jax.Array, n: int, k: int, format: Format, dtype: str) -> Codes:
    """Codes of a format with a codebook or with 8-bit scales."""
    groups = 1 if format.group_size == -1 else -(-k // format.group_size)
    keys = jax.random.split(key)
    values = _numbers(format)
    usable = np.isfinite(values)
    usable[0] &= format.codebook is not None  # as in random_codes
    codes = np.flatnonzero(usable).astype(np.uint8)
    qvalue = jnp.asarray(codes)[jax.random.randint(keys[0], (k, n), 0, len(codes))]
    unit = 1 / math.sqrt(k * np.square(values[codes], dtype=np.float64).mean())
    if format.scale == "e8m0":
        exponent = round(math.log2(unit)) + jax.random.randint(keys[1], (groups, n), -1, 2)
        return Codes(qvalue, (exponent + _E8M0_BIAS).astype(jnp.uint8), None)
    factor = jax.random.uniform(keys[1], (groups, n), jnp.float32, 0.5, 1.5)
    unit /= math.sqrt(1 + 1 / 12)
    if format.scale is None:
        return Codes(qvalue, (factor * unit).astype(dtype), None)
    scale = (factor * _E4M3_UNIT).astype(format.scale_dtype)
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    return Codes(qvalue, bits, None, jnp.float32(unit / _E4M3_UNIT))


def _numbers(format: Format) -> np.ndarray:
    """The unscaled number of each code, for formats without zeros."""
    integers = np.arange(2**format.bits) - format.offset
    return np.array(format.values or integers, np.float32)


def float_dtype(codes: Codes) -> jnp.dtype:
    """The dtype of activations for a weight; not the dtype of its scales if these have 8 bits."""
    eight_bits = codes.scale.dtype == jnp.uint8
    return jnp.dtype(jnp.bfloat16) if eight_bits else codes.scale.dtype


@functools.partial(jax.jit, static_argnames="format")
def dequantize(codes: Codes, format: Format) -> jax.Array:
    """The weight (k, n) in float32, as the format defines it."""
    k = codes.qvalue.shape[0]

    def rows(values: jax.Array) -> jax.Array:
        size = k if format.group_size == -1 else format.group_size
        return jnp.repeat(values.astype(jnp.float32), size, axis=0)[:k]

    scale = codes.scale
    if format.scale is not None:
        scale = jax.lax.bitcast_convert_type(scale, format.scale_dtype).astype(jnp.float32)
    if codes.tensor_scale is not None:
        scale *= codes.tensor_scale
    scale = rows(scale)
    if codes.zero is None:
        return jnp.asarray(_numbers(format))[codes.qvalue] * scale
    qvalue = codes.qvalue.astype(jnp.float32)
    if format.zero == "integer":
        return (qvalue - rows(codes.zero)) * scale
    return qvalue * scale + rows(codes.zero)


def error_over_bound(product: jax.Array, x: jax.Array, weight: jax.Array) -> float:
    """Maximum error of `x @ weight` relative to the rounding error bound; NaN is infinite.

    The bound allows one rounding of each weight and of the result to the dtype of `x`, and float32
    accumulation. The reference is a float64 product on the same device.
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
