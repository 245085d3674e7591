"""MLX: affine integers of 2 to 8 bits, MXFP4, MXFP8 and NVFP4, as written by mlx-lm.

config.json has `quantization`, with entries for single modules, and a copy of it without
`quant_method`. A module has `weight`, uint32 words with a little-endian bit stream, `scales` and,
if affine, `biases`: a weight is `scale * q + bias` (`mlx.core.quantize`).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..._core.format import Format
from .. import _bits
from .._fields import Fields
from .._files import AGAIN, FLOATS, Folder, Tensor
from .._matrix import Found, Matrix
from .._packing import Unpacked
from .._scaled import four_bit_floats, scaled, scales

METHODS = ("mlx",)
SUMMARY = "affine integers of 2, 3, 4, 5, 6 and 8 bits, mxfp4, mxfp8 and nvfp4"
# Group sizes and bits of each mode, the default first.
_MODES = {
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "mxfp8": ((32,), (8,)),
    "nvfp4": ((16,), (4,)),
}


class Layout(NamedTuple):
    mode: str
    size: int
    bits: int


def configured(folder: Folder) -> tuple[Path, Mapping[str, Any]] | None:
    values = folder.config.get("quantization")
    if isinstance(values, dict) and "group_size" in values:
        return folder.path / "config.json", values
    return None


def read(folder: Folder, config: Fields) -> Found:
    whole = _layout(config)
    own = {
        name: Fields(config.path, value) if isinstance(value, dict) else value
        for name, value in config.values.items()
        if isinstance(value, dict | bool)
    }
    config.read |= own.keys()
    config.expect_rest("quant_method")
    matrices = []
    for name in folder.tensors:
        module = name.removesuffix(".scales")
        if module == name:
            continue
        entry = own.get(module, True)
        if entry is False:
            raise ValueError(
                f"{folder.tensors[name].where} scales a module that by {config.path} stays floats; "
                f"{AGAIN}."
            )
        layout = whole
        if isinstance(entry, Fields):
            layout = _layout(entry)
            entry.expect_rest()
        matrices.append(_matrix(folder, module, layout))
    for name, entry in own.items():
        if isinstance(entry, Fields):
            folder.need(f"{name}.scales", name)
    return Found(matrices)


def _layout(entries: Fields) -> Layout:
    mode = entries.expect("mode", "affine", *_MODES)
    sizes, widths = _MODES[mode]
    size = entries.expect("group_size", sizes[0], *sizes)
    return Layout(mode, size, entries.expect("bits", widths[0], *widths))


def _matrix(folder: Folder, module: str, layout: Layout) -> Matrix:
    weight, scale = (folder.need(f"{module}.{name}", module) for name in ("weight", "scales"))
    size, bits = layout.size, layout.bits
    if not 2 <= len(weight.shape) <= 3:
        raise ValueError(
            f"{weight.where} has shape {weight.shape}, but it must be a matrix or a stack of "
            f"matrices; {AGAIN}."
        )
    *lead, n, _ = weight.shape
    k = size * (scale.shape[-1] if scale.shape else 0)
    weight.check(("U32",), (*lead, n, k * bits // 32))
    affine = layout.mode == "affine"
    scale.check(FLOATS if affine else ("U8",), (*lead, n, k // size))
    rows = n * lead[0] if lead else n
    weight = weight._replace(shape=(rows, k * bits // 32))
    scale = scale._replace(shape=(rows, k // size))
    kind = f"MLX {layout.mode}"
    if affine:
        bias = folder.need(f"{module}.biases", module)
        bias.check((scale.kind,), (*lead, n, k // size))
        found = _affine(module, layout, weight, scale, bias._replace(shape=(rows, k // size)))
    elif layout.mode == "mxfp8":
        floats = weight._replace(kind="F8_E4M3", shape=(rows, k))
        found = scaled(weight.name, kind, floats, scale, rows=1, columns=size)
    else:
        floats = weight._replace(kind="U8", shape=(rows, k // 2))
        own = scale._replace(kind="F8_E4M3" if layout.mode == "nvfp4" else "F8_E8M0")
        found = four_bit_floats(weight.name, kind, floats, own)
    return dataclasses.replace(found, shape=(n, k), stack=lead[0]) if lead else found


def _affine(module: str, layout: Layout, weight: Tensor, scale: Tensor, bias: Tensor) -> Matrix:
    k = scale.shape[1] * layout.size

    def unpack(start: int, stop: int) -> Unpacked:
        return Unpacked(
            _bits.fields(weight.array()[start:stop], layout.bits, k),
            scales(scale, scale.array()[start:stop]),
            scales(bias, bias.array()[start:stop]),
        )

    return Matrix(
        weight.name,
        f"MLX affine, {layout.bits} bits",
        (weight, scale, bias),
        (weight.shape[0], k),
        Format(layout.bits, layout.size, zero="float"),
        unpack,
    )
