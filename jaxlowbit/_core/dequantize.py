"""Floats that packed weights stand for, in plain jnp: the table in `Format`, in float32."""

import jax.numpy as jnp
from jax import Array, lax

from . import indexing, layout
from .format import Format


def dequantize(
    packed: Array, scale: Array, zero: Array | None, *, format: Format, k: int, n: int
) -> Array:
    """Returns the float32 weights (..., k, n): the table in `Format`, in float32 arithmetic."""
    qvalue = layout.unpack(packed, format.bits)
    zero = None if zero is None else layout.unpack_groups(zero)
    return _weights(qvalue, layout.unpack_groups(scale), zero, format)[..., :k, :n]


def dequantize_columns(
    packed: Array, scale: Array, zero: Array | None, columns: Array, *, format: Format, k: int
) -> Array:
    """`dequantize(...)[:, columns]` of one matrix, reading little else than these columns."""
    qvalue = layout.unpack_columns(packed, format.bits, columns)
    scale = layout.unpack_group_columns(scale, columns)
    zero = None if zero is None else layout.unpack_group_columns(zero, columns)
    return _weights(qvalue, scale, zero, format)[:k]


def _weights(qvalue: Array, scale: Array, zero: Array | None, format: Format) -> Array:
    """The weights of quantized values (..., k, n) with scales and zeros (..., groups, n)."""
    rows = qvalue.shape[-2]
    scale = per_row(scale.astype(jnp.float32), rows, format)
    if format.codebook is not None:
        return numbers_of(qvalue, format) * scale
    qvalue = qvalue.astype(jnp.float32)
    if zero is None:
        return (qvalue - format.offset) * scale
    zero = per_row(zero.astype(jnp.float32), rows, format)
    if format.zero == "integer":
        return (qvalue - zero) * scale
    return qvalue * scale + zero


def numbers_of(qvalue: Array, format: Format) -> Array:
    """The numbers of a codebook that quantized values, uint8, stand for, in float32."""
    if format.float_dtype is not None:
        return lax.bitcast_convert_type(qvalue, format.float_dtype).astype(jnp.float32)
    table = jnp.array(format.values, jnp.float32)
    return table.at[qvalue].get(mode="promise_in_bounds")


def per_row(values: Array, rows: int, format: Format) -> Array:
    """Spreads one value per group and channel over the rows of its group, or (..., 1, n) if there
    is one group."""
    if values.shape[-2] == 1:
        return values
    return jnp.repeat(values, format.group_size, axis=-2)[..., :rows, :]


def take(
    packed: Array, scale: Array, zero: Array | None, index: Array | None
) -> tuple[Array, Array, Array | None]:
    """The weights at `index` of a stack, as `indexing.positions` reads it; all without one."""
    if index is None:
        return packed, scale, zero
    index = indexing.positions(index, packed.shape[0])
    return packed[index], scale[index], None if zero is None else zero[index]
