"""The definition: dequantize, then multiply, in plain jnp. Every other backend is held to it."""

import jax.numpy as jnp
from jax import Array, lax

from .. import _index, _layout
from .._formats import Format


def dequantize(
    packed: Array, scale: Array, zero: Array | None, *, format: Format, k: int, n: int
) -> Array:
    """Returns the float32 weights (..., k, n): the table in `Format`, in float32 arithmetic."""
    codes = _layout.unpack(packed, format.bits)
    zero = None if zero is None else _layout.unpack_groups(zero)
    return _weights(codes, _layout.unpack_groups(scale), zero, format)[..., :k, :n]


def dequantize_columns(
    packed: Array, scale: Array, zero: Array | None, columns: Array, *, format: Format, k: int
) -> Array:
    """`dequantize(...)[:, columns]` of one matrix, reading little else than these columns."""
    codes = _layout.unpack_columns(packed, format.bits, columns)
    scale = _layout.unpack_group_columns(scale, columns)
    zero = None if zero is None else _layout.unpack_group_columns(zero, columns)
    return _weights(codes, scale, zero, format)[:k]


def _weights(codes: Array, scale: Array, zero: Array | None, format: Format) -> Array:
    """The weights of codes (..., k, n) with scales and zeros (..., groups, n)."""
    codes, rows = codes.astype(jnp.float32), codes.shape[-2]
    scale = per_row(scale.astype(jnp.float32), rows, format)
    if zero is None:
        return (codes - format.offset) * scale
    zero = per_row(zero.astype(jnp.float32), rows, format)
    if format.zero == "integer":
        return (codes - zero) * scale
    return codes * scale + zero


def per_row(values: Array, rows: int, format: Format) -> Array:
    """Spreads one value per group and channel over the rows of its group, or (..., 1, n) if there
    is one group."""
    if values.shape[-2] == 1:
        return values
    return jnp.repeat(values, format.group_size, axis=-2)[..., :rows, :]


def take(
    packed: Array, scale: Array, zero: Array | None, index: Array | None
) -> tuple[Array, Array, Array | None]:
    """The weights at `index` of a stack, as `_index.positions` reads it; all without one."""
    if index is None:
        return packed, scale, zero
    index = _index.positions(index, packed.shape[0])
    return packed[index], scale[index], None if zero is None else zero[index]


def matmul(
    lhs: Array,
    packed: Array,
    scale: Array,
    zero: Array | None,
    index: Array | None,
    *,
    format: Format,
    columns: int,
    transposed: bool,
    out_dtype: jnp.dtype,
) -> Array:
    """The product (*lead, *rows, k) x (*lead, k, n) -> (*lead, *rows, n), n being `columns`.

    Transposed, (*lead, *rows, n) x (*lead, k, n) -> (*lead, *rows, k), k being `columns`: the
    cotangent of lhs.

    The weights, defined in float32, are rounded once to the dtype of lhs; products accumulate in
    float32; the sum is rounded once to `out_dtype`. With an `index` the weight of lead position i
    is `packed[index[i]]`.
    """
    packed, scale, zero = take(packed, scale, zero, index)
    k, n = (columns, lhs.shape[-1]) if transposed else (lhs.shape[-1], columns)
    weight = dequantize(packed, scale, zero, format=format, k=k, n=n)
    lead = packed.ndim - 3
    axes = tuple(range(lead))
    dimension_numbers = (((lhs.ndim - 1,), (lead + transposed,)), (axes, axes))
    out = lax.dot_general(
        lhs, weight.astype(lhs.dtype), dimension_numbers, preferred_element_type=jnp.float32
    )
    return out.astype(out_dtype)
