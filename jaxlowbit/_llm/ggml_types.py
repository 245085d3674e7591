"""GGUF's block types: unpacks integers, scales and zeros to our formats without rounding.

The layouts of blocks follow ggml (`ggml-common.h`, `ggml-quants.c` of llama.cpp). The K types,
IQ4_XS and the grid types have two-level scales: integers times the half-precision number of their
block of 256. These products are exact, because that number has 11 significant bits, the integers
have at most 8, and float32 has 24. Scales of MXFP4 are powers of two, scales of NVFP4 8-bit floats.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._core.array import QuantizedArray
from .._core.format import NVFP4, Format
from ..checkpoint._packing import Unpacked, dequantized, pack_rows
from . import ggml_grids


class BlockType(NamedTuple):
    """A block type: `size` elements in `nbytes` bytes, and the format that represents it
    exactly."""

    size: int
    nbytes: int
    format: Format
    scale_dtype: str
    read: Callable[[np.ndarray], Unpacked]


def unpack(name: str, rows: np.ndarray) -> Unpacked:
    """The quantized values, scales and zeros of rows of blocks.

    **Arguments:**

    - `name`: a type of `TYPES`, such as `"Q4_K"`.
    - `rows`: uint8 (rows, bytes of a row), whole blocks.

    **Raises:** `ValueError` for a scale or zero that is NaN or infinite, with its row and block.

    ```python
    unpack("Q4_0", np.zeros((1, 18), np.uint8)).qvalue  # (1, 32)
    ```
    """
    kind = TYPES[name]
    count = rows.shape[0]
    with np.errstate(all="ignore"):  # `_check_finite` raises for them
        found = kind.read(rows.reshape(-1, kind.nbytes))
    arrays: Any = (None if array is None else array.reshape(count, -1) for array in found)
    unpacked = Unpacked(*arrays)
    for name, values in unpacked._asdict().items():
        if values is not None and values.dtype not in (np.uint8, np.int8):
            what = name.removesuffix("_floats")
            _check_finite(what, values, unpacked.qvalue.shape[1] // kind.size)
    return unpacked


def floats(name: str, rows: np.ndarray, tensor_scale: float = 1.0) -> np.ndarray:
    """The float32 weights (rows, k) of rows of blocks, as ggml dequantizes them, times the tensor
    scale.

    **Raises:** the errors of `unpack`.
    """
    weights = dequantized(unpack(name, rows), TYPES[name].format)
    return weights if tensor_scale == 1 else weights * np.float32(tensor_scale)


def pack(
    name: str, rows: np.ndarray, scale_dtype: Any = None, tensor_scale: float = 1.0
) -> QuantizedArray:
    """Packs rows of blocks as a matrix (k, rows), strip by strip.

    **Arguments:**

    - `name`, `rows`: as for `unpack`; `rows` may be memory-mapped, and is read once.
    - `scale_dtype`: None for the exact one: float16; two-level for the K types and IQ4_XS; bfloat16
      for MXFP4, and 8-bit floats for NVFP4. With a dtype, each group has a scale, and if present a
      float zero, in that dtype, exact in float32 and rounded in others.
    - `tensor_scale`: the factor of all weights, only for NVFP4.

    **Raises:** the errors of `unpack`; `ValueError` for scales beyond the range of `scale_dtype`.

    ```python
    pack("Q4_0", np.zeros((64, 18), np.uint8)).shape  # (32, 64)
    ```
    """
    kind = TYPES[name]
    shape = (rows.shape[0], rows.shape[1] // kind.nbytes * kind.size)

    def read(start: int, stop: int) -> Unpacked:
        return unpack(name, rows[start:stop])

    return pack_rows(read, shape, kind.format, scale_dtype, tensor_scale)


def _check_finite(what: str, values: np.ndarray, blocks: int) -> None:
    if np.isfinite(values).all():
        return
    row, group = (int(x) for x in np.argwhere(~np.isfinite(values))[0])
    block = group * blocks // values.shape[1]
    raise ValueError(
        f"the {what} of block {block} in row {row} is {values[row, group]}, but scales and zeros "
        "are finite; the file is damaged, fetch it again."
    )


# Each function takes whole blocks, uint8 (blocks, nbytes), and returns for each block its values in
# the order of the row, and its groups.


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The half-precision number at a byte of each block, (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")


def _digits(data: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Bit fields of bytes (blocks, bytes) in ggml's order, (blocks, 8 / bits * bytes).

    In each run of bytes, the lowest fields of all bytes come first, then the second fields, and so
    on.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = data.reshape(len(data), -1, 1, run) >> shifts & np.uint8(2**bits - 1)
    return fields.reshape(len(data), -1)


def _q4_0(blocks: np.ndarray) -> Unpacked:
    return Unpacked(_digits(blocks[:, 2:], 4, 16), _half(blocks, 0), None)


def _q4_1(blocks: np.ndarray) -> Unpacked:
    return Unpacked(_digits(blocks[:, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: np.ndarray) -> Unpacked:
    high = _digits(blocks[:, 2:6], 1, 1) << 4
    return Unpacked(_digits(blocks[:, 6:], 4, 16) | high, _half(blocks, 0), None)


def _q5_1(blocks: np.ndarray) -> Unpacked:
    high = _digits(blocks[:, 4:8], 1, 1) << 4
    return Unpacked(_digits(blocks[:, 8:], 4, 16) | high, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: np.ndarray) -> Unpacked:
    return Unpacked(blocks[:, 2:] ^ np.uint8(0x80), _half(blocks, 0), None)


def _two_levels(
    qvalue: np.ndarray,
    scale: np.ndarray,
    d: np.ndarray,
    mins: np.ndarray | None = None,
    least: np.ndarray | None = None,
) -> Unpacked:
    """Integers times d, minus other integers times a second number."""
    zero, zero_floats = (None, None) if least is None else (np.asarray(mins, np.int8), -least)
    return Unpacked(qvalue, scale.astype(np.int8), zero, d, zero_floats)


def _q2_k(blocks: np.ndarray) -> Unpacked:
    d, least = (_half(blocks, start) for start in (80, 82))
    scales = blocks[:, :16]
    return _two_levels(_digits(blocks[:, 16:80], 2, 32), scales & 15, d, scales >> 4, least)


def _q3_k(blocks: np.ndarray) -> Unpacked:
    qvalue = _digits(blocks[:, 32:96], 2, 32) | _digits(blocks[:, :32], 1, 32) << 2
    scales = _digits(blocks[:, 96:104], 4, 8) | _digits(blocks[:, 104:108], 2, 4) << 4
    return _two_levels(qvalue, scales.astype(np.int8) - 32, _half(blocks, 108))


def _scales_and_mins(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Scales, their factor d, minima and their factor of Q4_K and Q5_K.

    The 8 scales and 8 minima of 6 bits are stored in 12 bytes.
    """
    d, least = (_half(blocks, start) for start in (0, 2))
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=1)
    mins = np.concatenate([middle & 63, high >> 4 | middle >> 2 & 48], axis=1)
    return scales, d, mins, least


def _q4_k(blocks: np.ndarray) -> Unpacked:
    return _two_levels(_digits(blocks[:, 16:], 4, 32), *_scales_and_mins(blocks))


def _q5_k(blocks: np.ndarray) -> Unpacked:
    high = _digits(blocks[:, 16:48], 1, 32) << 4
    qvalue = _digits(blocks[:, 48:], 4, 32) | high
    return _two_levels(qvalue, *_scales_and_mins(blocks))


def _q6_k(blocks: np.ndarray) -> Unpacked:
    qvalue = _digits(blocks[:, :128], 4, 64) | _digits(blocks[:, 128:192], 2, 32) << 4
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return _two_levels(qvalue, scales, _half(blocks, 208))


def _ternary(qvalue: np.ndarray, scale: np.ndarray) -> Unpacked:
    return Unpacked(qvalue, scale, np.ones(scale.shape, np.uint8))


def _tq1_0(blocks: np.ndarray) -> Unpacked:
    """Five base-3 digits per byte, stored as a fraction of 3^5."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]

    def trits(start: int, stop: int, count: int) -> np.ndarray:
        fractions = blocks[:, None, start:stop] * powers[:count]  # modulo 256
        return (fractions.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(blocks), -1)

    qvalue = np.concatenate([trits(0, 32, 5), trits(32, 48, 5), trits(48, 52, 4)], axis=1)
    return _ternary(qvalue, _half(blocks, 52))


def _tq2_0(blocks: np.ndarray) -> Unpacked:
    return _ternary(_digits(blocks[:, :64], 2, 32), _half(blocks, 64))


def _q1_0(blocks: np.ndarray) -> Unpacked:
    return Unpacked(_digits(blocks[:, 2:], 1, 1), _half(blocks, 0), None)


def _q2_0(blocks: np.ndarray) -> Unpacked:
    return _ternary(_digits(blocks[:, 2:], 2, 1), _half(blocks, 0))


def _iq4_xs(blocks: np.ndarray) -> Unpacked:
    """6-bit scales: the two high bits of all groups in two bytes, then the four low ones."""
    scales = _digits(blocks[:, 4:8], 4, 1) | _digits(blocks[:, 2:4], 2, 1) << 4
    qvalue = _digits(blocks[:, 8:], 4, 16)
    return _two_levels(qvalue, scales.astype(np.int8) - 32, _half(blocks, 0))


def _mxfp4(blocks: np.ndarray) -> Unpacked:
    """A scale is a power of two, whose exponent plus 127 is stored; 255 is NaN."""
    exponent = blocks[:, :1].astype(np.int32) - 127
    scale = np.where(exponent == 128, np.nan, np.ldexp(np.float32(1), np.minimum(exponent, 127)))
    return Unpacked(_digits(blocks[:, 1:], 4, 16), scale.astype(jnp.bfloat16), None)


def _nvfp4(blocks: np.ndarray) -> Unpacked:
    """Four groups of 16, whose scales are 8-bit floats without a sign; ggml reads 127 as 0."""
    code = blocks[:, :4]
    code = np.where(code == 255, code, np.where(code == 127, 0, code & 127)).astype(np.uint8)
    return Unpacked(_digits(blocks[:, 4:], 4, 8), code.view(jnp.float8_e4m3fn), None)


# fmt: off
_IQ4 = (
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0,
    1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
)
# fmt: on
TYPES = {
    "Q4_0": BlockType(32, 18, Format(4, 32), "float16", _q4_0),
    "Q4_1": BlockType(32, 20, Format(4, 32, "float"), "float16", _q4_1),
    "Q5_0": BlockType(32, 22, Format(5, 32), "float16", _q5_0),
    "Q5_1": BlockType(32, 24, Format(5, 32, "float"), "float16", _q5_1),
    "Q8_0": BlockType(32, 34, Format(8, 32), "float16", _q8_0),
    "Q2_K": BlockType(256, 84, Format(2, 16, "float", scale="two_level"), "uint8", _q2_k),
    "Q3_K": BlockType(256, 110, Format(3, 16, scale="two_level"), "uint8", _q3_k),
    "Q4_K": BlockType(256, 144, Format(4, 32, "float", scale="two_level"), "uint8", _q4_k),
    "Q5_K": BlockType(256, 176, Format(5, 32, "float", scale="two_level"), "uint8", _q5_k),
    "Q6_K": BlockType(256, 210, Format(6, 16, scale="two_level"), "uint8", _q6_k),
    "TQ1_0": BlockType(256, 54, Format(2, 256, "integer"), "float16", _tq1_0),
    "TQ2_0": BlockType(256, 66, Format(2, 256, "integer"), "float16", _tq2_0),
    "IQ4_NL": BlockType(32, 18, Format(4, 32, codebook=_IQ4), "float16", _q4_0),
    "IQ4_XS": BlockType(
        256, 136, Format(4, 32, codebook=_IQ4, scale="two_level"), "uint8", _iq4_xs
    ),
    "MXFP4": BlockType(32, 17, Format(4, 32, codebook="e2m1"), "bfloat16", _mxfp4),
    "NVFP4": BlockType(64, 36, NVFP4, "float8_e4m3fn", _nvfp4),
    "Q1_0": BlockType(128, 18, Format(1, 128, codebook=(-1.0, 1.0)), "float16", _q1_0),
    "Q2_0": BlockType(64, 18, Format(2, 64, "integer"), "float16", _q2_0),
    **{
        name: BlockType(256, grid.nbytes, grid.format, "uint8", partial(ggml_grids.read, name))
        for name, grid in ggml_grids.GRIDS.items()
    },
}
"""The types that a format represents exactly, by their names in ggml."""
