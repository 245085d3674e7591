"""Dequantization in plain jnp: the table in `Format`, in float32."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from . import indexing, layout, super_blocks
from .format import SCALES, Format


def dequantize(
    packed: Array, scale: Array, zero: Array | None, *, format: Format, k: int, n: int
) -> Array:
    """Returns the float32 weights (..., k, n): the table in `Format`, in float32 arithmetic."""
    return _sum(*_terms(packed, scale, zero, format=format, k=k, n=n))


def dequantize_columns(
    packed: Array, scale: Array, zero: Array | None, columns: Array, *, format: Format, k: int
) -> Array:
    """`dequantize(...)[:, columns]` of one matrix, reading little more than these columns."""
    return _sum(*_terms_of_columns(packed, scale, zero, columns, format=format, k=k))


# Each of these two is a separate program outside of `jax.jit`, inlined inside. Terms are added
# outside, since within one program XLA may fuse a product and a sum with a single rounding.
@functools.partial(jax.jit, static_argnames=("format", "k", "n"), inline=True)
def _terms(
    packed: Array, scale: Array, zero: Array | None, *, format: Format, k: int, n: int
) -> tuple[Array, Array | None]:
    qvalue = layout.unpack(packed, format.bits)
    scale, zero, format = super_blocks.expanded(scale, zero, format, qvalue.shape[-2])
    zero = None if zero is None else layout.unpack_groups(zero)
    terms = _product_and_zero(qvalue, layout.unpack_groups(scale), zero, format)
    return jax.tree.map(lambda term: term[..., :k, :n], terms)


@functools.partial(jax.jit, static_argnames=("format", "k"), inline=True)
def _terms_of_columns(
    packed: Array, scale: Array, zero: Array | None, columns: Array, *, format: Format, k: int
) -> tuple[Array, Array | None]:
    qvalue = layout.unpack_columns(packed, format.bits, columns)
    scale = layout.unpack_group_columns(scale, columns)
    zero = None if zero is None else layout.unpack_group_columns(zero, columns)
    scale, zero, format = super_blocks.expanded(scale, zero, format, qvalue.shape[-2])
    terms = _product_and_zero(qvalue, scale, zero, format)
    return jax.tree.map(lambda term: term[:k], terms)


def _product_and_zero(
    qvalue: Array, scale: Array, zero: Array | None, format: Format
) -> tuple[Array, Array | None]:
    """Terms of the weights of quantized values (..., k, n): products with scales, and float zeros
    or None. Scales and zeros are (..., groups, n)."""
    rows = qvalue.shape[-2]
    scale, unit = floats_of(scale, format)
    scale = per_row(scale, rows, format)
    unit = None if unit is None else per_row(unit, rows, format)
    if format.codebook is not None:
        return _times(numbers_of(qvalue, format), unit) * scale, None
    qvalue = qvalue.astype(jnp.float32)
    if zero is None:
        return _times(qvalue - format.offset, unit) * scale, None
    zero = per_row(zero.astype(jnp.float32), rows, format)
    if format.zero == "integer":
        return (qvalue - zero) * scale, None
    return qvalue * scale, zero


def _sum(product: Array, zero: Array | None) -> Array:
    return product if zero is None else product + zero


def codes_of(scale: Array) -> Array:
    """Returns the bits of 8-bit scales, uint8; other scales unchanged.

    Arithmetic in these dtypes is not portable: float8_e8m0fnu has no 0, neither for padding nor for
    tangents.
    """
    narrow = scale.dtype in SCALES.values()
    return lax.bitcast_convert_type(scale, jnp.uint8) if narrow else scale


def of_codes(codes: Array, format: Format) -> Array:
    """The inverse of `codes_of`."""
    dtype = format.scale_dtype
    return codes if dtype is None else lax.bitcast_convert_type(codes, dtype)


def floats_of(scale: Array, format: Format) -> tuple[Array, Array | None]:
    """Scales (or their `codes_of`) in float32, and factors of the quantized values or None.

    The smallest power of two, 2^-127, is subnormal, and float32 units flush it to 0: it becomes
    2^-126, and the values in its group are halved. The code 255 is NaN. Integers are their codes.
    """
    if format.scale == "e8m0":
        code = codes_of(scale).astype(jnp.int32)
        power = lax.bitcast_convert_type(jnp.maximum(code, 1) << 23, jnp.float32)
        return jnp.where(code == 255, jnp.nan, power), jnp.where(code == 0, 0.5, 1.0)
    if scale.dtype == jnp.uint8 and jnp.issubdtype(format.scale_dtype, jnp.floating):
        scale = of_codes(scale, format)
    return scale.astype(jnp.float32), None


def _times(values: Array, unit: Array | None) -> Array:
    return values if unit is None else values * unit


def numbers_of(qvalue: Array, format: Format) -> Array:
    """Returns the float32 codebook entries of codes, uint8."""
    if format.float_dtype is not None:
        return lax.bitcast_convert_type(qvalue, format.float_dtype).astype(jnp.float32)
    table = jnp.array(format.values, jnp.float32)
    return table.at[qvalue].get(mode="promise_in_bounds")


def per_row(values: Array, rows: int, format: Format) -> Array:
    """Repeats a value per group and channel for each row of the group; (..., 1, n) for a single
    group."""
    if values.shape[-2] == 1:
        return values
    return jnp.repeat(values, format.group_size, axis=-2)[..., :rows, :]


def in_units(weight: Array, unit: Array | None) -> Array:
    """Weights, or products with them, (..., rows, n), times `QuantizedArray.unit`."""
    if unit is None:
        return weight
    ones = (1,) * (weight.ndim - unit.ndim)  # promote ranks explicitly: JAX may not
    return weight * unit.reshape(*ones, *unit.shape)


def take(
    packed: Array, scale: Array, zero: Array | None, index: Array | None
) -> tuple[Array, Array, Array | None]:
    """The weights at `index` of a stack, with the rules of `indexing.positions`; None: all."""
    if index is None:
        return packed, scale, zero
    index = indexing.positions(index, packed.shape[0])
    return packed[index], scale[index], None if zero is None else zero[index]
