"""Matrices in 8-bit floats of Hugging Face folders, with their scales.

A weight is its number times the scale of its block, of its output channel or of its matrix. Two
`quant_method`s of config.json have them:

- `fp8`: blocks, `X.weight_scale_inv` (README_WEIGHTS.md of DeepSeek-V3, FineGrainedFP8Config of
  transformers);
- `compressed-tensors`: blocks, channels or matrices, `X.weight_scale` (its format
  `float-quantized`).
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._core.array import QuantizedArray
from .._core.checks import brief
from .._core.format import SCALES, Format
from ..checkpoint import _packing as packing
from ..checkpoint._fields import Fields
from ..checkpoint._files import AGAIN, FLOATS, Tensor

KIND = "F8_E4M3"
"""The type of the matrices."""
_OTHER = "use the folder of the model's floats, or a GGUF file"
_CLASSES = ("Linear", "Embedding")


class Layout(NamedTuple):
    """What shares a scale: `"tensor"`, `"channel"`, or a `"block"` of so many rows (out) and
    columns (in)."""

    strategy: str
    block: tuple[int, int] | None = None

    def rows(self, n: int) -> int:
        """How many rows of n have a scale in common."""
        if self.block is not None:
            return self.block[0]
        return 1 if self.strategy == "channel" else n

    def shapes(self, n: int, k: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scales of a matrix (n, k) may have."""
        if self.block is not None:
            return ((-(-n // self.block[0]), -(-k // self.block[1])),)
        return ((n, 1),) if self.strategy == "channel" else ((), (1,))


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The 8-bit floats of a folder, by its config.json.

    - `scale`: the last component of the names of scales.
    - `groups`: layouts with the names of the modules that have them, the first that fits counts.
    - `floats`: names of modules that stay floats.
    - `left_out`: sentences on scales of activations or of a cache, which are not read.

    A name is the name of a module, `"re:"` and a regular expression, or a class.
    """

    path: Path
    scale: str
    groups: tuple[tuple[tuple[str, ...], Layout], ...]
    floats: tuple[str, ...]
    left_out: tuple[str, ...]

    def layout_of(self, module: str, *, embedding: bool = False) -> Layout | None:
        """The layout of the scales of a module, None if it stays floats."""

        def listed(names: tuple[str, ...]) -> bool:
            return any(_named(module, name, embedding) for name in names)

        if listed(self.floats):
            return None
        return next((layout for names, layout in self.groups if listed(names)), None)

    def has_scale(self, tensor: str) -> bool:
        """Whether a tensor holds the scales of another, by its name."""
        return tensor.endswith(f".{self.scale}")

    def leaves_out(self, tensor: str) -> bool:
        """Whether a tensor is a static scale of activations or of the cache, by its name."""
        return re.search(r"\.(input_scale|activation_scale|[qkv]_scale)$", tensor) is not None

    def check_scales(self, scales: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        """Refuses scales that belong to no matrix of 8-bit floats.

        **Raises:** `ValueError`.
        """
        for name, scale in scales.items():
            weight = f"{name.removesuffix(self.scale)}weight"
            kind = tensors[weight].kind if weight in tensors else "missing"
            if kind != KIND:
                raise ValueError(
                    f"{scale.file}: tensor {name!r} scales {weight!r}, which is {kind} and not "
                    f"{KIND}; {AGAIN}."
                )

    def matrix(self, weight: Tensor, scales: dict[str, Tensor], *, embedding: bool) -> "Matrix":
        """A matrix with its scales.

        **Arguments:** `scales`: all of the folder, by name; `embedding`: whether the matrix is the
        embedding table.

        **Raises:** `ValueError` if config.json has none for it, and for scales that are missing,
        of another type or shape.
        """
        module, where = weight.name.removesuffix(".weight"), f"{weight.file}: tensor"
        layout = self.layout_of(module, embedding=embedding)
        if layout is None:
            raise ValueError(
                f"{where} {weight.name!r} is {KIND}, but by config.json {module!r} stays floats, "
                f"so that nothing scales it; {AGAIN}."
            )
        name = f"{module}.{self.scale}"
        scale = scales.get(name)
        if scale is None:
            raise ValueError(
                f"{where} {weight.name!r} is {KIND}, but {name!r} is missing; {AGAIN}."
            )
        shapes = layout.shapes(*weight.shape)
        if scale.shape not in shapes or scale.kind not in (*FLOATS, "F8_E8M0"):
            size = f" of {layout.block[0]} x {layout.block[1]}" if layout.block else ""
            raise ValueError(
                f"{scale.file}: tensor {name!r} is {scale.kind} of shape {scale.shape}, but by "
                f"config.json {weight.name!r} of shape {weight.shape} has a scale for each "
                f"{layout.strategy}{size}, floats of shape {' or '.join(map(str, shapes))}; "
                f"{AGAIN}."
            )
        return Matrix(weight, scale, layout)


class Matrix(NamedTuple):
    """A matrix (out, in) of 8-bit floats with its scales."""

    weight: Tensor
    scale: Tensor
    layout: Layout

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes

    @property
    def format(self) -> Format:
        """The format that holds it exactly: every column of a block has its scale."""
        narrow = next((name for name, x in SCALES.items() if x == self.scale.dtype), None)
        size = -1 if self.layout.block is None else self.layout.block[1]
        return Format(8, size, codebook="e4m3").replace(scale=narrow)

    def unpack(self, start: int, stop: int) -> packing.Unpacked:
        """Bits and scales of some rows.

        **Raises:** `ValueError` for numbers that are NaN, and for scales that are not finite.
        """
        bits = self.weight.rows(start, stop).view(np.uint8)
        if (wrong := bits & 127 == 127).any():
            row, column = (int(x) for x in np.argwhere(wrong)[0])
            raise ValueError(
                f"{int(wrong.sum())} numbers are NaN, the first in row {start + row} and column "
                f"{column}; the file is damaged, {AGAIN}."
            )
        numbers = np.arange(start, stop) // self.layout.rows(self.weight.shape[0])
        scale = self.scale.rows(numbers[0], numbers[-1] + 1)
        if not (finite := np.isfinite(scale.astype(np.float32))).all():
            raise ValueError(
                f"its scales {self.scale.name!r} have {int((~finite).sum())} that are NaN or "
                f"infinite; the file is damaged, {AGAIN}."
            )
        return packing.Unpacked(bits, scale[numbers - numbers[0]], None)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The float32 weights (count, k) of some rows."""
        return packing.dequantized(self.unpack(start, stop), self.format)

    def pack(self, scale_dtype: Any = None) -> QuantizedArray:
        """The packed matrix (in, out); `scale_dtype` rounds its scales."""
        return packing.pack_rows(self.unpack, self.weight.shape, self.format, scale_dtype)


def scheme_of(path: Path, values: Mapping[str, Any]) -> Scheme | None:
    """The 8-bit floats of a folder with these entries of config.json; None if it has floats.

    **Raises:** `ValueError` for weights that are quantized otherwise.
    """
    known = Fields(path, values)
    config = known.get("quantization_config", "an object")
    if config is None:
        text = known.get("text_config", "an object") or {}
        config = Fields(path, text).get("quantization_config", "an object")
    if not config:
        return None
    entries = Fields(path, config)
    method = entries.get("quant_method", "a string")
    readers = {"fp8": _blocks_scheme, "compressed-tensors": _compressed_scheme}
    if method not in readers:
        raise ValueError(
            f"{path}: 'quant_method' is {method!r}, but of quantized folders those in 8-bit floats "
            f"are read, {' and '.join(map(repr, readers))}; {_OTHER}."
        )
    return readers[method](entries)


def _blocks_scheme(entries: Fields) -> Scheme:
    path = entries.path
    _expect(entries, "fmt", "e4m3", "e4m3")
    _expect(entries, "activation_scheme", "dynamic", "dynamic", "static")
    layout = Layout("block", _block(entries, "weight_block_size"))
    names = [
        name
        for key in ("modules_to_not_convert", "ignored_layers")
        for name in _names(entries, key)
    ]
    # A name includes the modules inside, and may lack the names of the modules around it.
    floats = tuple(rf"re:(.*\.)?{re.escape(name)}(\.|$)" for name in names)
    static = entries.values.get("activation_scheme") == "static"
    _check_rest(entries, "dequantize", "scale_fmt")
    return Scheme(
        path, "weight_scale_inv", ((_CLASSES, layout),), floats, _static(path, static, False)
    )


def _compressed_scheme(entries: Fields) -> Scheme:
    path = entries.path
    listed = Fields(path, entries.need("config_groups", "an object"))
    groups, static = [], False
    cache = entries.get("kv_cache_scheme", "an object") is not None
    for name in listed.values:
        own = Fields(path, listed.need(name, "an object"))
        _expect(own, "format", entries.values.get("format"), "float-quantized", "naive-quantized")
        weights = Fields(path, own.need("weights", "an object"))
        _expect(weights, "type", None, "float")
        _expect(weights, "num_bits", None, 8)
        _expect(weights, "symmetric", True, True)
        _expect(weights, "strategy", None, "tensor", "channel", "block")
        strategy = weights.values["strategy"]
        block = _block(weights, "block_structure") if strategy == "block" else None
        groups.append((tuple(_names(own, "targets")), Layout(strategy, block)))
        inputs = own.get("input_activations", "an object") or {}
        static |= bool(inputs) and not inputs.get("dynamic")
        cache |= bool(own.get("output_activations", "an object"))
        _check_rest(weights, "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
        _check_rest(own)
    entries.read.add("format")
    sparsity = Fields(path, entries.get("sparsity_config", "an object") or {})
    _expect(sparsity, "format", "dense", "dense")
    floats = tuple(_names(entries, "ignore"))
    _check_rest(
        entries, "global_compression_ratio", "quantization_status", "run_compressed", "version"
    )
    return Scheme(path, "weight_scale", tuple(groups), floats, _static(path, static, cache))


def _static(path: Path, activations: bool, cache: bool) -> tuple[str, ...]:
    """Sentences on scales that are not read."""
    found = []
    if activations:
        found.append(
            f"{path} has static scales of activations, which are left out: here activations stay "
            "floats, or get a scale for each token with activation_dtype=jnp.float8_e4m3fn."
        )
    if cache:
        found.append(
            f"{path} has scales of a cache in 8 bits, or of results, which are left out: here both "
            "are floats."
        )
    return tuple(found)


def _expect(entries: Fields, key: str, default: Any, *values: Any) -> None:
    """Refuses an entry that has none of some values."""
    entries.read.add(key)
    found = entries.values.get(key)
    found = default if found is None else found
    if found not in values:
        raise ValueError(
            f"{entries.path}: {key!r} is {found!r}, but of weights in 8-bit floats those of "
            f"{' or '.join(map(repr, values))} are read; {_OTHER}."
        )


def _check_rest(entries: Fields, *harmless: str) -> None:
    """Checks that the entries that were not read, nor are harmless, turn nothing on.

    **Raises:** `ValueError`.
    """
    for name, value in entries.values.items():
        if name not in entries.read and name not in harmless and value:
            raise ValueError(
                f"{entries.path}: {name!r} is {brief(value)}, an entry of weights in 8-bit floats "
                f"that is not known here; {_OTHER}."
            )


def _block(entries: Fields, key: str) -> tuple[int, int]:
    """The rows and columns of a block."""
    entries.read.add(key)
    match entries.values.get(key):
        case [int(rows), int(columns)] if rows >= 1 and columns >= 1 and columns % 16 == 0:
            return rows, columns
        case found:
            raise ValueError(
                f"{entries.path}: {key!r} is {found!r}, but blocks are read of a number of rows "
                f"and a multiple of 16 columns, such as [128, 128]; {_OTHER}."
            )


def _names(entries: Fields, key: str) -> list[str]:
    """A list of names of modules, whose regular expressions compile."""
    found = entries.get(key, "a list", [])
    for name in found:
        try:
            if not isinstance(name, str):
                raise ValueError(f"{name!r} is no string")
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except (re.error, ValueError) as error:
            raise ValueError(
                f"{entries.path}: {key!r} is {found!r}, but {error}; {AGAIN}."
            ) from None
    return found


def _named(module: str, name: str, embedding: bool) -> bool:
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    if name in _CLASSES:
        return embedding == (name == "Embedding")
    return module == name
