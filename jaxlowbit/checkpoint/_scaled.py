"""Matrices of bytes, 8-bit integers or floats, and of pairs of 4-bit floats, with their scales."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .._core.format import SCALES, Format
from . import _bits
from ._fields import OTHER
from ._files import AGAIN, FLOATS, Folder, Tensor
from ._matrix import Matrix
from ._packing import Unpacked

CODEBOOKS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
_NAN = {"F8_E4M3": lambda bits: bits & 127 == 127, "F8_E5M2": lambda bits: bits & 127 >= 124}
_E8M0 = SCALES["e8m0"]
_STATIC = re.compile(r"\.((input|output|activation|[qkv])_(scale|zero_point|global_scale))$")


def static_scales(folder: Folder) -> frozenset[str]:
    """The names of static scales of activations, of results and of a cache, which are not read."""
    return frozenset(name for name in folder.tensors if _STATIC.search(name))


def left_out(path: Path, what: str) -> str:
    """A sentence on rounding that is left out."""
    return (
        f"{path} has {what}, left out: here they are floats, or activations get a scale for each "
        "token with lhs_qtype=."
    )


def scaled(
    name: str,
    kind: str,
    weight: Tensor,
    scale: Tensor,
    *,
    rows: int,
    columns: int,
    bits: int = 8,
    zero: Tensor | None = None,
    convert: Callable[[np.ndarray], np.ndarray] | None = None,
    activation_dtype: Any = None,
) -> Matrix:
    """A matrix of one number in each byte: 8-bit floats, or int8 that are integers of `bits`.

    **Arguments:**

    - `weight`: F8_E4M3, F8_E5M2 or I8 (n, k).
    - `scale`: floats, F8_E8M0 or its bits U8, one for each block of `rows` outputs and `columns`
      inputs, -1 for all; blocks at the edges may be cut. Shapes without the axes of size 1 fit.
    - `zero`: None, or int8 of the shape of `scale`, for integers.
    - `convert`: computes scales from the stored numbers.

    **Raises:** `ValueError` for other types and shapes.
    """
    n, k = _sizes_of_bytes(weight)
    rows, size = n if rows == -1 else rows, k if columns == -1 else columns
    blocks = (-(-n // max(rows, 1)), -(-k // max(size, 1)))
    shapes = (blocks, *([(blocks[0],)] if blocks[1] == 1 else []))
    shapes = (*shapes, *([(), (1,)] if blocks == (1, 1) else []))
    scale.check(FLOATS if zero is not None else (*FLOATS, "F8_E8M0", "U8"), *shapes)
    if zero is not None:
        zero.check(("I8",), *shapes)
    codebook = CODEBOOKS.get(weight.kind)
    narrow = "e8m0" if scale.kind in ("F8_E8M0", "U8") and convert is None else None
    group = _group(weight, size, k)
    format = Format(bits, group, zero="none" if zero is None else "integer", codebook=codebook)

    def unpack(start: int, stop: int) -> Unpacked:
        numbers = np.arange(start, stop) // rows
        first = numbers[0]
        own = scale.array().reshape(blocks)[first : numbers[-1] + 1]
        found = scales(scale, own, convert)[numbers - first]
        values = weight.array()[start:stop].view(np.uint8)
        if codebook is not None:
            _check_numbers(_NAN[weight.kind](values), start)
            return Unpacked(np.array(values), found, None)
        values = _unsigned(values, bits, "weights")
        if zero is None:
            return Unpacked(values, found, None)
        zeros = zero.array().reshape(blocks)[numbers].view(np.uint8)
        return Unpacked(values, found, _unsigned(zeros, bits, f"zeros {zero.name!r}"))

    tensors = (weight, scale, *([] if zero is None else [zero]))
    return Matrix(
        name,
        kind,
        tensors,
        (n, k),
        format.replace(scale=narrow),
        unpack,
        activation_dtype=activation_dtype,
    )


def four_bit_floats(
    name: str,
    kind: str,
    data: Tensor,
    scale: Tensor,
    *,
    tensor_scale: Tensor | None = None,
    unit: float = 1.0,
    activation_dtype: Any = None,
) -> Matrix:
    """A matrix of E2M1 pairs, U8 (n, k / 2), the even input in the low bits.

    **Arguments:** `scale`: F8_E4M3 (n, k / 16) of NVFP4, or F8_E8M0 or its bits (n, k / 32) of
    MXFP4; `tensor_scale`: the tensor that `unit`, the factor of all weights, was read from.

    **Raises:** `ValueError` for other types and shapes.
    """
    if len(data.shape) != 2 or data.kind != "U8":
        raise ValueError(
            f"{data.where} is {data.kind} of shape {data.shape}, but it must be a matrix of U8, "
            f"with two values in each; {AGAIN}."
        )
    n, k = data.shape[0], 2 * data.shape[1]
    nv = scale.kind == "F8_E4M3"
    size = 16 if nv else 32
    scale.check(("F8_E4M3", "F8_E8M0", "U8"), (n, k // size))
    if k % size:
        raise ValueError(f"{data.where} has {k} inputs, but groups of {size} divide them; {AGAIN}.")

    def unpack(start: int, stop: int) -> Unpacked:
        return Unpacked(
            _bits.nibbles(data.array()[start:stop]),
            scales(scale, scale.array()[start:stop]),
            None,
        )

    return Matrix(
        name,
        kind,
        (data, scale, *([] if tensor_scale is None else [tensor_scale])),
        (n, k),
        Format(4, size, codebook="e2m1", scale="e4m3" if nv else "e8m0"),
        unpack,
        tensor_scale=unit,
        activation_dtype=activation_dtype,
    )


def scales(
    tensor: Tensor,
    values: np.ndarray,
    convert: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Scales of a tensor, U8 as powers of two; `convert` computes them from the stored numbers.

    **Raises:** `ValueError` if some are NaN or infinite.
    """
    values = np.ascontiguousarray(values)
    values = values.view(_E8M0) if values.dtype == np.uint8 else values
    values = values if convert is None else convert(values)
    wrong = ~np.isfinite(values.astype(np.float32))
    if wrong.any():
        raise ValueError(
            f"its scales {tensor.name!r} have {int(wrong.sum())} that are NaN or infinite; the "
            f"file is damaged, {AGAIN}."
        )
    return values


def number(tensor: Tensor) -> float:
    """The one positive, finite float of a tensor.

    **Raises:** `ValueError` for another shape, type or value.
    """
    tensor.check(FLOATS, (), (1,))
    found = float(tensor.array().astype(np.float32).reshape(()))
    if not np.isfinite(found) or found <= 0:
        raise ValueError(f"{tensor.where} is {found}, but it must be a positive number; {AGAIN}.")
    return found


def _sizes_of_bytes(weight: Tensor) -> tuple[int, int]:
    """The sizes of a matrix of bytes."""
    if len(weight.shape) != 2 or 0 in weight.shape or weight.kind not in (*CODEBOOKS, "I8"):
        raise ValueError(
            f"{weight.where} is {weight.kind} of shape {weight.shape}, but it must be a matrix of "
            f"{', '.join((*CODEBOOKS, 'I8'))}; {AGAIN}."
        )
    return weight.shape[0], weight.shape[1]


def _group(weight: Tensor, size: int, k: int) -> int:
    """The group size of a format for groups of so many of k inputs."""
    if size >= k:
        return -1
    if size % 16:
        raise ValueError(
            f"{weight.where} has groups of {size} inputs, but groups are multiples of 16 here; "
            f"{OTHER}."
        )
    return size


def _unsigned(values: np.ndarray, bits: int, what: str) -> np.ndarray:
    """Bytes of signed integers of `bits` as unsigned ones, plus 2^(bits - 1)."""
    found = np.ascontiguousarray(values) + np.uint8(1 << bits - 1)
    if found.size and bits < 8 and found.max() >= 1 << bits:
        raise ValueError(
            f"its {what} reach beyond {bits} bits, but they must be integers from "
            f"{-(1 << bits - 1)} to {(1 << bits - 1) - 1}; {AGAIN}."
        )
    return found


def _check_numbers(wrong: np.ndarray, start: int) -> None:
    if wrong.any():
        row, column = (int(x) for x in np.argwhere(wrong)[0])
        raise ValueError(
            f"{int(wrong.sum())} numbers are NaN, the first in row {start + row} and column "
            f"{column}; the file is damaged, {AGAIN}."
        )
