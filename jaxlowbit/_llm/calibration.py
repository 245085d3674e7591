"""Calibration of a language model, block by block.

The inputs of a block, for all tokens, are stored between blocks. The block runs twice: with floats,
to record the statistics of the inputs of its matrices, and with the quantized matrices, to compute
the inputs of the next block.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from .._composite.rms_norm import rms_norm
from .._core.array import LEAVES, QuantizedArray
from .._core.checks import brief
from .._core.format import Format
from .._flax.equation import Equation
from .._flax.recording import Record, RecordingView
from .._flax.weight_program import run
from ..quantizers import Statistics, _registry
from ..quantizers._calibration import (
    Calibration,
    Results,
    check_statistics,
    output_error,
    unreached,
    warn_of_few_rows,
    warn_of_unreached,
    with_identity,
)
from ..quantizers._quantize import check_scale, quantize
from . import rope
from .block import Block
from .cache import make_cache
from .config import Config, is_matrix
from .distillation import Rule, learned
from .low_rank import Weight

_SEQUENCES = 8  # at the same time
# Operations whose result can be divided by factors: norms, or the columns of a matrix.
_FOLDS = (
    ("attention_norm", ("q", "k", "v")),
    ("v", ("o",)),
    ("mlp_norm", ("gate", "up")),
    ("up", ("down",)),
)
_FOLDS_WITH_DENSE = (
    _FOLDS[0],
    ("mlp_norm", ("dense_gate", "dense_up")),
    ("dense_up", ("dense_down",)),
    ("expert_norm", ("gate", "up")),
    ("up", ("down",)),
)
"""In blocks with experts and a dense MLP, whose router has a separate norm."""


class Source(NamedTuple):
    """How to read the weights of a model.

    - `config`: its configuration.
    - `floats`: returns the float32 weight of a name.
    - `stored`: returns the weight of a name as the decoder uses it, without rounding.
    """

    config: Config
    floats: Callable[[str], Array]
    stored: Callable[[str], Weight]


class Rounding(NamedTuple):
    """How matrices are rounded: the format of each by name, None to leave it in floats; the
    quantizer; the dtypes of scales and activations."""

    formats: Mapping[str, Format | None]
    quantizer: Any
    scale_dtype: Any
    dtype: Any

    def quantize(self, name: str, weight: Array, statistics: Statistics | None) -> QuantizedArray:
        format: Any = self.formats[name]
        options = {} if format.scale else {"scale_dtype": self.scale_dtype}
        quantizer = "mse" if statistics is None else self.quantizer
        options |= {"statistics": statistics, "quantizer": quantizer}
        found = quantize(weight, format, **options)
        if found.permutation is not None:
            raise ValueError(
                f"quantizer {quantizer!r} stores rows in another order, but a decoder takes them "
                "as they are; return a matrix without a permutation."
            )
        return found


def tokens_of(calibration: Calibration, config: Config, tokenizer: Any) -> np.ndarray:
    """The windows of tokens (sequences, length) of a calibration.

    **Raises:** `TypeError` for batches of another type, `ValueError` for too few or unknown tokens.
    """
    given = calibration.batches
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], str)):
        texts = [given] if isinstance(given, str) else given
        found = np.concatenate([np.asarray(tokenizer.encode(text), np.int64) for text in texts])
    else:
        found = np.asarray(given)
        if not np.issubdtype(found.dtype, np.integer) or found.ndim != 2 or 0 in found.shape:
            raise TypeError(
                f"load: the batches of the calibration are {brief(given)}, but they must be a "
                "text, a list of texts, or tokens, integers (sequences, length)."
            )
    if found.size and not 0 <= found.min() <= found.max() < config.vocabulary:
        raise ValueError(
            f"load: the calibration has token {int(found.max())}, but tokens are from 0 to "
            f"{config.vocabulary - 1}."
        )
    if found.ndim == 1:
        length = min(calibration.context, config.context)
        count = len(found) // length
        if count == 0:
            raise ValueError(
                f"load: the text of the calibration has {len(found)} tokens, but a window has "
                f"{length}; pass more text, or Calibration(text, context=...)."
            )
        starts = np.linspace(0, count - 1, min(calibration.samples, count)).astype(int)
        found = found.reshape(-1)[: count * length].reshape(count, length)[starts]
    return found.astype(np.int32)


def calibrated(
    source: Source,
    rounding: Rounding,
    calibration: Calibration,
    key: Mapping[str, Any],
) -> Iterator[tuple[str, Weight]]:
    """Quantizes the matrices of a model with the statistics of their inputs; returns all weights.

    `tokens_of` returns the batches of the calibration.

    The head has inputs too. An embedding that is not also the head has no product, so `"mse"`
    rounds it.

    **Raises:** `ValueError` for inputs that are not finite, and what quantizers raise, with the
    name of the matrix.
    """
    config, tokens = source.config, calibration.batches
    results = Results("load", calibration.folder, {**key, "tokens": _digest(tokens)})
    if _registry.statistics_of(rounding.quantizer) == "full":
        features = {name: config.shapes()[name][-2] for name, x in rounding.formats.items() if x}
        widest = max(features, key=lambda name: features[name])
        warn_of_few_rows("load", widest, tokens.size, features[widest])
    embedding = source.floats("embedding")
    x = embedded(embedding, tokens, config.embedding_scale, rounding.dtype)
    learns = _registry.block_options(rounding.quantizer) is not None
    exact = embedded(embedding, tokens, config.embedding_scale, jnp.float32) if learns else None
    bar = tqdm(range(config.layers), desc="calibrating", disable=not calibration.progress)
    for i in bar:
        names = [name for name in config.shapes() if name.startswith(f"layers.{i}.")]
        found = _restored(results, f"layers.{i}", rounding.formats)
        if found is not None:
            x = jnp.asarray(found.pop("x"))
            exact = found.pop("exact", None)
            yield from found.items()
            continue
        block = _Block(source, rounding, i, names)
        exact = None if exact is None else block.outputs(exact, jnp.float32)
        weights, x, error = block.calibrated(x, exact)
        bar.set_postfix(error=f"{error:.4f}")
        streams = {"x": x} if exact is None else {"x": x, "exact": exact}
        _save(results, f"layers.{i}", weights | streams)
        yield from weights.items()
    yield "final_norm", source.stored("final_norm")
    last = "embedding" if config.tied_head else "head"
    if not config.tied_head:
        format = rounding.formats["embedding"]
        plain = rounding.quantize("embedding", embedding, None) if format else None
        yield "embedding", source.stored("embedding") if plain is None else plain
    if rounding.formats[last] is None:
        yield last, source.stored(last)
        return
    weight = embedding if config.tied_head else source.floats(last)
    norm = source.floats("final_norm") + config.norm_offset
    full = _registry.statistics_of(rounding.quantizer) == "full"
    parts = [_head_statistics(part, norm, config.norm_epsilon, full) for part in _chunks(x)]
    statistics = check_statistics("load", last, functools.reduce(Statistics.__add__, parts))
    yield last, _named(last, rounding.quantize, last, weight, statistics)


class _Block:
    """A block with its float weights, by the names of `Config.shapes` without the block's
    number."""

    def __init__(self, source: Source, rounding: Rounding, index: int, names: list[str]) -> None:
        self.source, self.rounding, self.index = source, rounding, index
        config = source.config
        self.like = like(config, index)
        self.prefix = f"layers.{index}."
        short = [name.removeprefix(self.prefix) for name in names]
        self.floats = {name: source.floats(self.prefix + name) for name in short}
        self.matrices = tuple(name for name in short if rounding.formats.get(self.prefix + name))

    def calibrated(self, x: Array, wanted: Array | None) -> tuple[dict[str, Weight], Array, float]:
        """The new weights of the block, the inputs of the next block, and the relative error: of
        the outputs if these are `wanted`, else the mean of products."""
        dtype = self.rounding.dtype
        statistics = self._statistics(x)
        changed = self._fold(statistics)
        found: dict[str, QuantizedArray] = {}
        errors = []
        if wanted is not None and self.matrices:
            found, vectors, error = self._learned(statistics, x, wanted)
            errors.append(error)
            self.floats |= vectors
            changed |= vectors.keys()
        else:
            for name in self.matrices:
                path = self.prefix + name
                operands = path, self.floats[name], statistics[name]
                found[name] = array = _named(path, self.rounding.quantize, *operands)
                rounded = array.dequantize(jnp.float32)
                errors.append(float(output_error(self.floats[name], rounded, statistics[name])))
        self.floats |= {name: array.dequantize(jnp.float32) for name, array in found.items()}
        x = self.outputs(x, dtype)
        weights: dict[str, Weight] = {}
        for name in self.floats:
            if name in found:
                weights[self.prefix + name] = found[name]
            elif name in changed:
                own = dtype if is_matrix(self.prefix + name) else jnp.float32
                weights[self.prefix + name] = self.floats[name].astype(own)
            else:
                weights[self.prefix + name] = self.source.stored(self.prefix + name)
        return weights, x, float(np.mean(errors)) if errors else 0.0

    def outputs(self, x: Array, dtype: Any) -> Array:
        """The outputs of the block with its weights in a dtype."""
        cast, config = self._cast(dtype), self.source.config
        return jnp.concatenate([_run(cast, part, config, self.like) for part in _chunks(x)])

    def _learned(
        self, statistics: dict[str, Statistics], x: Array, wanted: Array
    ) -> tuple[dict[str, QuantizedArray], dict[str, Array], float]:
        """The quantized matrices, the norms and biases, and the relative error of the outputs."""
        formats: Any = {name: self.rounding.formats[self.prefix + name] for name in self.matrices}
        options = _registry.block_options(self.rounding.quantizer)
        rule = Rule(tuple(formats.items()), self.rounding.scale_dtype, options)
        operands = self.floats, statistics, x, wanted
        found, error = learned(forward, self.source.config, self.like, rule, *operands)
        arrays = {name: found.pop(name) for name in self.matrices}
        for name, array in arrays.items():
            _named(self.prefix + name, check_scale, array, self.floats[name])
        return arrays, found, error

    def _cast(self, dtype: Any) -> dict[str, Array]:
        return {
            f"layers.{self.like}.{name}": x.astype(dtype) if is_matrix(self.prefix + name) else x
            for name, x in self.floats.items()
        }

    def _statistics(self, x: Array) -> dict[str, Statistics]:
        full = _registry.statistics_of(self.rounding.quantizer) == "full"
        names = tuple(f"layers.{self.like}.{name}" for name in self.matrices)
        options = self.source.config, self.like, names, full
        parts = [_recorded(self._cast(self.rounding.dtype), part, *options) for part in _chunks(x)]
        found = functools.reduce(lambda a, b: {k: a[k] + b[k] for k in b}, parts)
        checked = {
            name: check_statistics("load", self.prefix + name, found.get(full_name))
            for name, full_name in zip(self.matrices, names, strict=True)
        }
        unused = {name: unreached(x) for name, x in checked.items() if x.rows.ndim}
        if any(unused.values()):  # gate, up and down have the same inputs
            name, numbers = next(item for item in unused.items() if item[1])
            warn_of_unreached("load", self.prefix + name, numbers)
        return {name: with_identity(statistics) for name, statistics in checked.items()}

    def _fold(self, statistics: dict[str, Statistics]) -> set[str]:
        """Multiplies rows of matrices by factors and divides the operation before by them. Returns
        the names of weights that change beyond rounding."""
        factors_of = _registry.factors_of(self.rounding.quantizer)
        changed: set[str] = set()
        if factors_of is None:
            return changed
        config = self.source.config
        for before, readers in _FOLDS_WITH_DENSE if config.dense_hidden else _FOLDS:
            names = tuple(name for name in readers if name in self.floats)
            if before not in self.floats or not set(names) <= set(self.matrices):
                continue
            if before == "v" and config.value_norm:
                continue  # it undoes factors
            sizes = {self.floats[name].shape[-2] for name in names}
            if sizes != {self.floats[before].shape[-1]}:
                continue  # heads share the columns of values
            if before == "up" and config.activation == "gpt_oss":
                continue  # it clips the products of up
            formats = tuple(self.rounding.formats[self.prefix + name] for name in names)
            weights, own = tuple(self.floats[name] for name in names), statistics[names[0]]
            if self.floats[before].ndim == 1:  # experts share the factors of a norm
                weights, own = tuple(map(_joined, weights)), own.pooled()
            factor = _registry.stack_factors(weights, own, factors_of, formats)
            routed = before == "mlp_norm" and not config.router_norm
            for name in (*names, "router") if routed else names:
                if name in self.floats:
                    weight = self.floats[name]
                    self.floats[name] = weight * _spread(factor, weight)[..., None]
                    changed.add(name)
            for name in names:
                own = _spread(factor, self.floats[name])
                statistics[name] = statistics[name].divided(own)
            self._divide(before, factor)
            changed.add(before)
        return changed

    def _divide(self, name: str, factor: Array) -> None:
        weight = self.floats[name]
        if weight.ndim == 1:
            offset = self.source.config.norm_offset
            self.floats[name] = (weight + offset) / factor - offset
        else:
            self.floats[name] = weight / factor[..., None, :]
        bias = f"{name}_bias"
        if bias in self.floats:
            self.floats[bias] = self.floats[bias] / factor


def like(config: Config, index: int) -> int:
    """The first block with the same attention: alike blocks share a program."""

    def kind(i: int) -> tuple[bool, bool]:
        return config.is_local(i), config.rotates(i)

    return next(i for i in range(index + 1) if kind(i) == kind(index))


def forward(config: Config, weights: Mapping[str, Any], index: int, x: Array) -> Array:
    """The residual stream (batch, length, width) after a block."""
    block = Block(config, weights.__getitem__, index)
    batch, length = x.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    cache = make_cache(config, batch, length, x.dtype, layers=[index]).advance(positions)
    long = config.takes_long_factors(length)
    rotation = rope.rotation(config, positions, local=block.local, long=long)
    options = {"implementation": "xla", "reach": length}
    return block.step(
        block.project(x),
        x,
        None,
        rotation if block.rotates else None,
        positions,
        cache,
        0,
        **options,
    )[0]


@functools.partial(jax.jit, static_argnames=("config", "index"))
def _run(weights: dict[str, Array], x: Array, config: Config, index: int) -> Array:
    return forward(config, weights, index, x)


@functools.partial(jax.jit, static_argnames=("config", "index", "names", "full"))
def _recorded(
    weights: dict[str, Array],
    x: Array,
    config: Config,
    index: int,
    names: tuple[str, ...],
    full: bool,
) -> dict[str, Statistics]:
    """The statistics of the inputs of matrices."""
    record = Record(full, traced=True)
    views = {}
    for name in names:
        shape = weights[name].shape
        equation = Equation.parse("...k,kn->...n" if len(shape) == 2 else "e...k,ekn->e...n", shape)
        views[name] = RecordingView.recording(name, weights[name], equation, record)
    run(lambda floats: forward(config, {**weights, **floats}, index, x), views)
    return record.statistics


def _spread(factor: Array, weight: Array) -> Array:
    """Factors (k,) or (*lead, k) for each matrix of a weight (*lead, k, n)."""
    return jnp.broadcast_to(factor, weight.shape[:-1])


def _joined(weight: Array) -> Array:
    """The matrices of a stack (experts, k, n) as one (k, experts n)."""
    return jnp.moveaxis(weight, -2, 0).reshape(weight.shape[-2], -1)


@functools.partial(jax.jit, static_argnames=("epsilon", "full"))
def _head_statistics(x: Array, norm: Array, epsilon: float, full: bool) -> Statistics:
    return Statistics.of(rms_norm(x, norm, epsilon), full=full)


@functools.partial(jax.jit, static_argnames=("scale", "dtype"))
def embedded(table: Array, tokens: Array, scale: float, dtype: Any) -> Array:
    return (jnp.moveaxis(jnp.take(table, tokens, axis=1), 0, -1) * scale).astype(dtype)


def _chunks(x: Array) -> list[Array]:
    """Splits sequences into equal parts, since each size compiles a program."""
    size = max(size for size in range(1, _SEQUENCES + 1) if len(x) % size == 0)
    return [x[start : start + size] for start in range(0, len(x), size)]


def _named(name: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except ValueError as error:
        raise ValueError(f"load: in {name}: {str(error).removeprefix('quantize: ')}") from None


def _digest(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.tobytes()).hexdigest()


def _save(results: Results, name: str, weights: Mapping[str, Weight]) -> None:
    arrays: dict[str, Any] = {}
    for key, weight in weights.items():
        if isinstance(weight, QuantizedArray):
            leaves = {leaf: getattr(weight, leaf) for leaf in LEAVES}
            arrays |= {f"{key}/{leaf}": x for leaf, x in leaves.items() if x is not None}
            arrays[f"{key}/size"] = np.array([weight.k, weight.n])
        else:
            arrays[key] = weight
    results.save(name, arrays)


def _restored(
    results: Results, name: str, formats: Mapping[str, Format | None]
) -> dict[str, Any] | None:
    arrays = results.load(name)
    if arrays is None:
        return None
    found: dict[str, Any] = {key: jnp.asarray(x) for key, x in arrays.items() if "/" not in key}
    for key in {key.partition("/")[0] for key in arrays if "/" in key}:
        k, n = map(int, arrays[f"{key}/size"])
        leaves: Any = {
            leaf: None if (x := arrays.get(f"{key}/{leaf}")) is None else jnp.asarray(x)
            for leaf in LEAVES
        }
        format: Any = formats[key]
        found[key] = QuantizedArray(**leaves, format=format, k=k, n=n)
    return found
