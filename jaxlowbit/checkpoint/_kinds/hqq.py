"""HQQ: integers with float zeros, as written by `HQQLinear.state_dict` of hqq.

A module has `W_q`, `scale`, `zero` and its options (`nbits`, `group_size`, `shape`, `axis`) as
tensors. With `axis` 1, weights `(q - zero) * scale` are reshaped to (groups, group_size). The rows
of that matrix are split into 8 / `nbits` equal parts, the first in the highest bits of the bytes of
`W_q`; with 3 bits, into ten parts of 32-bit words (`hqq/core/bitpack.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..._core.format import Format
from .._fields import OTHER, Fields
from .._files import AGAIN, FLOATS, Folder, Tensor
from .._matrix import Found, Matrix
from .._packing import Unpacked
from .._scaled import scales

METHODS = ("hqq",)
SUMMARY = "HQQ of 1, 2, 3, 4 and 8 bits with axis 1; axis 0 with requantize="
_OPTIONS = """
    axis channel_wise compute_dtype encoded_state_dict group_size nbits offload_meta optimize
    packing quant_scale quant_zero round_zero shape stores_quant_config unpack_view_dtype
    view_as_float
"""
_PARTS = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}


class Groups(NamedTuple):
    """The groups of a matrix (n, k): `axis` 1 for rows of (groups, `size`), 0 for columns of
    (`size`, groups)."""

    data: Tensor
    scale: Tensor
    zero: Tensor
    shape: tuple[int, int]
    bits: int
    size: int
    axis: int

    @property
    def num_groups(self) -> int:
        return self.shape[0] * self.shape[1] // self.size

    @property
    def rows(self) -> int:
        """The rows of the reshaped matrix."""
        return self.num_groups if self.axis else self.size

    def values(self, rows: np.ndarray) -> np.ndarray:
        """The integers of some rows of the reshaped matrix, uint8."""
        parts = _PARTS[self.bits]
        step = -(-self.rows // parts)
        words = self.data.array().reshape(-1).view(np.int32 if self.bits == 3 else np.uint8)
        words = words.reshape(step, -1)
        shift = ((parts - 1 - rows // step) * self.bits).astype(words.dtype)
        found = words[rows % step] >> shift[:, None] & (2**self.bits - 1)
        return found.astype(np.uint8)

    def scale_and_zero(self) -> tuple[np.ndarray, np.ndarray]:
        """One scale, and one zero in units of it, for each group, float32."""
        scale, zero = (
            scales(tensor, tensor.array().astype(np.float32).reshape(-1))
            for tensor in (self.scale, self.zero)
        )
        return scale, np.broadcast_to(zero, scale.shape)


def configured(folder: Folder) -> tuple[Path, Mapping[str, Any]] | None:
    """`save_to_safetensors` of hqq does not write a quantization config."""
    if any(name.endswith(".W_q") for name in folder.tensors):
        return folder.path / "config.json", {}
    return None


def read(folder: Folder, config: Fields) -> Found:
    # The options stored with each module take precedence over these.
    config.expect_rest("quant_config", "quant_method", "skip_modules")
    suffix = ".W_q"
    names = [name.removesuffix(suffix) for name in folder.tensors if name.endswith(suffix)]
    return Found([_matrix(folder, module) for module in names])


def _matrix(folder: Folder, module: str) -> Matrix:
    groups = _groups(folder, module)
    options = [folder.tensors.get(f"{module}.{name}") for name in _OPTIONS.split()]
    tensors = (groups.data, groups.scale, groups.zero, *(x for x in options if x is not None))
    k = groups.shape[1]
    size = groups.size
    kind = f"HQQ of {groups.bits} bits"

    def unpack(start: int, stop: int) -> Unpacked:
        per_row = k // size
        first, last = start * per_row, stop * per_row
        scale, zero = (x[first:last].reshape(-1, per_row) for x in groups.scale_and_zero())
        values = groups.values(np.arange(first, last)).reshape(-1, k)
        return Unpacked(values, scale, -zero * scale)

    def floats(start: int, stop: int) -> np.ndarray:
        scale, zero = groups.scale_and_zero()
        places = np.arange(start * k, stop * k)
        if groups.axis:
            rows, group = np.unique(places // size, return_inverse=True)
            values, own = groups.values(rows)[group, places % size], places // size
        else:
            rows, row = np.unique(places // groups.num_groups, return_inverse=True)
            values, own = (
                groups.values(rows)[row, places % groups.num_groups],
                places % groups.num_groups,
            )
        return ((values - zero[own]) * scale[own]).reshape(-1, k)

    name = f"{module}.weight"
    if groups.axis == 0:
        reason = "its groups run along the outputs (axis=0), but along the inputs (axis=1) here"
    elif k % size or (size % 16 and size != k):
        reason = f"its groups of {size} do not divide {k} inputs into multiples of 16"
    else:
        format = Format(groups.bits, -1 if size == k else size, zero="float")
        return Matrix(name, kind, tensors, groups.shape, format, unpack)
    return Matrix(name, kind, tensors, groups.shape, None, floats=floats, reason=reason)


def _groups(folder: Folder, module: str) -> Groups:
    data, scale, zero = (folder.need(f"{module}.{x}", module) for x in ("W_q", "scale", "zero"))
    bits, size, axis = (
        _option(folder.need(f"{module}.{x}", module)) for x in ("nbits", "group_size", "axis")
    )
    form = folder.need(f"{module}.shape", module)
    shape = tuple(int(x) for x in form.check(("I64", "I32"), (2,)).array())
    for name in ("quant_scale", "quant_zero"):
        nested = folder.tensors.get(f"{module}.{name}")
        if nested is not None and _option(nested):
            raise ValueError(
                f"{nested.where} is {_option(nested)}, but scales and zeros are read that are not "
                f"quantized themselves; {OTHER}."
            )
    packing = folder.tensors.get(f"{module}.packing")
    expected = f"{bits}bit_{'32' if bits == 3 else 'u8'}"
    found = expected if packing is None else packing.array().tobytes().decode("ascii", "replace")
    if bits not in _PARTS or axis not in (0, 1) or found != expected:
        raise ValueError(
            f"{data.where} has {bits} bits, axis {axis} and packing {found!r}, but "
            f"{', '.join(map(str, _PARTS))} bits with axis 0 or 1 and the packing of the library "
            f"are read; {OTHER}."
        )
    if min(shape) < 1 or size < 1 or shape[0] * shape[1] % size:
        raise ValueError(
            f"{data.where} has the shape {shape} and groups of {size}, which do not divide it; "
            f"{AGAIN}."
        )
    groups = Groups(data, scale, zero, (shape[0], shape[1]), bits, size, axis)
    step = -(-groups.rows // _PARTS[bits])
    expected_bytes = step * (size if axis else groups.num_groups) * (4 if bits == 3 else 1)
    if data.nbytes != expected_bytes or (bits != 3 and groups.rows % _PARTS[bits]):
        raise ValueError(
            f"{data.where} has {data.nbytes} bytes, but {shape[0]} x {shape[1]} values of {bits} "
            f"bits in groups of {size} have {expected_bytes}; {AGAIN}."
        )
    per_group = (groups.num_groups, 1) if axis else (1, groups.num_groups)
    scale.check(FLOATS, per_group)
    zero.check(FLOATS, per_group, (), (1,), (1, 1))
    return groups


def _option(tensor: Tensor) -> int:
    """The only element of an integer tensor."""
    return int(tensor.check(("I32", "I64", "U8"), (), (1,)).array().reshape(()))
