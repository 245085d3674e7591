"""Fits scales and zeros of a format to groups of values, and quantizes with them.

Values are float32 (..., groups, size, n); scales and zeros are (..., groups, n). Here 8-bit scales
are float32 numbers that their dtype represents, until `stored` converts them.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import super_blocks
from .codebooks import EVEN, nearest
from .dequantize import numbers_of
from .format import SCALES, SUPER_BLOCK, Format

# Maximum number of codebook bounds to compare one by one; larger codebooks use binary search.
_MOST_COMPARED = 15
_E8M0, _INT8 = SCALES["e8m0"], SCALES["int8"]
# Smaller magnitudes count as zeros, since XLA flushes them on CPUs.
_SMALLEST = float(jnp.finfo(jnp.float32).smallest_normal)


def qvalue(grouped: Array, scale: Array, zero: Array | None, format: Format) -> Array:
    """Returns the codes, uint8, of the nearest representable values."""
    if format.codebook is not None:
        return _nearest(ratio(grouped, scale[..., None, :]), format)
    _, rounded = in_steps(grouped, scale, zero, format)
    return (rounded - _least_step(zero, format)).astype(jnp.uint8)


def of_tensor(grouped: Array, format: Format) -> Array:
    """The tensor scale (...), per channel (..., n): the largest group gets the maximum scale."""
    reach = jnp.max(jnp.abs(grouped), axis=(-3, -2) if format.scales_channels else (-3, -2, -1))
    if format.scales_channels:
        most = float((format.offset - 1) * format.max_scale)
    else:
        most = float(np.abs(_numbers(format)).max()) * float(jnp.finfo(format.scale_dtype).max)
    return jnp.where(reach >= _SMALLEST, jnp.maximum(reach / most, least(jnp.float32)), 1.0)


def unsupported(format: Format) -> str | None:
    """Returns None if scales can be fitted to floats for the format, else the reason."""
    if format.bits == 1 and format.zero == "none" and format.codebook is None:
        return (
            "a 1-bit code without a zero represents only -scale and 0; use zero='float', which has "
            "two free values per group, or a codebook such as (-1, 1)"
        )
    return None


def stored(scale: Array, format: Format) -> Array:
    """Scales in their dtype; powers of two are stored as exponents, 0 as the smallest."""
    if format.scale == "e8m0":
        code = (lax.bitcast_convert_type(scale, jnp.int32) >> 23).astype(jnp.uint8)
        return lax.bitcast_convert_type(code, _E8M0)
    return scale if format.scale is None else scale.astype(format.scale_dtype)


def two_levels(
    scale: Array, zero: Array | None, format: Format
) -> tuple[Array, Array | None, Array, Array | None]:
    """Rounds float32 scales and float zeros to bytes of two-level ones that cover the same range.

    Zeros are rounded down and scales up, so that the range of a group still covers its values.

    **Returns:** the scales and zeros in their bytes (`super_blocks`), then as float32.
    """
    zero_bytes = None
    if zero is not None:
        wanted = zero
        zero_bytes, zero = _two_levels(zero, jnp.floor, -super_blocks.MOST - 1, format)
        scale = scale + (wanted - zero) / (2**format.bits - 1)
    scale_bytes, scale = _two_levels(scale, jnp.ceil, 1, format)
    return scale_bytes, zero_bytes, scale, zero


def _two_levels(values: Array, rounded: Any, least: int, format: Format) -> tuple[Array, Array]:
    """Rounds values (..., groups, n) to integers (0, or at least `least`) times the float16 of
    their super-block. Returns the bytes, and the float32 values that they represent."""
    *lead, groups, n = values.shape
    per_block = SUPER_BLOCK // format.group_size
    blocks = super_blocks.num_blocks(groups * format.group_size)
    pad = [(0, 0)] * len(lead) + [(0, blocks * per_block - groups), (0, 0)]
    whole = jnp.pad(values, pad, mode="edge").reshape(*lead, blocks, per_block, n)
    reach = jnp.max(jnp.abs(whole), axis=-2)
    floats = _scale(reach, super_blocks.MOST, jnp.dtype("float16"), 1.0)
    steps = rounded(ratio(whole, rows_of(floats)))
    integers = jnp.where(whole == 0, 0, jnp.clip(steps, least, super_blocks.MOST))
    found = (integers * rows_of(floats)).reshape(*lead, -1, n)[..., :groups, :]
    integers = integers.astype(jnp.int8).reshape(*lead, -1, n)
    return super_blocks.packed(integers, floats, format), found


def least(dtype: Any) -> float:
    """The smallest scale of a dtype; normal, if float32 units flush its subnormals."""
    if dtype == _E8M0:
        return 2.0**-126
    if dtype == _INT8:
        return 1.0
    info = jnp.finfo(dtype)
    narrow = dtype == jnp.float16 or info.bits == 8
    return float(info.smallest_subnormal if narrow else info.smallest_normal)


def zero_qvalue(scale: Array, zero: Array | None, format: Format) -> Array:
    """The codes of the values nearest to 0, uint8 (..., groups, n); a single code if the format
    has no zero."""
    if zero is None:
        least = format.offset if format.codebook is None else _least_number(format)
        return jnp.full((1,) * scale.ndim, least, jnp.uint8)
    if format.zero == "integer":
        return zero
    steps = jnp.nan_to_num(ratio(-zero.astype(jnp.float32), scale))
    return jnp.clip(jnp.round(steps), 0, 2**format.bits - 1).astype(jnp.uint8)


def in_steps(
    grouped: Array, scale: Array, zero: Array | None, format: Format
) -> tuple[Array, Array]:
    """Divides values by their scale: exactly, and rounded to the nearest code's number."""
    if zero is not None and format.zero == "float":
        grouped = grouped - rows_of(zero)
    exact, lowest = ratio(grouped, scale[..., None, :]), _least_step(zero, format)
    if format.codebook is not None:
        return exact, numbers_of(_nearest(exact, format), format)
    return exact, jnp.clip(jnp.round(exact), lowest, lowest + (2**format.bits - 1))


def _nearest(exact: Array, format: Format) -> Array:
    """The codes of the nearest codebook entries. A tie goes to the smaller entry; for 8-bit floats,
    to the even mantissa."""
    if (dtype := format.float_dtype) is not None:
        return lax.bitcast_convert_type(rounded(exact, dtype).astype(dtype), jnp.uint8)
    bounds, codes = nearest(format.values, format.codebook in EVEN)
    method = "compare_all" if len(bounds) <= _MOST_COMPARED else "scan_unrolled"
    found = jnp.searchsorted(jnp.asarray(bounds), exact, method=method)
    return jnp.asarray(codes).at[found].get(mode="promise_in_bounds")


def rounded(values: Array, dtype: Any) -> Array:
    """Rounds float32 to the nearest numbers of `dtype`; a conversion could round twice."""
    info = jnp.finfo(dtype)
    values = jnp.clip(values, -float(info.max), float(info.max))
    exponent = (lax.bitcast_convert_type(values, jnp.int32) >> 23 & 255) - 127
    last = jnp.maximum(exponent, int(info.minexp)) - info.nmant  # exponent of the last mantissa bit
    unit = lax.bitcast_convert_type(last + 127 << 23, jnp.float32)
    return jnp.round(values / unit) * unit


def _least_number(format: Format) -> int:
    """The code of the codebook entry nearest to 0."""
    return int(np.nanargmin(np.abs(np.array(format.values, np.float32))))


def ratio(values: Array, scale: Array) -> Array:
    """Values divided by scales; values with the scale 0 are unchanged.

    XLA multiplies by reciprocals, which beyond 2^126 are flushed to 0.
    """
    scale = scale.astype(jnp.float32)
    scale = jnp.where(scale == 0, 1, scale)
    smaller = jnp.where(scale > 1, 2.0**-8, 1.0)
    return (values * smaller) / (scale * smaller)


def _least_step(zero: Array | None, format: Format) -> Array | float:
    """The value of code 0, in units of the scale."""
    if zero is None:
        return -float(format.offset)
    return -rows_of(zero) if format.zero == "integer" else 0.0


def extremes(grouped: Array, format: Format) -> tuple[Array, Array]:
    """The smallest and the largest value of each group; with integer zeros, 0 is between them."""
    low, high = grouped.min(axis=-2), grouped.max(axis=-2)
    if format.zero == "integer":
        low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
    return low, high


def fit(low: Array, high: Array, format: Format, dtype: Any) -> tuple[Array, Array | None]:
    """The scale and zero for quantized values that cover `low` to `high`."""
    empty = _scale_of_zeros(format)
    if dtype == _E8M0:
        return _power_of_two(low, high, format, empty), None
    if format.codebook is not None:
        numbers = _numbers(format)
        # A side that the codebook lacks is clipped for any scale.
        below = -low / -numbers.min() if numbers.min() < 0 else jnp.zeros_like(low)
        above = high / numbers.max() if numbers.max() > 0 else jnp.zeros_like(high)
        return _scale(jnp.maximum(below, above), 1, dtype, empty), None
    levels = 2**format.bits - 1
    if dtype == _INT8:
        extent = jnp.maximum(-low, high)
        steps = jnp.clip(jnp.ceil(extent / (levels // 2)), 1, format.max_scale)
        return jnp.where(extent >= _SMALLEST, steps, empty), None
    if format.zero == "none":
        return _scale(jnp.maximum(-low, high), levels // 2, dtype, empty), None
    if format.zero == "integer":
        scale = _scale(high - low, levels, dtype, empty)
        zero = jnp.clip(jnp.round(ratio(-low, scale)), 0, levels)
        return scale, zero.astype(jnp.uint8)
    zero = _round(low, dtype, down=True)
    return _scale(high - zero.astype(jnp.float32), levels, dtype, empty), zero


def _scale_of_zeros(format: Format) -> float:
    """The scale of a group of zeros: 1 if a code represents 0, else 0.

    Scales that share a factor with their neighbours are 0 too: 1 would affect the choice of that
    factor, or count as a scale too small for its group.
    """
    has_zero = format.codebook is None or 0 in format.values
    return 1.0 if has_zero and not (format.two_levels or format.scales_channels) else 0.0


def _numbers(format: Format) -> np.ndarray:
    """The finite numbers that codes represent, in units of the scale, without a zero."""
    if format.codebook is None:
        return np.arange(-format.offset, format.offset, dtype=np.float32)
    numbers = np.array(format.values, np.float32)
    return numbers[np.isfinite(numbers)]


def _power_of_two(low: Array, high: Array, format: Format, empty: float) -> Array:
    """The power-of-two scale that brings a group's largest value to the binade of the largest
    number; `empty` for groups without extent.

    Values between the largest number and the next power of two are clipped to that number.
    """
    numbers = _numbers(format)
    below = -low if numbers.min() < 0 else jnp.zeros_like(low)
    reach = jnp.maximum(below, high if numbers.max() > 0 else below)
    power = 2.0 ** math.floor(math.log2(numbers.max() if numbers.max() > 0 else -numbers.min()))
    scale = jnp.clip(reach / power, least(_E8M0), 2.0**127)
    bits = lax.bitcast_convert_type(scale, jnp.int32) >> 23 << 23
    return jnp.where(reach >= _SMALLEST, lax.bitcast_convert_type(bits, jnp.float32), empty)


def rows_of(values: Array) -> Array:
    """Values per group (..., groups, n), as float32 (..., groups, 1, n)."""
    return values.astype(jnp.float32)[..., None, :]


def _scale(extent: Array, steps: int, dtype: Any, empty: float) -> Array:
    """The smallest scale of `dtype` whose `steps` steps cover `extent`; `empty` for no extent. For
    8 bits the nearest scale, since the next one is an eighth larger."""
    scale = jnp.maximum(extent / steps, least(dtype))
    narrow = jnp.finfo(dtype).bits == 8
    scale = rounded(scale, dtype) if narrow else _round(scale, dtype, down=False)
    return jnp.where(extent >= _SMALLEST, scale, jnp.full_like(scale, empty))


def _round(values: Array, dtype: Any, *, down: bool) -> Array:
    """Rounds float32 to `dtype` towards minus infinity (`down`) or plus infinity."""
    # Without the barrier, XLA may continue with the float32 value ("excess precision").
    nearest = lax.optimization_barrier(values.astype(dtype))
    limit = jnp.asarray(-jnp.inf if down else jnp.inf, dtype)
    wide = nearest.astype(jnp.float32)
    missed = wide > values if down else wide < values
    return jnp.where(missed, jnp.nextafter(nearest, limit), nearest)
