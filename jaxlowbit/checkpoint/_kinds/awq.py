"""AWQ: AutoAWQ's layouts `gemm`, `gemv` and `gemv_fast`, of 4 bits.

The layouts were read from AutoAWQ's `gemm.py`, `gemv.py`, `gemv_fast.py` and `packing_utils.py`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import _bits, _scaled
from .._fields import OTHER, Fields
from .._files import AGAIN, FLOATS, Folder, read_json
from .._matrix import Found, Matrix
from .._packing import Unpacked
from .gptq import HARMLESS, group_size, grouped, is_symmetric, modules

METHODS = ("awq",)
SUMMARY = "AWQ of 4 bits (gemm, gemv, gemv_fast)"
# Column j is in the nibble _COLUMNS[j] of its word.
_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)
_INTEGERS = ("I32", "U32")
_BITS = 4


def configured(folder: Folder) -> tuple[Path, Mapping[str, Any]] | None:
    """Older folders have only quant_config.json."""
    path = folder.path / "quant_config.json"
    if not path.exists():
        return None
    values = read_json(path)
    return (path, values) if "w_bit" in values else None


def read(folder: Folder, config: Fields) -> Found:
    for key in ("bits", "w_bit"):
        if key in config.values:
            config.expect(key, _BITS, _BITS)
    if "q_group_size" in config.values:
        config.names = {"group_size": "q_group_size"}
    size = group_size(config)
    version = config.get("version", "a string", config.get("format", "a string", "gemm")).lower()
    if version not in _LAYOUTS:
        raise ValueError(
            f"{config.path}: 'version' is {version!r}, but {', '.join(_LAYOUTS)} of AWQ are read; "
            f"{OTHER}."
        )
    config.read |= {"format", "checkpoint_format", "zero_point"}
    config.expect("pack_dtype", "int32", "int32")
    config.expect("backend", "autoawq", "autoawq", "auto")
    config.expect_rest(*HARMLESS, "do_fuse", "fuse_max_seq_len", "modules_to_fuse")
    return Found(
        [_LAYOUTS[version](folder, module, size, "AWQ") for module in modules(folder, "qweight")]
    )


def gemm(folder: Folder, module: str, size: int, kind: str) -> Matrix:
    """A matrix whose words are packed along the output, input first."""
    names = ("qweight", "qzeros", "scales")
    qweight, qzeros, scales = (folder.need(f"{module}.{name}", module) for name in names)
    _, n = two_axes(scales.where, scales.shape)
    k, _ = two_axes(qweight.where, qweight.shape)
    size = k if size == -1 else size
    qweight.check(_INTEGERS, (k, n // 8))
    qzeros.check(_INTEGERS, (-(-k // size), n // 8))
    scales.check(FLOATS, (-(-k // size), n // 8 * 8))
    symmetric = is_symmetric(qzeros, _columns, _BITS)

    def part(words: np.ndarray, start: int, stop: int) -> np.ndarray:
        first = start // 8
        found = _columns(words[:, first : -(-stop // 8)])
        return np.ascontiguousarray(found[:, start - 8 * first : stop - 8 * first].T)

    def unpack(start: int, stop: int) -> Unpacked:
        return Unpacked(
            part(qweight.array(), start, stop),
            _scaled.scales(scales, scales.array()[:, start:stop].T),
            None if symmetric else part(qzeros.array(), start, stop),
        )

    format = grouped(qweight, _BITS, size, k, symmetric)
    return Matrix(f"{module}.weight", kind, (qweight, qzeros, scales), (n, k), format, unpack)


def _gemv(folder: Folder, module: str, size: int, kind: str) -> Matrix:
    """A matrix with words packed along the input, and padded zeros and scales."""
    names = ("qweight", "qzeros", "scales")
    qweight, qzeros, scales = (folder.need(f"{module}.{name}", module) for name in names)
    n, words = two_axes(qweight.where, qweight.shape)
    k = 8 * words
    size = k if size == -1 else size
    groups, width = -(-k // size), two_axes(qzeros.where, qzeros.shape)[1]
    _check_width(qzeros.where, width, groups)
    qweight.check(_INTEGERS, (n, words))
    qzeros.check(_INTEGERS, (n, width))
    scales.check(FLOATS, (n, 8 * width))

    def zeros(words: np.ndarray) -> np.ndarray:
        return _bits.fields(words, _BITS, groups)

    symmetric = is_symmetric(qzeros, zeros, _BITS)

    def unpack(start: int, stop: int) -> Unpacked:
        return Unpacked(
            _bits.fields(qweight.array()[start:stop], _BITS, k),
            _scaled.scales(scales, scales.array()[start:stop, :groups]),
            None if symmetric else zeros(qzeros.array()[start:stop]),
        )

    format = grouped(qweight, _BITS, size, k, symmetric)
    return Matrix(f"{module}.weight", kind, (qweight, qzeros, scales), (n, k), format, unpack)


def _gemv_fast(folder: Folder, module: str, size: int, kind: str) -> Matrix:
    """A matrix with four rows in each 16-bit word, and float zeros, -scale * zero."""
    names = ("qweight", "qzeros", "scales")
    qweight, qzeros, scales = (folder.need(f"{module}.{name}", module) for name in names)
    quarter, k = two_axes(qweight.where, qweight.shape)
    n, size = 4 * quarter, k if size == -1 else size
    groups, rows = -(-k // size), two_axes(scales.where, scales.shape)[0]
    _check_width(scales.where, rows / 8, groups)
    if k % 64:
        raise ValueError(
            f"{qweight.where} has {k} inputs, but they must be a multiple of 64; {AGAIN}."
        )
    qweight.check(("I16", "U16"), (quarter, k))
    scales.check(("F16", "BF16"), (rows, n))
    qzeros.check((scales.kind,), (rows, n))

    def unpack(start: int, stop: int) -> Unpacked:
        first = start // 4
        words = np.ascontiguousarray(qweight.array()[first : -(-stop // 4)])
        # 64 words are four blocks of 16 words, one per row; see pack_intweight in AutoAWQ.
        values = _bits.fields(words, _BITS, 4 * k).reshape(-1, k // 64, 4, 64)
        values = values.transpose(0, 2, 1, 3).reshape(-1, k // 32, 4, 2, 4)
        values = values.transpose(0, 1, 2, 4, 3).reshape(-1, k // 32, 4, 4, 2)
        values = values.transpose(0, 1, 3, 2, 4).reshape(-1, k)
        return Unpacked(
            np.ascontiguousarray(values[start - 4 * first : stop - 4 * first]),
            _scaled.scales(scales, scales.array()[:groups, start:stop].T),
            _scaled.scales(qzeros, qzeros.array()[:groups, start:stop].T),
        )

    format = grouped(qweight, _BITS, size, k, False).replace(zero="float")
    return Matrix(f"{module}.weight", kind, (qweight, qzeros, scales), (n, k), format, unpack)


_LAYOUTS: Mapping[str, Callable[[Folder, str, int, str], Matrix]] = {
    "gemm": gemm,
    "gemv": _gemv,
    "gemv_fast": _gemv_fast,
}


def two_axes(where: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """The sizes of a matrix.

    **Raises:** `ValueError` for another number of axes, and for an axis without elements.
    """
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{where} is of shape {shape}, but it has two axes; {AGAIN}.")
    return shape[0], shape[1]


def _columns(words: np.ndarray) -> np.ndarray:
    """The values (rows, columns) of words (rows, columns / 8)."""
    found = _bits.fields(words, _BITS, 8 * words.shape[1])
    return found.reshape(len(words), -1, 8)[..., list(_COLUMNS)].reshape(len(words), -1)


def _check_width(where: str, width: float, groups: int) -> None:
    """Raises unless `width` words of 8 values contain the groups and at most 4 words of padding."""
    least = -(-groups // 8)
    if not least <= width <= least + 3:
        raise ValueError(
            f"{where} has {int(8 * width)} groups, but by the group size there are {groups}, and "
            f"padding; {AGAIN}."
        )
