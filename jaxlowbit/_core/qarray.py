"""Conversion from and to qwix's `QArray`, which has one integer per element.

A QArray represents `(qvalue - zero_point) * scale`; scale and zero_point have the rank of qvalue
and broadcast over equal tiles along each axis.
"""

import re
from typing import Any

import jax.numpy as jnp

from . import layout, padding, permutations
from .dequantize import take
from .format import Format


def integers_of(array: Any) -> tuple[Any, Any, Any, Format]:
    """The values, scale, zero and format of a QArray, for `QuantizedArray.from_integers`.

    **Raises:** as `QuantizedArray.from_qarray`.
    """
    if not all(hasattr(array, name) for name in ("qvalue", "scale", "zero_point", "qtype")):
        raise TypeError(
            f"from_qarray: the argument is {type(array).__name__}, but it must be a qwix.QArray; "
            "make one with qwix.quantize, or use jaxlowbit.quantize for floats."
        )
    values, scale, zero = array.qvalue, array.scale, array.zero_point
    name = array.qtype if isinstance(array.qtype, str) else jnp.dtype(array.qtype).name
    known = re.fullmatch(r"u?int([1-8])", name)
    if known is None:
        raise ValueError(
            f"from_qarray: qtype is {name}, but only integers of 1 to 8 bits are packed here; "
            "dequantize it, and quantize the floats."
        )
    if values.ndim < 2:
        raise ValueError(
            f"from_qarray: qvalue has shape {values.shape}, but a matrix (..., k, n) is needed; "
            "reshape it."
        )
    *lead, k, n = values.shape
    groups = scale.shape[-2] if scale.ndim > 1 else 1
    size = -1 if groups == 1 else k // groups
    if size % 16 and size != -1:
        raise ValueError(
            f"from_qarray: tiles along the second to last axis have {size} of k={k} elements, but "
            "a group is a multiple of 16, or the whole axis; quantize with another tile size."
        )
    if zero is None and values.dtype.name.startswith("u"):
        zero = jnp.zeros_like(scale, values.dtype)
    fitted = (*lead, groups, n)
    scale, zero = (_spread(name, x, fitted) for name, x in (("scale", scale), ("zero_point", zero)))
    format = Format(int(known[1]), size, "none" if zero is None else "integer")
    return values, scale, zero, format


def to_qarray(array: Any) -> Any:
    """Converts a `QuantizedArray` to a QArray; raises as `QuantizedArray.to_qarray`."""
    try:
        from qwix import QArray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError(
            "to_qarray: qwix is not installed; install it (pip install qwix)."
        ) from None
    array.check_words()
    format, size = array.format, array.format.group_size
    if format.codebook is not None:
        raise ValueError(
            "to_qarray: the format has a codebook, but a QArray is made of integers here; "
            "quantize to integers, or pass the floats of dequantize()."
        )
    if format.scale is not None:
        raise ValueError(
            f"to_qarray: the format has {format.scale} scales, but a QArray is made with wider "
            "ones here; pass the floats of dequantize()."
        )
    if format.zero == "float":
        raise ValueError(
            "to_qarray: the format has a float zero, but a QArray has integer zero points; "
            "quantize with zero='integer'."
        )
    shards = array.shards[0]
    rows, one_group = array.k // shards, size == -1 or (shards == 1 and array.k <= size)
    if not one_group and rows % size:
        raise ValueError(
            f"to_qarray: k={rows} leaves the last group of {size} cut, but a QArray has equal "
            "tiles; quantize with a group_size that divides k, or each of its shards."
        )
    if not one_group and array.permutation is not None:
        raise ValueError(
            f"to_qarray: the rows of a group of {size} are permuted, but the tiles of a QArray "
            "are of neighbours; quantize without a permutation, or with group_size=-1."
        )
    packed, scale, zero = take(array.packed, array.scale, array.zero, array.index)
    groups = 1 if one_group else array.k // size

    def cut(values: Any, rows: int) -> Any:
        values = padding.join(values, -2, shards if rows > 1 else 1, rows)
        return padding.join(values, -1, array.shards[1], array.n)

    def signed(qvalue: Any) -> Any:
        dtype = jnp.int4 if format.bits <= 4 else jnp.int8
        return (qvalue.astype(jnp.int32) - format.offset).astype(dtype)

    qvalue = cut(layout.unpack(packed, format.bits), array.k)
    if array.permutation is not None:
        permutation = permutations.selected(array.permutation, array.index)
        qvalue = permutations.restore(qvalue, permutation, shards, axis=-2)
    return QArray(
        qvalue=signed(qvalue),
        scale=cut(layout.unpack_groups(scale), groups),
        zero_point=None if zero is None else signed(cut(layout.unpack_groups(zero), groups)),
        qtype={4: jnp.int4, 8: jnp.int8}.get(format.bits, f"int{format.bits}"),
    )


def _spread(name: str, values: Any, shape: tuple[int, ...]) -> Any:
    """Broadcasts size-1 axes."""
    if values is None:
        return None
    sizes = zip(values.shape, shape, strict=False)
    if values.ndim != len(shape) or any(have not in (1, want) for have, want in sizes):
        raise ValueError(
            f"from_qarray: {name} has shape {values.shape}, but it must broadcast to {shape}, "
            "since only the second to last axis can have tiles; quantize with tiles along that "
            "axis only."
        )
    return jnp.broadcast_to(values, shape)
