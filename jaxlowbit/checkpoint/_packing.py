"""Packs matrices of model files, rows (out) by columns (in), as matrices (in, out).

Rows are read, converted and packed in strips, to bound the memory of unpacked values.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._core import layout, super_blocks
from .._core.array import QuantizedArray
from .._core.format import Format
from ..quantizers._quantize import quantize

# Elements unpacked at a time; temporary arrays take about 16 bytes each.
_STRIP = 2**22


class Unpacked(NamedTuple):
    """Rows (out) of a matrix (out, in): the operands of the table in `Format`, transposed.

    `qvalue` is uint8 (rows, k); `scale` and `zero` are (rows, groups), `zero` None without zeros.
    With two levels, both are int8, and `scale_floats` and `zero_floats` are float16 (rows,
    super-blocks).
    """

    qvalue: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None
    scale_floats: np.ndarray | None = None
    zero_floats: np.ndarray | None = None

    def expanded(self) -> "Unpacked":
        """Returns these rows with float32 scales and zeros of one level, without rounding."""
        if self.scale_floats is None:
            return self
        scale = _products(self.scale, self.scale_floats)
        zero = None if self.zero is None else _products(self.zero, self.zero_floats)
        return Unpacked(self.qvalue, scale, zero)


def _products(integers: np.ndarray, floats: Any) -> np.ndarray:
    """Integers (rows, groups) times the floats (rows, super-blocks) of their super-blocks."""
    floats = np.repeat(floats, integers.shape[1] // floats.shape[1], axis=1)
    return integers.astype(np.float32) * floats.astype(np.float32)


def dequantized(unpacked: Unpacked, format: Format) -> np.ndarray:
    """The float32 weights (rows, k) of rows in a format, without its tensor scale."""
    qvalue, scale, zero, *_ = unpacked.expanded()
    scale = _per_weight(scale, qvalue, format).astype(np.float32)
    if format.codebook is not None:
        return np.array(format.values, np.float32)[qvalue] * scale
    numbers = qvalue.astype(np.float32)
    if zero is None:
        return (numbers - np.float32(format.offset)) * scale
    zero = _per_weight(zero, qvalue, format)
    if format.zero == "integer":
        return (numbers - zero) * scale
    return numbers * scale + zero.astype(np.float32)


def _per_weight(values: np.ndarray, qvalue: np.ndarray, format: Format) -> np.ndarray:
    """Values (rows, groups) repeated for each weight (rows, k); unchanged for one group."""
    if format.group_size == -1:
        return values
    return np.repeat(values, format.group_size, axis=1)[:, : qvalue.shape[1]]


def pack_rows(
    read: Callable[[int, int], Unpacked],
    shape: tuple[int, ...],
    format: Format,
    scale_dtype: Any = None,
    tensor_scale: float = 1.0,
) -> QuantizedArray:
    """Packs the matrix (k, rows) from quantized rows, read strip by strip.

    **Arguments:**

    - `read(start, stop)`: returns these rows in `format`, without padding of scales.
    - `shape`: (rows, k).
    - `scale_dtype`, `tensor_scale`: as for `pack`.

    **Raises:** the errors of `read`; `ValueError` for scales beyond the range of `scale_dtype`.
    """
    unit = np.float32(tensor_scale)
    format = format if scale_dtype is None else format.replace(scale=None)

    def strip(start: int, stop: int) -> QuantizedArray:
        unpacked = read(start, stop)
        qvalue, scale, zero, *floats = unpacked if scale_dtype is None else unpacked.expanded()
        if scale_dtype is not None:
            scale = scale if unit == 1 else scale.astype(np.float32) * unit
            scale = _rounded("scale", scale, scale_dtype)
            if zero is not None and zero.dtype != np.uint8:
                zero = _rounded("zero", zero, scale_dtype)
        unit_or_none = unit if format.has_tensor_scale else None
        return _pack(qvalue, scale, zero, *floats, unit_or_none, format)

    n, k = shape
    parts = []
    for bounds in strips(n, k):
        parts.append(strip(*bounds))
        jax.block_until_ready(parts[-2:-1])  # one strip is packed while the next is unpacked
    return _join(parts, n)


def quantize_rows(
    read: Callable[[int, int], np.ndarray],
    shape: tuple[int, int],
    format: Format,
    scale_dtype: Any,
    quantizer: Any = None,
) -> QuantizedArray:
    """Quantizes float rows to a matrix (k, rows), strip by strip.

    **Arguments:**

    - `read(start, stop)`: returns these rows, floats (count, k).
    - `shape`: (rows, k).
    - `format`, `scale_dtype`, `quantizer`: as for `jaxlowbit.quantize`; 8-bit scales determine
      their dtype.

    **Raises:** the errors of `jaxlowbit.quantize`; `ValueError` for a quantizer that permutes rows.
    """
    bounds = list(strips(*shape))
    if format.scale is not None:
        scale_dtype = None
    if format.has_tensor_scale:  # computed from the whole matrix
        bounds = [(0, shape[0])]
    options = {"scale_dtype": scale_dtype, "quantizer": quantizer}
    parts = [quantize(np.asarray(read(*ends)).T, format, **options) for ends in bounds]
    if any(part.permutation is not None for part in parts):
        raise ValueError(
            f"quantizer {quantizer!r} stores rows in another order, but a decoder takes them as "
            "they are; return a matrix without a permutation."
        )
    return _join(parts, shape[0])


def transposed_rows(
    read: Callable[[int, int], np.ndarray], shape: tuple[int, int], dtype: Any
) -> Array:
    """The float matrix (k, rows) in `dtype`, cast strip by strip; arguments as above."""
    n, k = shape
    found = np.empty((k, n), dtype)
    for start, stop in strips(n, k):
        found[:, start:stop] = np.asarray(read(start, stop)).astype(dtype).T
    return jnp.asarray(found)


def strips(rows: int, k: int) -> Iterator[tuple[int, int]]:
    """Bounds of strips of whole atoms, of equal size if possible, since each size compiles a
    program."""
    atoms = layout.blocks(rows)
    count = -(-atoms * layout.ATOM * k // _STRIP)
    even = next((c for c in range(count, 2 * count) if atoms % c == 0), count)
    step = -(-atoms // even) * layout.ATOM
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


@functools.partial(jax.jit, static_argnames="format")
def _pack(
    qvalue: Array,
    scale: Array,
    zero: Array | None,
    scale_floats: Array | None,
    zero_floats: Array | None,
    tensor_scale: Array | None,
    format: Format,
) -> QuantizedArray:
    scale, zero = scale.T, None if zero is None else zero.T
    if scale_floats is not None:
        scale = super_blocks.packed(scale, scale_floats.T, format)
    if zero is not None and zero_floats is not None:
        zero = super_blocks.packed(zero, zero_floats.T, format)
    return QuantizedArray.from_packed_groups(
        qvalue.T, scale, zero, format=format, tensor_scale=tensor_scale
    )


def _join(parts: list[QuantizedArray], n: int) -> QuantizedArray:
    """Concatenates strips of channels, whose blocks are the outermost axis of packed words."""
    first = parts[0]

    def joined(*leaves: Array) -> Array:
        return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves)

    zeros = [part.zero for part in parts if part.zero is not None]
    return QuantizedArray(
        packed=joined(*(part.packed for part in parts)),
        scale=joined(*(part.scale for part in parts)),
        zero=joined(*zeros) if zeros else None,
        index=None,
        version=first.version,
        format=first.format,
        k=first.k,
        n=n,
        tensor_scale=first.tensor_scale,
    )


def _rounded(what: str, values: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded = values.astype(dtype)
    if not np.isfinite(rounded.astype(np.float32)).all():
        raise ValueError(
            f"its largest {what}, {np.abs(values.astype(np.float32)).max():g}, is beyond the range "
            f"of {jnp.dtype(dtype)}; use scale_dtype=jnp.float32."
        )
    return rounded
