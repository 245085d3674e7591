"""The table of formats with names: what the pages and `jaxlowbit info` say of each."""

from collections.abc import Mapping

import numpy as np

from .codebooks import CODEBOOKS
from .format import MICROSCALING, SUPER_BLOCK, Format, parse_format

NAMED: Mapping[str, Format] = {
    name: parse_format(name)
    for name in (
        "int1-float",  # an integer of one bit has no value above zero
        *(f"int{bits}" for bits in range(2, 9)),
        "uint4",
        "uint8",
        "int4-int8",
        "int4-g32-float-super",
        *CODEBOOKS,
        *MICROSCALING,
    )
}
"""Formats by their names, of which others differ in the group size, the zero or the scale."""


def formula(format: Format) -> str:
    """The weight of a quantized value q, as the table in `Format` has it."""
    if format.codebook is not None:
        name = format.codebook if isinstance(format.codebook, str) else "codebook"
        return f"{name}[q] s{_second_scale(format)}"
    centred = f"(q - {format.offset}) s{_second_scale(format)}"
    if format.scale == "super":
        return {"none": centred, "float": "q s d + b e"}[format.zero]
    return {"none": centred, "integer": "(q - z) s", "float": "q s + b"}[format.zero]


def _second_scale(format: Format) -> str:
    """The factor of scales that are not all."""
    return " d" if format.scale == "super" else " t" if format.has_tensor_scale else ""


def number_range(format: Format) -> tuple[float, float]:
    """The least and the largest number that quantized values stand for, before zero and scale."""
    if format.codebook is not None:
        numbers = np.array(format.values)
        finite = numbers[np.isfinite(numbers)]
        return float(finite.min()), float(finite.max())
    least = -format.offset if format.zero == "none" else 0
    return least, least + 2**format.bits - 1


def bits_per_weight(format: Format, k: int = 4096) -> float:
    """The bits of a weight with its share of the scale and the zero of its group.

    Scales and float zeros have 16 bits unless the format has 8-bit scales, integer zeros 8. A
    tensor scale is counted where each channel has one, in 32 bits. Scales and zeros of two levels
    have 8 bits, and 16 in 256 rows.

    **Arguments:** `k`: the rows of the matrix, all of which are one group without a group size.
    """
    shared = 16 if format.scale is None else 8
    shared += {"none": 0, "integer": 8, "float": 16}[format.zero]
    if format.scale == "super":
        levels = 8 / format.group_size + 16 / SUPER_BLOCK
        return format.bits + levels * (1 if format.zero == "none" else 2)
    shares = shared / (k if format.group_size == -1 else format.group_size)
    return format.bits + shares + (32 / k if format.scales_channels else 0)
