"""Commands for model files: `quantize`, `convert`, `inspect` and `verify`."""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from .._core.array import QuantizedArray
from .._core.checks import brief
from .._core.format import format_name, parse_format
from .._flax.report import aligned, size_words
from .._matmul.api import quantized_matmul
from ..checkpoint._files import read_folder
from ..checkpoint._load import open_folder
from ..checkpoint._replace import check_target
from ..checkpoint._saved import hashes_of, is_saved, read_saved
from . import console, exporting
from .command import add_rounding, as_command, calibration_of, formats_of
from .gguf_file import open_gguf
from .language_model import LanguageModel, export, load, open_file, save

KINDS = ("packed", *exporting.KINDS)
Run = Callable[[argparse.Namespace], None]


def add_quantize(parser: argparse.ArgumentParser) -> Run:
    _add_paths(parser)
    name = (
        "format of all matrices, such as int4-g64, 4 bits with a scale for 64 inputs (jaxlowbit "
        "info lists formats); or a JSON file from jaxlowbit plan"
    )
    parser.add_argument("--format", required=True, help=name)
    rules = (
        "format of matrices whose names match, such as 'embedding|head=int8' or down=float; names "
        "are embedding, head and layers.N.{q,k,v,o,gate,up,down}; may be repeated"
    )
    parser.add_argument("--rule", action="append", default=[], metavar="REGEX=FORMAT", help=rules)
    add_rounding(parser)
    _add_writing(parser)
    return as_command(_quantize)


def add_convert(parser: argparse.ArgumentParser) -> Run:
    _add_paths(parser)
    _add_writing(parser)
    return as_command(_convert)


def add_inspect(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("path", metavar="PATH", help=console.MODEL)
    _add_json(parser)
    return _inspect


def add_verify(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("path", metavar="PATH", help="a folder that quantize or convert wrote")
    _add_json(parser)
    return as_command(_verify)


def _add_paths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help=console.MODEL)
    parser.add_argument("target", metavar="DST", help="the folder or GGUF file to write")


def _add_writing(parser: argparse.ArgumentParser) -> None:
    kinds = (
        "kind of DST: a folder of packed weights for jaxlowbit (packed, the default), a GGUF file "
        "for llama.cpp, or a folder of compressed-tensors for transformers and vLLM"
    )
    parser.add_argument("--to", choices=KINDS, default="packed", help=kinds)
    dtypes = ("float32", "bfloat16", "float16")
    scales = "dtype of scales and zeros; --to gguf needs float16"
    parser.add_argument("--scale-dtype", choices=dtypes, help=scales)
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists")
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print results as a last line of JSON")


# --- quantize and convert -------------------------------------------------------------------------


def _quantize(options: argparse.Namespace) -> None:
    rules = [_rule(text) for text in options.rule]
    formats = formats_of(options.format, rules)
    calibration = calibration_of(options, sys.stderr.isatty())
    rounding = {"quantizer": options.quantizer, "calibration": calibration}
    _write(options, **formats, **rounding)


def _rule(text: str) -> tuple[str, Any]:
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise ValueError(f"--rule {text} is not REGEX=FORMAT, such as 'embedding|head=int8'.")
    return pattern, None if name == "float" else parse_format(name)


def _convert(options: argparse.Namespace) -> None:
    _write(options)


def _write(options: argparse.Namespace, **rounding: Any) -> None:
    """Loads SRC, writes DST, and prints the report."""
    target, progress = Path(options.target), sys.stderr.isatty()
    check_output(target, options.overwrite)
    header = open_file(options.source)
    dtype = _float_dtype(header)
    model = load(
        header, dtype=dtype, scale_dtype=options.scale_dtype, progress=progress, **rounding
    )
    writing = {"overwrite": options.overwrite, "progress": progress}
    if options.to == "packed":
        save(model, target, **writing)
    else:
        export(model, target, options.to, **writing)
    _print_report(options, model, target)


def check_output(target: Path, overwrite: bool) -> None:
    """`check_target` for a command with the option `--overwrite`."""
    try:
        check_target("jaxlowbit", target, overwrite)
    except ValueError as error:
        raise ValueError(str(error).replace("pass overwrite=True", "pass --overwrite")) from None


def _float_dtype(header: Any) -> Any:
    """The dtype that represents all floats of a file, so that float matrices do not change."""
    kinds = {source.kind.lower() for source in header.sources.values() if source.format is None}
    names = {"f16": "float16", "float16": "float16", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    matrices = {names[kind] for kind in kinds if kind in names}
    return matrices.pop() if len(matrices) == 1 else jnp.float32


def _print_report(options: argparse.Namespace, model: LanguageModel, target: Path) -> None:
    written = _nbytes(target)
    print(model.report)
    print(f"{target}: {size_words(written)}")
    if options.json:
        tensors = [
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "stored": tensor.stored,
                "format": None if tensor.format is None else format_name(tensor.format),
            }
            for tensor in model.report.tensors
        ]
        found = {"target": str(target), "kind": options.to, "bytes": written, "tensors": tensors}
        console.print_json(found)


def _nbytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


# --- inspect --------------------------------------------------------------------------------------


def _inspect(options: argparse.Namespace) -> None:
    path = Path(options.path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name a GGUF file or a folder.")
    kind, rows = _contents(path)
    table = [("tensors", "number", "shape", "stored", "size")]
    groups: dict[tuple[str, ...], list[int]] = {}
    for name, shape, stored, nbytes in rows:
        key = (re.sub(r"\.\d+\.", ".*.", name), " x ".join(map(str, shape)), stored)
        groups.setdefault(key, []).append(nbytes)
    for (name, shape, stored), sizes in groups.items():
        table.append((name, str(len(sizes)), shape, stored, size_words(sum(sizes))))
    total = sum(nbytes for *_, nbytes in rows)
    table.append(("all", str(len(rows)), "", "", size_words(total)))
    print(f"{path}: {kind}")
    print("\n".join(aligned(table)))
    if options.json:
        names = ("name", "shape", "stored", "bytes")
        tensors = [dict(zip(names, row, strict=True)) for row in rows]
        console.print_json({"path": str(path), "kind": kind, "tensors": tensors})


def _contents(path: Path) -> tuple[str, list[tuple[str, tuple[int, ...], str, int]]]:
    """The kind of a file or folder, and name, shape, type and size of its tensors."""
    if not path.is_dir():
        file = open_gguf(path)
        found = [(t.name, t.shape, t.kind, t.nbytes) for t in file.tensors.values()]
        return f"GGUF, {file.metadata.get('general.architecture', 'no architecture')}", found
    if is_saved(read_folder(path)):
        saved, rows = read_saved(path), []
        for name in saved.arrays:
            leaf = saved.leaf(name)
            quantized = isinstance(leaf, QuantizedArray)
            stored = format_name(leaf.format) if quantized else str(leaf.dtype)
            rows.append((name, tuple(leaf.shape), stored, saved.nbytes(name)))
        return "packed", rows
    contents = open_folder(path)
    rows = []
    for name, matrix in contents.matrices.items():
        format = "no format" if matrix.format is None else format_name(matrix.format)
        shape = matrix.shape if matrix.stack is None else (matrix.stack, *matrix.shape)
        rows.append((name, shape, f"{matrix.kind}, {format}", matrix.nbytes))
    rows += [(t.name, t.shape, t.kind, t.nbytes) for t in contents.floats.values()]
    kinds = dict.fromkeys(matrix.kind for matrix in contents.matrices.values())
    return ", ".join(kinds) or "floats", rows


# --- verify ---------------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> None:
    path = Path(options.path)
    saved = read_saved(path)
    total = sum(tensor.nbytes for tensor in saved.tensors.values())
    hidden = not sys.stderr.isatty()
    with tqdm(total=total, desc="hashes", unit="B", unit_scale=True, disable=hidden) as bar:
        for _, nbytes in hashes_of(saved):
            bar.update(nbytes)
    errors = {}
    for name in tqdm(saved.descriptions, desc="products", disable=hidden):
        errors[name] = _error(name, saved.leaf(name), path)
    largest = max(errors.values(), default=0.0)
    print(f"{path}: {len(saved.sha256)} tensors have the hashes that were saved")
    print(f"{len(errors)} quantized matrices multiply as their floats, within {largest:.1e}")
    if options.json:
        found = {"path": str(path), "tensors": len(saved.sha256), "errors": errors}
        console.print_json(found)


_BOUND = 1e-5
_CHANNELS = 4  # atoms of output channels in a self-test


def _error(name: str, array: QuantizedArray, path: Path) -> float:
    """The error of a product with the first channels of a matrix, relative to the sum of
    magnitudes.

    **Raises:** `ValueError` for nonfinite scales, and for a larger error.
    """
    one: Any = jax.tree.map(lambda leaf: leaf[(0,) * (array.ndim - 2)], array)
    if one.shards == (1, 1):
        one = _columns(one)
    one = jax.tree.map(jnp.asarray, one)
    weight = np.asarray(one.dequantize(jnp.float32)).astype(np.float64)
    if not np.isfinite(weight).all():
        raise ValueError(f"{path}: the array {name!r} has weights that are NaN or infinite.")
    lhs = np.random.default_rng(0).normal(size=(2, one.k)).astype(np.float32)
    exact, bound = lhs @ weight, np.abs(lhs) @ np.abs(weight)
    found = np.asarray(quantized_matmul(jnp.asarray(lhs), one)).astype(np.float64)
    error = float((np.abs(found - exact) / np.maximum(bound, 1e-30)).max(initial=0))
    if not error <= _BOUND:
        raise ValueError(
            f"{path}: products by the array {name!r} differ from its floats by {error:.1e} of the "
            f"sum of magnitudes, but at most {_BOUND:.0e} is rounding; report {brief(one)}."
        )
    return error


def _columns(array: QuantizedArray) -> QuantizedArray:
    """The first channels of a matrix, in whole atoms."""
    n = min(array.n, 64 * _CHANNELS)
    fields: dict[str, Any] = {
        part: None if (leaf := getattr(array, part)) is None else leaf[:_CHANNELS]
        for part in ("packed", "scale", "zero")
    }
    if array.format.scales_channels:
        fields["tensor_scale"] = array.tensor_scale[:n]  # type: ignore[index]
    return array._with(**fields, n=n, whole=None)
