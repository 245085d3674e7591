"""Packs matrices as blocks of GGUF's types, for formats that a type represents exactly.

`ggml_types.py` reads the same blocks.
"""

from typing import NamedTuple

import numpy as np

from .._core.array import QuantizedArray
from .._core.format import Format, format_name
from ..checkpoint._rows import Rows, rows_of
from . import ggml_types

_BLOCK = 32
_RANGES = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}
"""The integers of the types without a minimum."""
SUPPORTED = (
    "integers without a zero or with an integer one, up to 8 bits (Q4_0, Q5_0, Q8_0), with float "
    "zeros up to 5 bits (Q4_1, Q5_1), the codebook of IQ4_NL, mxfp4 and nvfp4"
)


class Blocks(NamedTuple):
    """A matrix in a ggml type: uint8 (rows, bytes of a row), and its tensor scale."""

    kind: str
    data: np.ndarray
    tensor_scale: float | None = None


def blocks_of(array: QuantizedArray) -> Blocks:
    """The blocks of a matrix (k, n).

    **Raises:** `ValueError` with the way out, for a format that no type represents, groups that are
    not multiples of 32, and scales that float16 would round.
    """
    kind = kind_of(array.format)
    size = ggml_types.TYPES[kind].size
    group = array.format.group_size
    if array.k % size or (group > 0 and group % (16 if kind == "NVFP4" else _BLOCK)):
        raise ValueError(
            f"{kind} has blocks of {size} inputs, but the matrix has {array.k} inputs in groups "
            f"of {group}; use groups of a multiple of 32"
        )
    rows = rows_of(array)
    if kind == "NVFP4":
        unit = 1.0 if array.tensor_scale is None else float(array.tensor_scale)
        return Blocks(kind, _nvfp4(rows), unit)
    return Blocks(kind, _blocks(kind, array, rows))


def kind_of(format: Format) -> str:
    """The smallest type that represents a format.

    **Raises:** `ValueError` if there is none.
    """
    if format == ggml_types.NVFP4:
        return "NVFP4"
    if format.codebook == "e2m1" and format.scale in (None, "e8m0"):
        return "MXFP4"
    if (
        format.codebook is not None
        and format.codebook == ggml_types.TYPES["IQ4_NL"].format.codebook
    ):
        return "IQ4_NL"
    if format.codebook is None and format.scale is None:
        if format.zero == "float" and format.bits <= 5:
            return "Q4_1" if format.bits <= 4 else "Q5_1"
        if format.zero != "float":
            most = 2**format.bits - 1
            needed = (
                (-most, most) if format.zero == "integer" else (-format.offset, format.offset - 1)
            )
            for kind, (least, largest) in _RANGES.items():
                if least <= needed[0] and needed[1] <= largest:
                    return kind
    raise ValueError(
        f"no type of GGUF represents the format {format_name(format)}, only: {SUPPORTED}"
    )


def _blocks(kind: str, array: QuantizedArray, rows: Rows) -> np.ndarray:
    qvalue, (n, k) = rows.qvalue.astype(np.int16), rows.qvalue.shape
    scale, zero = _per_block(rows.scale, array), None
    parts = [_bytes_of_scales(kind, scale, array)]
    if rows.zero is not None and array.format.zero == "float":
        parts.append(_halves("zero", _per_block(rows.zero, array)))
    elif rows.zero is not None:
        zero = np.repeat(_per_block(rows.zero, array), _BLOCK, axis=1).astype(np.int16)
    if kind in _RANGES:
        qvalue = qvalue - (array.format.offset if zero is None else zero) - _RANGES[kind][0]
    values = qvalue.astype(np.uint8).reshape(n, k // _BLOCK, _BLOCK)
    if kind == "Q8_0":
        parts.append(values ^ np.uint8(0x80))
    else:
        if kind in ("Q5_0", "Q5_1"):
            parts.append(np.packbits(values >> 4, axis=-1, bitorder="little"))
        parts.append(_nibbles(values, 16))
    return np.concatenate(parts, axis=-1).reshape(n, -1)


def _nibbles(values: np.ndarray, run: int) -> np.ndarray:
    """Bytes of two low nibbles each, from values that are `run` apart."""
    pairs = values.reshape(*values.shape[:-1], -1, 2, run) & 15
    return (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*values.shape[:-1], -1)


def _per_block(values: np.ndarray, array: QuantizedArray) -> np.ndarray:
    """One value for each block of 32 inputs, (n, blocks)."""
    size = array.k if array.format.group_size == -1 else array.format.group_size
    return np.repeat(values, -(-size // _BLOCK), axis=1)[:, : array.k // _BLOCK]


def _bytes_of_scales(kind: str, scale: np.ndarray, array: QuantizedArray) -> np.ndarray:
    """The scales of blocks as bytes (n, blocks, 2), or (n, blocks, 1) of MXFP4."""
    if kind != "MXFP4":
        return _halves("scale", scale)
    if array.format.scale == "e8m0":
        return scale.view(np.uint8)[..., None]
    mantissa, exponent = np.frexp(scale.astype(np.float32))
    if not ((mantissa == 0.5) & (exponent > -127)).all():
        raise ValueError("scales of MXFP4 must be powers of two; use the format mxfp4")
    return (exponent + 126).astype(np.uint8)[..., None]


def _halves(what: str, values: np.ndarray) -> np.ndarray:
    """Values as little-endian float16, (n, blocks, 2) bytes."""
    wide = values.astype(np.float32)
    with np.errstate(over="ignore"):
        halves = wide.astype("<f2")
    if not np.array_equal(halves.astype(np.float32), wide):
        worst = np.abs(wide[halves.astype(np.float32) != wide]).max()
        raise ValueError(
            f"GGUF stores float16, which would round the {what} {worst:g}; load it with "
            "scale_dtype=jnp.float16"
        )
    return np.ascontiguousarray(halves).view(np.uint8).reshape(*values.shape, 2)


def _nvfp4(rows: Rows) -> np.ndarray:
    """Blocks of 64: four scales, then for each group of 16 eight bytes of nibbles."""
    n, k = rows.qvalue.shape
    scale = rows.scale.view(np.uint8).reshape(n, k // 64, 4)
    values = _nibbles(rows.qvalue.reshape(n, k // 64, 64), 8)
    return np.concatenate([scale, values], axis=-1).reshape(n, -1)
