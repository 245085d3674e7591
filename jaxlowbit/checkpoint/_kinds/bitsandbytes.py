"""bitsandbytes: `nf4` and `fp4` with and without double quantization, and int8.

A byte of a 4-bit `weight` contains two indices into `weight.quant_map`, the first in the high bits,
over the flattened (out, in) matrix. `weight.absmax` has a scale per block of these: floats or, with
double quantization, indices into `weight.nested_quant_map`, times the `weight.nested_absmax` of a
block of scales, plus an offset. An 8-bit module has `weight` and `SCB`, the largest magnitude of
each row. The layouts follow `QuantState.as_dict` and `int8_vectorwise_dequant` of bitsandbytes.
"""

import dataclasses
import json
import math
from typing import Any, NamedTuple

import numpy as np

from ..._core.checks import brief
from ..._core.codebooks import CODEBOOKS
from ..._core.format import Format
from .._fields import OTHER, Fields
from .._files import AGAIN, Folder, Tensor
from .._matrix import Found, Matrix
from .._packing import Unpacked
from .._scaled import scaled, scales

METHODS = ("bitsandbytes",)
SUMMARY = "nf4 and fp4 with and without double quantization, and int8"
_STATE = ".quant_state.bitsandbytes__"
# Entries about quantizing and rounding of inputs; the tensors determine the weights.
_HARMLESS = """
    _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type
    bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
    llm_int8_skip_modules llm_int8_threshold load_in_4bit load_in_8bit quant_method
"""
_RECIPROCAL = np.float32(7.874015718698502e-3)
"""1 / 127, as in `int8_vectorwise_dequant`."""


class Blocks(NamedTuple):
    """A flattened matrix (n, k) in blocks of `size` values that share a scale.

    `nested`: map, scales, block size and offset for scales that are indices; None for floats.
    """

    weight: Tensor
    absmax: Tensor
    shape: tuple[int, int]
    size: int
    nested: tuple[Tensor, Tensor, int, np.float32] | None

    def values(self, start: int, stop: int) -> np.ndarray:
        """The indices of some rows, uint8 (rows, k)."""
        k = self.shape[1]
        first, last = start * k, stop * k
        data = self.weight.array().view(np.uint8).reshape(-1)[first // 2 : -(-last // 2)]
        pairs = np.stack([data >> np.uint8(4), data & np.uint8(15)], axis=-1).reshape(-1)
        return pairs[first % 2 : first % 2 + last - first].reshape(-1, k)

    def scales(self, start: int, stop: int, group: int) -> np.ndarray:
        """The scales of some rows, in groups that divide k and the block, float32 (rows,
        groups)."""
        k = self.shape[1]
        starts = np.arange(start, stop)[:, None] * k + np.arange(0, k, group)
        blocks = starts // self.size
        found = self.absmax.array()[blocks]
        if self.nested is not None:
            table, factors, size, offset = self.nested
            found = table.array()[found] * factors.array()[blocks // size] + offset
        return scales(self.absmax, found)


def read(folder: Folder, config: Fields) -> Found:
    config.expect_rest(*_HARMLESS.split())
    matrices = []
    for name in folder.tensors:
        if _STATE in name:
            matrices.append(_four_bits(folder, name))
        elif name.endswith(".SCB"):
            matrices.append(_eight_bits(folder, name.removesuffix(".SCB")))
    return Found(matrices)


def _eight_bits(folder: Folder, module: str) -> Matrix:
    weight, scale = (folder.need(f"{module}.{name}", module) for name in ("weight", "SCB"))
    weight.check(("I8",), weight.shape)
    scale.check(("F32",), weight.shape[:1])
    found = scaled(
        weight.name,
        "bitsandbytes int8",
        weight,
        scale,
        rows=1,
        columns=-1,
        convert=lambda values: values * _RECIPROCAL,
    )
    layout = folder.tensors.get(f"{module}.weight_format")
    if layout is None:
        return found
    if layout.check(("U8",), (), (1,)).array().item() != 0:
        raise ValueError(
            f"{layout.where} is {layout.array().item()}, but it must be 0, for rows; {OTHER}."
        )
    return dataclasses.replace(found, tensors=(*found.tensors, layout))


def _four_bits(folder: Folder, state: str) -> Matrix:
    name, _, kind = state.partition(_STATE)
    blocks, tensors = _blocks(folder, name, folder.tensors[state])
    table = folder.need(f"{name}.quant_map", state).check(("F32",), (16,))
    if kind not in ("nf4", "fp4"):
        raise ValueError(
            f"{tensors[1].where} has the type {kind!r}, but it must be 'nf4' or 'fp4'; {OTHER}."
        )
    k = blocks.shape[1]
    group = math.gcd(k, blocks.size)
    size = -1 if group == k else group

    def unpack(start: int, stop: int) -> Unpacked:
        return Unpacked(blocks.values(start, stop), blocks.scales(start, stop, group), None)

    def floats(start: int, stop: int) -> np.ndarray:
        numbers = table.array()[blocks.values(start, stop)]
        return numbers * np.repeat(blocks.scales(start, stop, group), group, axis=1)

    found = Matrix(
        name,
        f"bitsandbytes {kind}",
        (*tensors, table),
        blocks.shape,
        None,
        unpack,
        floats,
        f"its blocks of {blocks.size} values begin inside rows of {k} inputs",
    )
    codebook = _codebook(table, kind)
    if size != -1 and size % 16:
        return found
    return dataclasses.replace(found, format=Format(4, size, codebook=codebook))


def _blocks(folder: Folder, name: str, packed: Tensor) -> tuple[Blocks, tuple[Tensor, ...]]:
    """The blocks of a 4-bit weight with a quantization state, and the tensors that they are read
    from."""
    state = Fields(packed.file, _state(packed))
    weight, absmax = folder.need(name, packed.name), folder.need(f"{name}.absmax", packed.name)
    match state.need("shape", "a list"):
        case [int(n), int(k)] if n >= 1 and k >= 1:
            pass
        case shape:
            raise ValueError(
                f"{packed.where} has the shape {brief(shape)}, but it must be a matrix; {OTHER}."
            )
    size = _size(state, packed, "blocksize")
    if not 0 <= weight.nbytes - -(-n * k // 2) < weight.dtype.itemsize:
        raise ValueError(
            f"{weight.where} has {weight.nbytes} bytes, but {n} x {k} values take half a byte "
            f"each; {AGAIN}."
        )
    count = -(-n * k // size)
    nested = "nested_blocksize" in state.values
    absmax.check(("U8",) if nested else ("F32", "F16", "BF16"), (count,))
    tensors = (weight, packed, absmax)
    if not nested:
        return Blocks(weight, absmax, (n, k), size, None), tensors
    table, factors = (
        folder.need(f"{name}.nested_{last}", packed.name) for last in ("quant_map", "absmax")
    )
    own = _size(state, packed, "nested_blocksize")
    table.check(("F32",), (256,))
    factors.check(("F32",), (-(-count // own),))
    offset = np.float32(state.need("nested_offset", "a number"))
    blocks = Blocks(weight, absmax, (n, k), size, (table, factors, own, offset))
    return blocks, (*tensors, table, factors)


def _state(packed: Tensor) -> dict[str, Any]:
    """The JSON object stored in a tensor of bytes."""
    text = packed.check(("U8",), (packed.nbytes,)).array().tobytes()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # from JSON and from UTF-8
        raise ValueError(f"{packed.where} is no JSON ({error}); {AGAIN}.") from None
    if not isinstance(found, dict):
        raise ValueError(
            f"{packed.where} contains {brief(found)}, but it must be an object; {AGAIN}."
        )
    return found


def _size(state: Fields, packed: Tensor, key: str) -> int:
    size = state.need(key, "an integer")
    if size < 1:
        raise ValueError(f"{packed.where} has {key!r} {size}, but it must be positive; {AGAIN}.")
    return size


def _codebook(table: Tensor, kind: str) -> str | tuple[float, ...]:
    """The name of a table of 16 numbers in a tensor, or the numbers if it has no name."""
    numbers = np.array(table.array())
    if (numbers == np.array(CODEBOOKS[kind].values, np.float32)).all():
        return kind
    try:
        return tuple(Format(4, codebook=numbers.tolist()).values)
    except ValueError as error:
        raise ValueError(f"{table.where}: {error}") from None
