"""ggml's 1- to 3-bit types with values from grids: IQ1, IQ2 and IQ3.

A block of 256 has a half-precision number d, an integer per group of 16 or 32, and indices into a
table of rows of 4 or 8 numbers, with signs. All rows together contain 6 or 16 different signed
numbers, so a codebook represents them exactly. The `gguf` package has the tables and decodes the
indices.
"""

from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, quants

from .._core.format import Format
from ..checkpoint._packing import Unpacked

_IQ1 = (-1.125, -1.0 + 0.125, -0.125, 0.125, 1.0 - 0.125, 1.125, 0.0, 0.0)
_IQ2 = (-43 / 8, -25 / 8, -8 / 8, 8 / 8, 25 / 8, 43 / 8, 0.0, 0.0)
_IQ3_XXS = tuple(sign * x / 4 for sign in (-1, 1) for x in (4, 12, 20, 28, 36, 44, 52, 62))
_IQ3_S = tuple(float(x) for x in range(-15, 16, 2))


class Grid(NamedTuple):
    """A type: bytes of a block, group size, numbers, and the location of d and of the integers.

    `nibbles`: the first byte with two integers each. None for types that store an integer in the
    four highest bits of 32-bit words (IQ2_XXS, IQ3_XXS), three in 16-bit words (IQ1_S), or four
    3-bit integers in each of the last four 16-bit words (IQ1_M).
    """

    nbytes: int
    group_size: int
    codebook: tuple[float, ...]
    nibbles: int | None = None

    @property
    def format(self) -> Format:
        bits = (len(self.codebook) - 1).bit_length()
        return Format(bits, self.group_size, codebook=self.codebook, scale="two_level")


GRIDS = {
    "IQ1_S": Grid(50, 32, _IQ1),
    "IQ1_M": Grid(56, 16, _IQ1),
    "IQ2_XXS": Grid(66, 32, _IQ2),
    "IQ2_XS": Grid(74, 16, _IQ2, nibbles=66),
    "IQ2_S": Grid(82, 16, _IQ2, nibbles=74),
    "IQ3_XXS": Grid(98, 32, _IQ3_XXS),
    "IQ3_S": Grid(110, 32, _IQ3_S, nibbles=106),
}
_ONE = np.frombuffer(np.float16(1).tobytes(), np.uint8)


def read(name: str, blocks: np.ndarray) -> Unpacked:
    """The indices into the codebook, integers and floats of blocks, uint8 (blocks, nbytes)."""
    grid = GRIDS[name]
    blocks = np.ascontiguousarray(blocks)
    d, unit = _float(name, blocks)
    scale = _integers(name, blocks)
    # With d = 1 all numbers are exact, and codebook entries are at least 0.25 apart.
    values = quants.dequantize(unit, GGMLQuantizationType[name])
    ratio = values.reshape(len(blocks), -1, grid.group_size) / scale[..., None]
    numbers = np.array(grid.codebook, np.float32)
    order = np.argsort(numbers, kind="stable")
    middles = (numbers[order][1:] + numbers[order][:-1]) / 2
    qvalue = order[np.searchsorted(middles, ratio.ravel())].astype(np.uint8)
    return Unpacked(qvalue.reshape(len(blocks), -1), scale, None, d)


def _float(name: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers d, float16 (blocks, 1), and the blocks with d = 1."""
    unit = blocks.copy()
    if name != "IQ1_M":
        unit[:, :2] = _ONE
        return np.ascontiguousarray(blocks[:, :2]).view("<f2"), unit
    words = np.ascontiguousarray(blocks[:, 48:]).view("<u2")
    parts = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    one = np.float16(1).view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 15
    words = words & 0x0FFF | one << 12
    unit[:, 48:] = np.ascontiguousarray(words.astype("<u2")).view(np.uint8)
    return np.bitwise_or.reduce(parts, axis=1, keepdims=True).astype("<u2").view("<f2"), unit


def _integers(name: str, blocks: np.ndarray) -> np.ndarray:
    """The odd integers of the groups, int8 (blocks, groups)."""
    first = GRIDS[name].nibbles
    if first is not None:
        stored = blocks[:, first:, None] >> np.array([0, 4], np.uint8) & 15
    elif name == "IQ1_S":
        stored = np.ascontiguousarray(blocks[:, 34:]).view("<u2") >> 12 & 7
    elif name == "IQ1_M":
        words = np.ascontiguousarray(blocks[:, 48:]).view("<u2")
        stored = words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7
    else:  # IQ2_XXS has the word at every second position
        words = np.ascontiguousarray(blocks[:, 2 if name == "IQ2_XXS" else 66 :]).view("<u4")
        stored = (words[:, 1::2] if name == "IQ2_XXS" else words) >> 28
    return (2 * stored.reshape(len(blocks), -1) + 1).astype(np.int8)
