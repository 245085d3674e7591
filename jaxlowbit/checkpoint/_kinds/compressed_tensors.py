"""compressed-tensors, the format of llm-compressor.

Names, targets and layouts follow compressed-tensors 0.20 (`compressors/`, `utils/match.py`). Older
versions pad each word of 3, 5, 6 or 7 bits, and have `weight_g_idx` if rows were reordered by
activation.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..._core.format import Format
from .. import _bits, _scaled
from .._fields import OTHER, Fields
from .._files import AGAIN, FLOATS, Folder, Tensor
from .._matrix import Found, Matrix
from .._packing import Unpacked
from .awq import two_axes
from .gptq import grouped, order_of

METHODS = ("compressed-tensors",)
SUMMARY = (
    "compressed-tensors: integers of 1 to 8 bits, 8-bit floats, NVFP4, MXFP4, MXFP6, MXFP8; W4A8 "
    "and W8A8"
)
_KIND = "compressed-tensors"
_FORMATS = {
    "pack-quantized": "int",
    "int-quantized": "int",
    "float-quantized": "float",
    "naive-quantized": "",
    "nvfp4-pack-quantized": "float",
    "mxfp4-pack-quantized": "float",
    "mxfp6-pack-quantized": "float",
    "mxfp8-quantized": "float",
}
_CLASSES = ("Linear", "Embedding")
_E2M3 = tuple(
    sign * (x / 8 if x < 8 else (1 + x % 8 / 8) * 2.0 ** (x // 8 - 1))
    for sign in (1, -1)
    for x in range(32)
)


class Scheme(NamedTuple):
    """How the weights of a group of modules are stored.

    - `layout`: the `format`, such as `"pack-quantized"`.
    - `rows`, `columns`: the outputs and inputs that share a scale, -1 for all.
    - `activation_dtype`: None, or the dtype of inputs with a scale for each token.
    - `reordered`: whether `weight_g_idx` has the group of each input.
    """

    layout: str
    bits: int
    rows: int
    columns: int
    symmetric: bool
    activation_dtype: Any
    reordered: bool = False


class Targets(NamedTuple):
    """The schemes by target: the name of a module, `"re:"` and a pattern, or a class."""

    names: Mapping[str, Scheme]
    patterns: Sequence[tuple[re.Pattern[str], Scheme]]

    @classmethod
    def of(cls, config: Fields, key: str, schemes: Mapping[str, Scheme]) -> "Targets":
        patterns = [
            (config.pattern(key, name.removeprefix("re:")), schemes[name])
            for name in sorted(schemes)
            if name.startswith("re:")
        ]
        return cls(schemes, patterns)

    def find(self, module: str) -> Scheme | None:
        """The scheme of a module: by its name, else by the first pattern, else by its class."""
        if module in self.names:
            return self.names[module]
        for pattern, scheme in self.patterns:
            if pattern.match(module):
                return scheme
        # Only its name distinguishes an embedding from other matrices.
        own = "Embedding" if "embed" in module.rpartition(".")[2] else "Linear"
        return self.names.get(own)


def read(folder: Folder, config: Fields) -> Found:
    schemes, sentences = _schemes(config)
    targets = Targets.of(config, "targets", schemes)
    ignored = Targets.of(config, "ignore", dict.fromkeys(config.strings("ignore"), _IGNORED))
    config.inner("sparsity_config").expect("format", "dense", "dense")
    _check_transforms(config)
    config.expect_rest(
        "format",
        "global_compression_ratio",
        "quant_method",
        "quantization_status",
        "run_compressed",
        "version",
    )
    matrices, unused = [], set(_scaled.static_scales(folder))
    for module in _modules(folder):
        scheme = None if ignored.find(module) else targets.find(module)
        if scheme is None:
            tensor = _first(folder, module)
            raise ValueError(
                f"{tensor.where} is quantized, but by 'ignore' and 'targets' in {config.path} "
                f"{module!r} stays floats; {AGAIN}."
            )
        matrix, rest = matrix_of(folder, module, scheme)
        matrices.append(matrix)
        unused |= rest
    return Found(matrices, frozenset(unused), _sentences(folder, config, sentences))


_IGNORED = Scheme("", 0, 0, 0, True, None)


def _modules(folder: Folder) -> list[str]:
    found = (name.rpartition(".") for name in folder.tensors)
    return list(dict.fromkeys(x for x, _, last in found if last in ("weight_packed", _SCALE)))


def _first(folder: Folder, module: str) -> Tensor:
    names = (f"{module}.{last}" for last in ("weight_packed", "weight", _SCALE))
    return next(folder.tensors[name] for name in names if name in folder.tensors)


# --- the configuration ----------------------------------------------------------------------------


def _schemes(config: Fields) -> tuple[dict[str, Scheme], list[str]]:
    """The scheme of each target, and sentences on entries that have no effect here."""
    groups = Fields(config.path, config.need("config_groups", "an object"))
    found: dict[str, Scheme] = {}
    sentences: list[str] = []
    for name in groups.values:
        group = Fields(config.path, groups.need(name, "an object"))
        default = config.values.get("format")
        layout = group.expect("format", default, *_FORMATS)
        weights = Fields(config.path, group.need("weights", "an object"))
        activation_dtype = _activations(group.inner("input_activations"), sentences)
        if group.inner("output_activations").values:
            sentences.append("scales of results")
        scheme = _scheme(weights, layout, activation_dtype)
        found |= dict.fromkeys(group.strings("targets"), scheme)
        group.expect_rest()
    if config.inner("kv_cache_scheme").values:
        sentences.append("scales of a cache")
    return found, sentences


def _scheme(weights: Fields, layout: str, activation_dtype: Any) -> Scheme:
    own = _FORMATS[layout]
    kind = weights.expect("type", "int", *([own] if own else ["int", "float"]))
    widths = {"nvfp4": (4,), "mxfp4": (4,), "mxfp6": (6,)}.get(layout[:5], (8,))
    bits = weights.expect("num_bits", 8, *(range(1, 9) if kind == "int" else widths))
    strategies = ("tensor", "channel", "group", "tensor_group")
    if kind == "float" or layout == "naive-quantized":
        strategies = (*strategies, "block")
    size = weights.get("group_size", "an integer")
    default = None if size is None else "channel" if size == -1 else "group"
    strategy = weights.expect("strategy", default or "tensor", *strategies)
    symmetric = weights.get("symmetric", "true or false", True)
    if kind == "float":
        weights.expect("symmetric", True, True)
    weights.expect("dynamic", False, False)
    weights.read.add("block_structure")
    orders = ("weight", "static", False)
    orders = (*orders, "group", "dynamic", True) if layout == "pack-quantized" else orders
    reordered = weights.expect("actorder", False, *orders) in ("group", "dynamic", True)
    rows, columns = {"tensor": (-1, -1), "channel": (1, -1)}.get(strategy, (1, size or 0))
    if strategy == "block":
        rows, columns = _block(weights)
    if columns < -1 or columns == 0 or (columns > 0 and columns % 16):
        raise ValueError(
            f"{weights.path}: 'group_size' is {columns}, but groups here are multiples of 16 "
            f"inputs; {OTHER}."
        )
    weights.expect_rest("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    return Scheme(layout, bits, rows, columns, symmetric, activation_dtype, reordered)


def _block(weights: Fields) -> tuple[int, int]:
    """The rows and columns of a block, a list or, in older files, "128x128"."""
    found = weights.values.get("block_structure")
    listed = found.split("x") if isinstance(found, str) else found
    match listed:
        case [int() | str() as rows, int() | str() as columns]:
            if str(rows).isdecimal() and str(columns).isdecimal():
                return max(int(rows), 1), int(columns)
    raise ValueError(
        f"{weights.path}: 'block_structure' is {found!r}, but blocks are a number of rows and a "
        f"multiple of 16 columns, such as [128, 128]; {OTHER}."
    )


def _activations(inputs: Fields, sentences: list[str]) -> Any:
    """The dtype of the inputs of products, None for floats; appends to `sentences`."""
    if not inputs.values:
        return None
    bits, kind = inputs.get("num_bits", "an integer", 8), inputs.get("type", "a string", "int")
    strategy = inputs.get("strategy", "a string", "tensor")
    dynamic = inputs.values.get("dynamic")
    dtype = {("int", 8): jnp.int8, ("float", 8): jnp.float8_e4m3fn}.get((kind, bits))
    by_token = dynamic is True and strategy in ("token", "tensor")
    if dtype is not None and by_token and inputs.get("symmetric", "true or false", True):
        return dtype
    static = "" if dynamic else "static "
    sentences.append(f"{static}scales of activations ({kind} of {bits} bits, {strategy})")
    return None


def _check_transforms(config: Fields) -> None:
    """Checks that transforms are merged into the stored weights and none is applied online.

    **Raises:** `ValueError`.
    """
    transforms = config.inner("transform_config").inner("config_groups")
    for name in transforms.values:
        group = Fields(config.path, transforms.get(name, "an object", {}))
        for apply in group.get("apply", "a list", []):
            Fields(config.path, apply if isinstance(apply, dict) else {}).expect(
                "location", None, "weight_input", "weight_output"
            )


def _sentences(folder: Folder, config: Fields, found: list[str]) -> tuple[str, ...]:
    if not found and _scaled.static_scales(folder):
        found = ["scales of activations or of a cache"]
    return tuple(_scaled.left_out(config.path, what) for what in dict.fromkeys(found))


# --- the matrices ---------------------------------------------------------------------------------

_SCALE = "weight_scale"
_INTEGERS = ("I32",)


def matrix_of(folder: Folder, module: str, scheme: Scheme) -> tuple[Matrix, set[str]]:
    """The matrix of a module, and the names of its unused tensors.

    **Raises:** `ValueError` for missing tensors, and for other types or shapes.
    """
    if scheme.layout == "pack-quantized":
        return _packed(folder, module, scheme), set()
    scale = folder.need(f"{module}.{_SCALE}", module)
    options: Any = {"activation_dtype": scheme.activation_dtype}
    name = f"{module}.weight"
    if scheme.layout in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        data = folder.need(f"{module}.weight_packed", module)
        if scheme.layout.startswith("nv"):
            factor = folder.need(f"{module}.weight_global_scale", module)
            scale.check(("F8_E4M3",), scale.shape)
            options |= {"tensor_scale": factor, "unit": 1 / _scaled.number(factor)}
        return _scaled.four_bit_floats(name, _KIND, data, scale, **options), set()
    if scheme.layout == "mxfp6-pack-quantized":
        return _mxfp6(folder, module, scale, scheme), set()
    zero, unused = folder.tensors.get(f"{module}.weight_zero_point"), set()
    if zero is not None and scheme.symmetric:
        unused = {_check_no_zero(zero).name}
        zero = None
    elif not scheme.symmetric:
        zero = folder.need(f"{module}.weight_zero_point", module)
    weight = folder.need(name, module)
    weight.check(("I8", "F8_E4M3"), two_axes(weight.where, weight.shape))
    matrix = _scaled.scaled(
        name,
        _KIND,
        weight,
        scale,
        rows=scheme.rows,
        columns=scheme.columns,
        bits=scheme.bits,
        zero=zero,
        **options,
    )
    return matrix, unused


def _check_no_zero(zero: Tensor) -> Tensor:
    """Checks a zero point of symmetric weights, which older versions write, for all zeros.

    **Raises:** `ValueError` if some are not 0.
    """
    if zero.array().astype(np.float32).any():
        raise ValueError(
            f"{zero.where} has numbers other than 0, but by config.json weights are symmetric; "
            f"{AGAIN}."
        )
    return zero


def _packed(folder: Folder, module: str, scheme: Scheme) -> Matrix:
    """A matrix of integers in words along the input, with zeros in words along the output."""
    packed = folder.need(f"{module}.weight_packed", module)
    scale = folder.need(f"{module}.{_SCALE}", module)
    shape = folder.need(f"{module}.weight_shape", module).check(("I64", "I32"), (2,))
    rows, words = two_axes(packed.where, packed.shape)
    n, k = (int(x) for x in shape.array())
    if n != rows or not 0 < k <= 32 * words:
        raise ValueError(
            f"{shape.where} says {(n, k)}, but the words of {packed.name!r} are of shape "
            f"{packed.shape}; {AGAIN}."
        )
    bits, size = scheme.bits, k if scheme.columns == -1 else scheme.columns
    packed.check(_INTEGERS, *((n, count) for count in _word_counts(bits, k)))
    groups = -(-k // size)
    blocks = (1 if scheme.rows == -1 else n, groups)
    shapes = [blocks, *([blocks[:1]] if groups == 1 else []), *([()] if blocks == (1, 1) else [])]
    scale.check(FLOATS, *shapes)
    zeros = None if scheme.symmetric else _zeros(folder, module, scheme, blocks)
    g_idx = folder.tensors.get(f"{module}.weight_g_idx")
    if scheme.reordered:
        g_idx = folder.need(f"{module}.weight_g_idx", module)
    permutation = None
    if g_idx is not None:
        g_idx.check(("I32", "I64"), (k,))
        if not (g_idx.array() == -1).all():
            permutation = order_of(g_idx, size if size < k else -1)
    fields = _fields_of(bits, k, words)

    def unpack(start: int, stop: int) -> Unpacked:
        numbers = np.arange(start, stop) if blocks[0] == n else np.zeros(stop - start, int)
        found = _scaled.scales(scale, scale.array().reshape(blocks)[numbers])
        values = fields(packed.array()[start:stop])
        return Unpacked(values, found, None if zeros is None else zeros[1]()[numbers])

    others = (x for x in (shape, zeros and zeros[0], g_idx) if x is not None)
    return Matrix(
        f"{module}.weight",
        _KIND,
        (packed, scale, *others),
        (n, k),
        grouped(packed, bits, size, k, zeros is None),
        unpack,
        permutation=permutation,
        activation_dtype=scheme.activation_dtype,
    )


def _zeros(
    folder: Folder, module: str, scheme: Scheme, blocks: tuple[int, int]
) -> tuple[Tensor, Callable[[], np.ndarray]]:
    """The tensor of zeros, and a function that returns them unsigned, in the shape of blocks."""
    zero, bits = folder.need(f"{module}.weight_zero_point", module), scheme.bits
    rows, groups = blocks
    if zero.kind == "I8":  # one zero for all rows is not packed
        zero.check(("I8",), blocks, *([(1,), ()] if blocks == (1, 1) else []))

        def plain() -> np.ndarray:
            return (zero.array().astype(np.int16).reshape(blocks) + (1 << bits - 1)).astype("u1")

        return zero, plain
    counts = _word_counts(bits, rows)
    zero.check(_INTEGERS, *((count, groups) for count in counts))
    fields = _fields_of(bits, rows, zero.shape[0])
    return zero, lambda: np.ascontiguousarray(fields(zero.array().T).T)


def _word_counts(bits: int, count: int) -> tuple[int, int]:
    """The numbers of words for `count` values: as a dense stream, and with whole values per
    word."""
    return _bits.word_count(bits, count), -(-count // (32 // bits))


def _fields_of(bits: int, count: int, words: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that unpacks words (..., words) to values (..., count)."""
    if words == _bits.word_count(bits, count):
        return lambda found: _bits.fields(found, bits, count)
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)

    def padded(found: np.ndarray) -> np.ndarray:
        words = np.ascontiguousarray(found).view(np.uint32)
        values = (words[..., None] >> shifts & np.uint32(2**bits - 1)).astype(np.uint8)
        return values.reshape(*words.shape[:-1], -1)[..., :count]

    return padded


def _mxfp6(folder: Folder, module: str, scale: Tensor, scheme: Scheme) -> Matrix:
    """E2M3 numbers, four in three bytes, in groups of 32."""
    data = folder.need(f"{module}.weight_packed", module)
    n, size = two_axes(data.where, data.shape)
    k = size * 4 // 3
    data.check(("U8",), (n, k // 32 * 24))
    scale.check(("U8", "F8_E8M0"), (n, k // 32))

    def unpack(start: int, stop: int) -> Unpacked:
        values = _bits.fields(data.array()[start:stop], 6, k)
        return Unpacked(values, _scaled.scales(scale, scale.array()[start:stop]), None)

    return Matrix(
        f"{module}.weight",
        _KIND,
        (data, scale),
        (n, k),
        Format(6, 32, codebook=_E2M3, scale="e8m0"),
        unpack,
        activation_dtype=scheme.activation_dtype,
    )
