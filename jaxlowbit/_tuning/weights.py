"""The weights to measure: from shapes, from a checkpoint, or from a tree with quantized arrays."""

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._backends import registry
from .._core import layout
from .._core.array import QuantizedArray
from .._core.checks import brief
from .._core.dtypes import FLOATS
from .._core.format import Format
from .._core.heads import HEADS, is_router

_EMBEDDING = re.compile(r"embed|(^|\.)(wte|wpe)$", re.IGNORECASE)
# Names of dtypes in headers of safetensors.
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "U8": "uint8", "U32": "uint32"}


class Weight(NamedTuple):
    """A (k, n) weight: the properties that determine the time of a product. Sizes may be padded."""

    n: int
    k: int
    format: Format
    scale: str  # dtype


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


def add_arguments(
    parser: argparse.ArgumentParser, formats: Sequence[str], tokens: Sequence[int]
) -> None:
    """Adds the arguments for the weights and rows of a command, with these defaults."""
    path = "a safetensors file, or a folder of them, with the weights to look at"
    parser.add_argument("checkpoint", nargs="?", metavar="PATH", help=path)
    shapes = "shapes of weights, outputs x inputs, instead of PATH"
    parser.add_argument("--shapes", nargs="+", metavar="NxK", help=shapes)
    rows = f"numbers of rows of activations ({' '.join(map(str, tokens))})"
    parser.add_argument("--tokens", nargs="+", type=int, default=tokens, metavar="M", help=rows)
    default = f" ({' '.join(formats)})" if formats else ""
    words = f"formats of weights, such as int4-g64{default}"
    parser.add_argument("--format", nargs="+", default=formats, metavar="FORMAT", help=words)


def check_tokens(tokens: Any) -> list[int]:
    """Returns distinct numbers of rows in ascending order.

    **Raises:** `TypeError` for other types than lists, `ValueError` for numbers out of range.
    """
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes):
        raise TypeError(
            f"tune: tokens is {brief(tokens)}, but it must be a list of numbers of rows, such as "
            "[1, 16, 256]."
        )
    for m in tokens:
        if type(m) is not int or not 0 < m <= 1 << 20:
            raise ValueError(f"tune: {brief(m)} is no number of tokens; name some from 1 to 2^20.")
    if not tokens:
        raise ValueError("tune: there are no numbers of tokens; name some, such as 1 16 256.")
    return sorted(set(tokens))


Reason = Callable[[Format, str], str | None]
"""Returns the reason why a format, with lhs of a dtype, is left out, or None."""


def unread(format: Format, dtype: str) -> str | None:
    """Returns None if the kernels for lhs of `dtype` read a format, else the reason."""
    return registry.unsupported("cuda", jnp.dtype(dtype), format, built=False)


def untuned(format: Format, dtype: str) -> str | None:
    """Returns None if there are tables of choices for a format, else the reason."""
    if format.codebook is not None or format.scale is not None:
        return (
            "tables are for integers with scales of 16 or 32 bits; for other formats the cost "
            "model chooses"
        )
    return unread(format, dtype)


def find(
    source: Any, formats: Sequence[Format], dtype: str, *, excluded: Reason = unread
) -> list[Weight]:
    """The distinct weights in the arguments of `tune`.

    A weight that is not quantized yet occurs once in each of `formats`. Weights are left out if
    `excluded` returns a reason against their format.

    **Raises:** `ValueError` if none remain, for formats that are left out, and for invalid shapes.
    """
    for format in formats:
        if reason := excluded(format, dtype):
            raise ValueError(f"tune: there is nothing to choose for {format}: {reason}.")
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        found = _of_headers(_headers(path), formats)
        where = f"{path} has no quantized arrays and no linear weights, 2-D floats whose names "
        where += "end in weight (n, k) or kernel (k, n); name shapes instead"
    elif _are_shapes(source):
        found = [Weight(*_shape(shape), format, dtype) for shape in source for format in formats]
        where = "there are no shapes; name some as 14336x4096"
    else:
        found = _of_tree(source)
        where = "the model has no quantized arrays; quantize it first, or name shapes"
    distinct = list(dict.fromkeys(found))
    if not distinct:
        raise ValueError(f"tune: {where}.")
    reasons = [excluded(weight.format, dtype) for weight in distinct]
    if all(reasons):
        raise ValueError(f"tune: there is nothing to choose for these weights: {reasons[0]}.")
    return [weight for weight, reason in zip(distinct, reasons, strict=True) if not reason]


def _are_shapes(source: Any) -> bool:
    def is_shape(item: Any) -> bool:
        pair = isinstance(item, tuple) and len(item) == 2 and all(type(i) is int for i in item)
        return isinstance(item, str) or pair

    return isinstance(source, list | tuple) and all(map(is_shape, source))


def _shape(shape: Any) -> tuple[int, int]:
    """The n and k of a shape."""
    if isinstance(shape, str) and (found := re.fullmatch(r"(\d+)x(\d+)", shape)):
        shape = int(found[1]), int(found[2])
    match shape:
        case (int(n), int(k)) if 0 < n < 1 << 30 and 0 < k < 1 << 30:
            return n, k
    raise ValueError(
        f"tune: {shape!r} is no shape; name output channels and input features, both positive and "
        "below 2^30, as 14336x4096."
    )


def _of_tree(tree: Any) -> Iterator[Weight]:
    headers = {}
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray)
    )
    for path, leaf in leaves:
        if isinstance(leaf, QuantizedArray):
            k, n = leaf.padded_shape
            yield Weight(n, k, leaf.format, str(leaf.scale.dtype))
        elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            headers[name] = _Header(leaf.shape, str(leaf.dtype))
    yield from _quantized(headers)


def _of_headers(headers: Mapping[str, _Header], formats: Sequence[Format]) -> Iterator[Weight]:
    yield from _quantized(headers)
    for name, (shape, dtype) in headers.items():
        layer, _, kind = name.rpartition(".")
        if kind not in ("weight", "kernel") or len(shape) != 2 or dtype not in map(str, FLOATS):
            continue
        n, k = shape if kind == "weight" else reversed(shape)
        if re.search(HEADS, layer) or _EMBEDDING.search(layer) or is_router(layer, k, n):
            continue  # kept in floats, as by quantize_model
        yield from (Weight(n, k, format, dtype) for format in formats)


_PACKED = re.compile(r"(.*(?:^|[./]))packed([./].*)?")


def _quantized(headers: Mapping[str, _Header]) -> Iterator[Weight]:
    """Finds quantized arrays by the names of their leaves, which share a prefix."""
    for name, (shape, dtype) in headers.items():
        if not (found := _PACKED.fullmatch(name)) or dtype != "uint32" or len(shape) < 3:
            continue
        prefix, suffix = found[1], found[2] or ""
        scale, zero = (headers.get(f"{prefix}{leaf}{suffix}") for leaf in ("scale", "zero"))
        if scale is None or len(scale.shape) < 3 or scale.dtype not in map(str, FLOATS):
            continue
        n_blocks, k_blocks, words = shape[-3:]
        k = k_blocks * layout.ATOM
        zeros = "none" if zero is None else "integer" if zero.dtype == "uint8" else "float"
        bits = words * 32 // layout.ATOM**2
        format = Format(bits, _group_size(k, scale.shape[-2]), zeros)
        yield Weight(n_blocks * layout.ATOM, k, format, scale.dtype)


def _group_size(k: int, groups: int) -> int:
    """The smallest group size, a multiple of 16, that gives this number of groups along k."""
    return -1 if groups == 1 else -(-k // groups // 16) * 16


# --- safetensors ----------------------------------------------------------------------------------


def _headers(path: Path) -> dict[str, _Header]:
    """Shapes and dtypes of all tensors in a file, or in the files of a folder; reads no values."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "tune: reading a checkpoint needs safetensors; pip install safetensors, or name shapes."
        ) from error
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(
            f"tune: {path} is no checkpoint; name a .safetensors file or a folder of them."
        )
    headers = {}
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_slice(name)
                dtype = _DTYPES.get(tensor.get_dtype(), "")
                headers[name] = _Header(tuple(tensor.get_shape()), dtype)
    return headers
