"""`read`: a model file to a configuration, packed weights, a tokenizer and a report."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from .._core.array import QuantizedArray
from .._core.checks import boolean, brief, compute_dtype
from .._core.format import Format, as_format, format_name
from .._core.layout import ATOM
from .._core.sharding import placed
from .._flax.report import aligned, backend_of, format_words, size_words
from .._matmul.quantized_lhs import EXACT
from ..checkpoint import _packing as packing
from ..checkpoint._matrix import Matrix
from ..checkpoint._saved import Transfers
from ..quantizers import _registry as quantizers
from ..quantizers._calibration import Calibration
from . import ggml_types, gguf, huggingface, memory, saved
from .calibration import Rounding, Source, calibrated, tokens_of
from .config import Config, is_matrix
from .expert_tensors import stored_shape
from .folder import check_folder
from .sharding import Division
from .tokenizer import Tokenizer

TWO_LEVELS = "two_level"
"""The `scale_dtype` that preserves two-level scales; also their name in a `Format`."""

Rules = Mapping[str, Format | str | None] | Sequence[tuple[str, Format | str | None]]


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """The report of one weight.

    - `name`: our name, such as `layers.0.q`.
    - `stored`: the type in the file.
    - `shape`: (in, out) of a matrix.
    - `format`: None if it stayed floats.
    - `lhs_qtype`: dtype of its rounded inputs, or None.
    - `nbytes_stored`, `nbytes`: bytes in the file, and in memory with scales.
    - `backend`: the backend of its products on this machine, with the reason if not a kernel.
    """

    name: str
    stored: str
    shape: tuple[int, ...]
    format: Format | None
    nbytes_stored: int
    nbytes: int
    backend: str
    lhs_qtype: Any = None


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """The report of `read`: `tensors`; prints as a table by kind."""

    tensors: tuple[TensorReport, ...]

    @property
    def nbytes_stored(self) -> int:
        return sum(tensor.nbytes_stored for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __str__(self) -> str:
        rows = [("weights", "number", "shape", "stored", "in memory", "file", "memory", "backend")]
        kinds: dict[tuple[str, ...], list[TensorReport]] = {}
        for tensor in self.tensors:
            kind = re.sub(r"^layers\.\d+\.", "layers.*.", tensor.name)
            shape = " x ".join(map(str, tensor.shape))
            words = format_words(tensor.format, tensor.lhs_qtype)
            words = "floats" if tensor.format is None else words
            key = (kind, shape, tensor.stored, words, tensor.backend)
            kinds.setdefault(key, []).append(tensor)
        for (kind, shape, stored, words, backend), found in kinds.items():
            before = size_words(sum(tensor.nbytes_stored for tensor in found))
            after = size_words(sum(tensor.nbytes for tensor in found))
            rows.append((kind, str(len(found)), shape, stored, words, before, after, backend))
        totals = (size_words(self.nbytes_stored), size_words(self.nbytes))
        rows.append(("all", str(len(self.tensors)), "", "", "", *totals, ""))
        return "\n".join(aligned(rows))

    __repr__ = __str__


class Checkpoint(NamedTuple):
    """The contents of a model file.

    - `config`: configuration of the decoder.
    - `weights`: by the names of `config.shapes()`. Every matrix is (in, out), a `QuantizedArray` or
      floats, and multiplies from the right; embedding and head are (width, vocabulary). Norm scales
      and biases are float32 (n,).
    - `tokenizer`: text to tokens and back.
    - `report`: how each tensor was read; prints as a table.
    """

    config: Config
    weights: dict[str, QuantizedArray | Array]
    tokenizer: Tokenizer | None
    report: LoadReport


class _Source(NamedTuple):
    """A tensor of a GGUF file or a folder.

    `rows(start, stop)` returns rows as floats. A quantized matrix has a `format`, and
    `pack(scale_dtype)` packs it without rounding; both are None for floats. For a folder of packed
    weights, `packed(dtype)` returns the weight without a copy, floats in `dtype`. A stack of
    experts has a source for each in `experts`. Its `whole` is the matrix of the rows of all
    experts, if they are one tensor and each expert is whole atoms; else None.
    """

    where: str
    kind: str
    nbytes: int
    rows: Callable[[int, int], np.ndarray]
    format: Format | None
    pack: Callable[[Any], QuantizedArray] | None
    forget: Callable[[], None]
    packed: Callable[[Any], Any] | None = None
    experts: tuple["_Source", ...] = ()
    whole: Any = None


class Header(NamedTuple):
    """A model file with a checked header, whose weights have not been read yet.

    - `config`, `tokenizer`: as in a `Checkpoint`.
    - `sources`: the tensor of each weight.
    """

    path: Path
    config: Config
    tokenizer: Tokenizer | None
    sources: dict[str, _Source]


def read_header(path: str | os.PathLike[str]) -> Header:
    """Reads and checks a model file except its weights; raises the errors of `read` for it."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"load: path is {brief(path)}, but it must be the path of a .gguf file, or of the "
            "folder of a Hugging Face model."
        )
    given, path = os.fspath(path), Path(path)
    if not given or not path.exists():
        raise FileNotFoundError(
            f"load: {given or 'the empty path'} does not exist; name a .gguf file, or the folder "
            "of a Hugging Face model that is on this machine."
        )
    if saved.is_model(path):
        return _saved(path)
    config, sources, tokenizer = _folder(path) if path.is_dir() else _file(path)
    # A tokenizer may have tokens without a row in the table; they raise only in a prompt.
    known = range(config.vocabulary)
    ends = tuple(dict.fromkeys([*config.eos, *(end for end in tokenizer.eos if end in known)]))
    bos = tokenizer.bos if tokenizer.bos in known else config.bos
    return Header(path, config.replace(eos=ends, bos=bos), tokenizer, sources)


def read(
    path: str | os.PathLike[str] | Header,
    *,
    format: Format | str | None = None,
    rules: Rules | None = None,
    quantizer: Any = None,
    calibration: Any = None,
    dtype: Any = jnp.bfloat16,
    lhs_qtype: Any = None,
    scale_dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    progress: bool = True,
) -> Checkpoint:
    """Reads a model from a GGUF file or a Hugging Face folder, quantized or not.

    Quantized weights are packed without rounding: `dequantize(jnp.float32)` equals, bit for bit,
    the weights of ggml or of the library that quantized the folder. The whole header is checked
    before any weight is read. Weights are unpacked in strips of one tensor at a time, so loading
    takes the memory of the packed weights and one tensor.

    **Arguments:**

    - `path`: a `.gguf` file, or a folder with `config.json`, `tokenizer.json` and
      `model.safetensors` or shards with their index; or its `Header`.
    - `format`: format of every matrix, including embedding, head and matrices with another format
      in the file. None preserves quantized weights, and floats become `dtype`.
    - `rules`: formats for some matrices, by regular expressions that are searched (`re.search`) in
      the names of `Config.shapes`, as a mapping or pairs. The first match decides; None leaves a
      matrix as in the file.
    - `quantizer`: as for `jaxlowbit.quantize`, for matrices that `format` and `rules` round.
    - `calibration`: as for `load`.
    - `dtype`: float32, bfloat16 or float16, for float matrices, and for the activations that the
      report assumes.
    - `lhs_qtype`: as for `Decoder`; for the report.
    - `scale_dtype`: dtype of scales and float zeros. None preserves the scales of quantized weights
      exactly: in float16, in float32 for ggml's K types and IQ4_XS, and in the dtype of a folder;
      newly computed scales have `dtype`. `"two_level"` stores the scales of the K types and IQ4_XS
      in two levels, as in the file, which takes less memory and, except for small M on Hopper, more
      time. Other dtypes round the stored scales. Formats with 8-bit scales are unaffected.
    - `mesh`: the devices of the weights, sharded as for a `Decoder`; None for one device.
    - `progress`: whether to show a bar on standard error.

    **Returns:** a `Checkpoint`.

    **Warns:** of entries of the files that are not used and may have an effect.

    **Raises:** before any weight is read: `FileNotFoundError` if the path does not exist, and
    `ValueError` for a damaged file, an unknown architecture, type or tokenizer, an entry that turns
    on a feature that the decoder lacks, tensors that are missing, unknown or of another shape,
    rules that match no matrix, a quantizer that is unknown, does not support a format or has
    nothing to round, and sizes that the number of devices does not divide; `TypeError` for an
    invalid rule or format. Afterwards `ValueError` for nonfinite weights, and the errors of
    `jaxlowbit.quantize`. Each names the tensor or key, and the way out.

    ```python
    checkpoint = read("SmolLM2-135M-Instruct.Q4_1.gguf")
    print(checkpoint.report)
    read("Llama-3.1-8B-Instruct", format=INT4, rules={"embedding|head": INT8})
    ```
    """
    dtype = compute_dtype("load", "dtype", dtype)
    if scale_dtype is not None and scale_dtype != TWO_LEVELS:
        scale_dtype = compute_dtype("load", "scale_dtype", scale_dtype)
    format = None if format is None else as_format("load", format)
    boolean("load", "progress", progress)
    path, config, tokenizer, sources = path if isinstance(path, Header) else read_header(path)
    shapes = config.shapes()
    formats = _formats(format, rules, list(config.matrices()))
    _check_quantizer(quantizer, [found for found in formats.values() if found is not None])
    _check_exact(sources, formats)
    quantizers.check_calibration("load", quantizer, calibration is not None)
    if calibration is not None:
        calibration = Calibration.of("load", calibration, progress=progress)
        windows = tokens_of(calibration, config, tokenizer)
        calibration = Calibration(windows, folder=calibration.folder, progress=calibration.progress)
    found = {name: formats.get(name) or source.format for name, source in sources.items()}
    division = None if mesh is None else Division.of("load", config, mesh, found)
    memory.check_weights("load", shapes, found, dtype, mesh)
    reading = _Reading(sources, shapes, dtype, scale_dtype, quantizer)
    if calibration is None:
        found_weights = ((name, reading.weight(name, formats.get(name))) for name in sources)
    else:
        source = Source(config, reading.floats, lambda name: reading.weight(name, None))
        wide = dtype if scale_dtype in (None, TWO_LEVELS) else scale_dtype
        rounding = Rounding(formats, quantizer, wide, dtype)
        key = {"model": _identity(path), "formats": formats, "quantizer": str(quantizer)}
        key |= {"dtype": dtype, "scale_dtype": scale_dtype}
        found_weights = calibrated(source, rounding, calibration, key)
    weights: dict[str, QuantizedArray | Array] = {}
    reports, transfers = [], Transfers()
    total = sum(source.nbytes for source in sources.values())
    hidden = not progress or calibration is not None
    bar = tqdm(total=total, desc=path.name, unit="B", unit_scale=True, disable=hidden)
    with bar:
        for name, weight in found_weights:
            bar.update(sources[name].nbytes)
            moved = placed(weight) if division is None else division.place(name, weight)
            weights[name] = transfers.add(moved)
            reports.append(_report(name, sources[name], weight, dtype, lhs_qtype))
    return Checkpoint(config, weights, tokenizer, LoadReport(tuple(reports)))


class _Reading(NamedTuple):
    """Reads the weights of a file by name, each once, and releases them."""

    sources: Mapping[str, _Source]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: Any
    scale_dtype: Any
    quantizer: Any

    def weight(self, name: str, format: Format | None) -> QuantizedArray | Array:
        """A weight, rounded to a format, or as in the file for None."""
        options = self.dtype, self.scale_dtype, self.quantizer
        shape = self.shapes[name]
        if not is_matrix(name):
            return self._read(name, lambda source: _vector(name, shape, source))
        return self._read(name, lambda source: _weight(shape, source, format, *options))

    def floats(self, name: str) -> Array:
        """A weight in float32."""
        shape = self.shapes[name]
        if not is_matrix(name):
            return jnp.asarray(self.weight(name, None))
        return self._read(name, lambda source: _floats(shape, source, jnp.float32))

    def _read(self, name: str, read: Callable[[_Source], Any]) -> Any:
        source = self.sources[name]
        weight = _named(source, read)
        source.forget()
        return weight


def _named(source: _Source, read: Callable[[_Source], Any]) -> Any:
    """Returns `read(source)`; errors name the tensor, in a stack the tensor of the expert."""
    try:
        return read(source)
    except ValueError as error:
        text = str(error).removeprefix("quantize: ")
        if not any(text.startswith(f"{expert.where} (") for expert in source.experts):
            text = f"{source.where} ({source.kind}): {text}"
        raise ValueError(text) from None


def floats_of(header: Header) -> Source:
    """The weights of a model in float32, to be read one by one."""
    reading = _Reading(header.sources, header.config.shapes(), jnp.float32, None, None)
    return Source(header.config, reading.floats, lambda name: reading.weight(name, None))


def _identity(path: Path) -> list[Any]:
    """The name, size and time of each file of a model."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [(file, file.stat()) for file in files if file.is_file()]
    return [(file.name, stat.st_size, stat.st_mtime_ns) for file, stat in found]


def _file(path: Path) -> tuple[Config, dict[str, _Source], Tokenizer]:
    file = gguf.open_gguf(path)
    config = gguf.config_of(file)
    sources = {}
    for name, found in gguf.weights_of(file, config).items():
        if isinstance(found, list):
            sources[name] = _stack([_of_gguf(file, tensor) for tensor in found])
            whole = gguf.whole(found)
            if whole is not None and found[0].shape[0] % ATOM == 0:
                sources[name] = sources[name]._replace(whole=_of_gguf(file, whole))
        else:
            sources[name] = _of_gguf(file, found)
    return config, sources, Tokenizer.from_gguf(file)


def _of_gguf(file: gguf.File, tensor: gguf.Tensor) -> _Source:
    kind, stored = tensor.kind, file.rows(tensor)
    unit = gguf.tensor_scale(file, tensor) if kind == "NVFP4" else 1.0
    found = _Source(
        file.where(tensor),
        kind,
        tensor.nbytes,
        rows=lambda start, stop: stored[start:stop],
        format=None,
        pack=None,
        forget=lambda: file.forget(tensor),
    )
    if kind not in ggml_types.TYPES:
        return found
    return found._replace(
        rows=lambda start, stop: ggml_types.floats(kind, stored[start:stop], unit),
        format=ggml_types.TYPES[kind].format,
        pack=lambda scale_dtype: ggml_types.pack(kind, stored, scale_dtype, unit),
    )


def _saved(path: Path) -> Header:
    """A folder written by `save`, whose weights are used without packing."""
    found = saved.read_model(path)
    sources = {}
    for name, leaf in found.weights.items():
        where, nbytes = f"{path}: the array {name!r}", found.saved.nbytes(name)
        source = _of_saved(leaf, where, nbytes)
        if is_matrix(name) and leaf.ndim == 3:
            experts = (_of_saved(leaf[i], where, 0) for i in range(leaf.shape[0]))
            source = source._replace(experts=tuple(experts))
        sources[name] = source
    return Header(path, found.config, found.tokenizer, sources)


def _of_saved(leaf: Any, where: str, nbytes: int) -> _Source:
    quantized = isinstance(leaf, QuantizedArray)
    return _Source(
        where,
        format_name(leaf.format) if quantized else str(leaf.dtype),
        nbytes,
        rows=functools.partial(saved.rows, leaf),
        format=leaf.format if quantized else None,
        pack=None,
        forget=lambda: None,
        packed=functools.partial(saved.in_dtype, leaf),
    )


def _folder(path: Path) -> tuple[Config, dict[str, _Source], Tokenizer]:
    check_folder(path)
    config = huggingface.config_of(path)
    sources = {}
    for name, found in huggingface.weights_of(path, config).items():
        if isinstance(found, list):
            sources[name] = _stack([_of_folder(part) for part in found])
        else:
            sources[name] = _of_folder(found)
    return config, sources, Tokenizer.from_folder(path)


def _of_folder(found: Any) -> _Source:
    matrix = found if isinstance(found, Matrix) else None
    return _Source(
        found.where,
        found.kind,
        found.nbytes,
        rows=found.rows,
        format=None if matrix is None else matrix.format,
        pack=None if matrix is None else matrix.pack,
        forget=lambda: None,
    )


def _stack(experts: Sequence[_Source]) -> _Source:
    """The source of a stack of experts.

    **Raises:** `ValueError` for experts that are stored in several ways.
    """
    kinds = {(source.kind, source.format): source for source in experts}
    if len(kinds) > 1:
        one, other = list(kinds.values())[:2]
        raise ValueError(
            f"{one.where} is {one.kind} and {other.where} is {other.kind}, but the experts of a "
            "layer are one stack; convert the model with one type for them."
        )

    def forget() -> None:
        for source in experts:
            source.forget()

    nbytes = sum(source.nbytes for source in experts)
    return experts[0]._replace(nbytes=nbytes, forget=forget, experts=tuple(experts))


def _check_exact(sources: Mapping[str, _Source], formats: Mapping[str, Format | None]) -> None:
    """Raises for quantized matrices without an exact format, unless they are rounded to another
    one."""
    inexact = [
        source
        for name, source in sources.items()
        if source.pack is not None
        and source.format is None
        and formats.get(name) is None
        and is_matrix(name)
    ]
    if inexact:
        raise ValueError(
            f"{inexact[0].where} ({inexact[0].kind}) and {len(inexact) - 1} others are held by no "
            "format exactly; pass format= or rules=, which round them."
        )


def _vector(name: str, shape: tuple[int, ...], source: _Source) -> Array:
    """A norm, biases or a router, in float32."""
    if source.packed is not None:
        return source.packed(jnp.float32)
    stored = stored_shape(name, shape)
    count = stored[0] if len(stored) > 1 else 1
    values = np.asarray(source.rows(0, count)).astype(np.float32).reshape(stored)
    _check_finite(values)
    return jnp.asarray(values if name.endswith("_bias") else values.T)


def _weight(
    shape: tuple[int, ...],
    source: _Source,
    format: Format | None,
    dtype: Any,
    scale_dtype: Any,
    quantizer: Any,
) -> QuantizedArray | Array:
    """A matrix, or a stack of experts."""
    if source.packed is not None and format is None:
        if scale_dtype is not None:
            raise ValueError(
                "its scales are packed; leave scale_dtype out, or pass format= to round it again."
            )
        return source.packed(dtype)
    if source.experts:
        count, k, n = shape
        options = format, dtype, scale_dtype, quantizer
        rounded = format or source.format
        if source.whole is not None and rounded is not None and not rounded.has_tensor_scale:
            return _divided(_weight((k, count * n), source.whole, *options), count)
        found = [_named(x, lambda x: _weight((k, n), x, *options)) for x in source.experts]
        return _stacked(found)
    two_levels = scale_dtype == TWO_LEVELS
    scale_dtype = None if two_levels else scale_dtype
    if format is None and source.pack is not None:
        in_file = source.format is not None and source.format.scale == TWO_LEVELS
        wide = in_file and not two_levels and scale_dtype is None
        return source.pack(jnp.dtype("float32") if wide else scale_dtype)
    k, n = shape
    if format is not None:
        return packing.quantize_rows(source.rows, (n, k), format, scale_dtype or dtype, quantizer)
    return _floats(shape, source, dtype)


def _divided(array: Any, count: int) -> QuantizedArray:
    """A matrix (k, count * n) as a stack of `count` matrices with its columns."""

    def parts(leaf: Array | None) -> Array | None:
        return None if leaf is None else leaf.reshape(count, -1, *leaf.shape[1:])

    return dataclasses.replace(
        array,
        **{name: parts(getattr(array, name)) for name in ("packed", "scale", "zero")},
        version=jnp.broadcast_to(array.version, (count,)),
        n=array.n // count,
    )


def _stacked(experts: Sequence[QuantizedArray | Array]) -> QuantizedArray | Array:
    """The weights of experts as one stack.

    **Raises:** `ValueError` if their packed arrays differ, such as in a permutation of rows.
    """
    kinds = {(jax.tree.structure(expert), str(expert.dtype)) for expert in experts}
    if len(kinds) > 1:
        raise ValueError(
            "its experts are packed in several ways, such as with and without an order of rows; "
            "pass format=, which rounds them to one."
        )
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *experts)


def _floats(shape: tuple[int, ...], source: _Source, dtype: Any) -> Array:
    """A matrix, or a stack of experts, in a float dtype."""
    if source.experts:
        found = [_named(x, lambda x: _floats(shape[1:], x, dtype)) for x in source.experts]
        return jnp.stack(found)
    k, n = shape

    def checked(start: int, stop: int) -> np.ndarray:
        values = source.rows(start, stop)
        _check_finite(values)
        return values

    return packing.transposed_rows(checked, (n, k), dtype)


def _check_finite(values: np.ndarray) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        raise ValueError(
            f"{values.size - int(finite.sum())} values are NaN or infinite; the file is damaged, "
            "fetch it again."
        )


def _report(
    name: str,
    source: _Source,
    weight: QuantizedArray | Array,
    dtype: Any,
    lhs_qtype: Any,
) -> TensorReport:
    quantized = isinstance(weight, QuantizedArray)
    if not quantized or not name.startswith("layers."):
        lhs_qtype = None
    return TensorReport(
        name,
        source.kind,
        tuple(weight.shape),
        weight.format if quantized else None,
        source.nbytes,
        weight.nbytes,
        backend_of(dtype if lhs_qtype is None else EXACT, weight) if quantized else "floats",
        lhs_qtype,
    )


def _check_quantizer(quantizer: Any, formats: Sequence[Format]) -> None:
    """Raises for an invalid quantizer for these formats, or a quantizer without a format."""
    quantizers.check("load", quantizer)
    if quantizer is not None and not formats:
        raise ValueError(
            f"load: quantizer is {brief(quantizer)}, but no weight is rounded; pass format= or "
            "rules= too, or leave it out."
        )
    for format in dict.fromkeys(formats):
        quantizers.find("load", quantizer, format, {} if format.scale else {"scale_dtype": None})


def _formats(
    format: Format | None, rules: Rules | None, matrices: Sequence[str]
) -> dict[str, Format | None]:
    """The format that each matrix is rounded to; None to leave it as in the file."""
    if not isinstance(rules, Mapping | list | tuple | None):
        raise TypeError(
            f"load: rules is {brief(rules)}, but it must be a mapping from regular expressions on "
            "the names of weights to formats, or None."
        )
    compiled = []
    for rule in list((rules or {}).items() if isinstance(rules, Mapping) else rules or ()):
        match rule:
            case (str(pattern), None | str() | Format()):
                pass
            case _:
                raise TypeError(
                    f"load: {brief(rule)} is no rule; a rule is a regular expression on the name "
                    "of a weight with a Format or its name, or with None to leave it as it is."
                )
        try:
            found_format = None if rule[1] is None else as_format("load", rule[1])
            compiled.append((re.compile(pattern), found_format))
        except re.error as error:
            raise ValueError(
                f"load: the rule {pattern!r} is no regular expression: {error}; correct it."
            ) from None
    found: dict[str, Format | None] = {}
    used = set()
    for name in matrices:
        winner = next((i for i, (rule, _) in enumerate(compiled) if rule.search(name)), None)
        used.add(winner)
        found[name] = format if winner is None else compiled[winner][1]
    for i, (rule, _) in enumerate(compiled):
        if i not in used:
            raise ValueError(
                f"load: the rule {rule.pattern!r} decides about no matrix; correct it, put it "
                "before those that match the same names, or remove it. Names are embedding, head "
                "and layers.N.q, k, v, o, gate, up, down, dense_gate, dense_up and dense_down."
            )
    return found
