"""The table of named formats, for the documentation and `jaxlowbit info`."""

from collections.abc import Mapping

import numpy as np

from .codebooks import CODEBOOKS
from .format import MICROSCALING, SUPER_BLOCK, Format, parse_format

NAMED: Mapping[str, Format] = {
    name: parse_format(name)
    for name in (
        "int1-float",  # a 1-bit integer has no positive value
        *(f"int{bits}" for bits in range(2, 9)),
        "uint4",
        "uint8",
        "int4-int8",
        "int4-g32-float-two_level",
        *CODEBOOKS,
        *MICROSCALING,
    )
}
"""Formats by name; other formats differ in group size, zero or scale."""


def formula(format: Format) -> str:
    """The weight of a quantized value q, in the notation of the table in `Format`."""
    if format.codebook is not None:
        name = format.codebook if isinstance(format.codebook, str) else "codebook"
        return f"{name}[q] s{_second_scale(format)}"
    centred = f"(q - {format.offset}) s{_second_scale(format)}"
    if format.two_levels:
        return {"none": centred, "float": "q s d + b e"}[format.zero]
    return {"none": centred, "integer": "(q - z) s", "float": "q s + b"}[format.zero]


def _second_scale(format: Format) -> str:
    """The second factor of weights, after the group scale, if any."""
    return " d" if format.two_levels else " t" if format.has_tensor_scale else ""


def number_range(format: Format) -> tuple[float, float]:
    """The smallest and the largest number of the quantized values, before zero and scale."""
    if format.codebook is not None:
        numbers = np.array(format.values)
        finite = numbers[np.isfinite(numbers)]
        return float(finite.min()), float(finite.max())
    least = -format.offset if format.zero == "none" else 0
    return least, least + 2**format.bits - 1


def bits_per_weight(format: Format, k: int = 4096) -> float:
    """Bits per weight, including its share of the scale and zero of its group.

    Scales and float zeros take 16 bits unless the format has 8-bit scales, integer zeros 8. A
    tensor scale per channel counts with 32 bits. Two-level scales and zeros take 8 bits, plus
    16 per 256 rows.

    **Arguments:** `k`: the rows of the matrix, which form one group if there is no group size.
    """
    shared = 16 if format.scale is None else 8
    shared += {"none": 0, "integer": 8, "float": 16}[format.zero]
    if format.two_levels:
        levels = 8 / format.group_size + 16 / SUPER_BLOCK
        return format.bits + levels * (1 if format.zero == "none" else 2)
    shares = shared / (k if format.group_size == -1 else format.group_size)
    return format.bits + shares + (32 / k if format.scales_channels else 0)
