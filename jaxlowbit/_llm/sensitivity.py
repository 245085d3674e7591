"""The increase of divergence by each matrix of a language model in each format.

Quantization changes the outputs y of a matrix by dy = x E, E the rounding error of the weight. The
Kullback-Leibler divergence from the float model is, to second order, half the mean square of
g dy over tokens, g the gradient of -log p(token) by y for tokens drawn from the model (Fisher
information). With independent x and g, and no correlation among the outputs, that is

    1/2 * sum over outputs j of mean(g_j^2) * (E^T H E)_jj,  H the second moments of x

One pass forward and one backward, block by block, give H and mean(g^2) of all matrices: memory has
one block, its H, and the inputs of all blocks. Kronecker factors of the Fisher information are from
Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature",
2015.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from .._composite.rms_norm import rms_norm
from .._core.array import QuantizedArray
from .._core.format import Format, format_name
from .._flax.equation import Equation
from .._flax.recording import Record, RecordingView
from .._flax.weight_program import run
from ..quantizers import Statistics, _registry
from ..quantizers._calibration import check_statistics
from ..quantizers._quantize import quantize
from .calibration import Source, embedded, forward, like
from .config import Config

# The matrices of a block; some blocks have no v. The matrices of a unit are one call if they share
# a format.
UNITS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
_ROWS = 64  # maximum number of tokens whose logits exist at the same time


class Unit(NamedTuple):
    """Matrices that share a format.

    - `rule`: a regular expression that matches their names.
    - `size`: the number of their weights.
    - `divergence`: by the names of formats, in nats per token.
    """

    rule: str
    size: int
    divergence: dict[str, float]


def sensitivities(
    source: Source,
    tokens: np.ndarray,
    formats: Sequence[Format],
    quantizer: Any,
    options: Mapping[str, Any],
    *,
    progress: bool = False,
) -> Iterator[Unit]:
    """Yields the units of a model, from the last block to the first.

    **Arguments:**

    - `tokens`: int32 (sequences, length).
    - `formats`, `quantizer`, `options`: of `quantize`.

    **Raises:** `ValueError` for inputs of a matrix that are not finite, with its name.
    """
    config = source.config
    embedding = source.floats("embedding")
    x = np.asarray(embedded(embedding, tokens, config.embedding_scale, jnp.float32))
    inputs = []
    for i in range(config.layers):
        inputs.append(x)
        given = _weights(source, i), config, like(config, i)
        x = np.concatenate([np.asarray(_run(row[None], *given)) for row in x])
    head = embedding if config.tied_head else source.floats("head")
    norm = source.floats("final_norm") + config.norm_offset
    keys = jax.random.split(jax.random.key(0), len(x))
    gradients = np.stack(
        [
            np.asarray(_head_gradient(row, head, norm, key, config))
            for row, key in zip(x, keys, strict=True)
        ]
    )
    del head, embedding
    for i in tqdm(
        reversed(range(config.layers)), "sensitivity", config.layers, disable=not progress
    ):
        weights = _weights(source, i)
        found: dict[str, _Matrix] = {}
        for at, row in enumerate(inputs.pop()):
            operands = row[None], gradients[at][None], weights
            part, moved = _backward(*operands, config, like(config, i))
            found = {name: found[name] + x if found else x for name, x in part.items()}
            gradients[at] = np.asarray(moved[0])
        rounding = formats, quantizer, options
        for unit in UNITS:
            own = {name: found[name] for name in unit if name in found}
            yield _measured(i, own, weights, *rounding)


class _Matrix(NamedTuple):
    """Statistics of the inputs of a matrix, and the mean square gradients of its outputs (n,)."""

    statistics: Statistics
    gradients: Array

    def __add__(self, other: Any) -> "_Matrix":
        share = self.statistics.rows / (self.statistics.rows + other.statistics.rows)
        mean = share * self.gradients + (1 - share) * other.gradients
        return _Matrix(self.statistics + other.statistics, mean)


def _measured(
    index: int,
    matrices: Mapping[str, _Matrix],
    weights: Mapping[str, Array],
    formats: Sequence[Format],
    quantizer: Any,
    options: Mapping[str, Any],
) -> Unit:
    prefix = f"layers.{index}."
    total = dict.fromkeys(map(format_name, formats), 0.0)
    size = 0
    reads = _registry.statistics_of(quantizer)
    for name, matrix in matrices.items():
        weight = weights[name]
        size += weight.size
        statistics = check_statistics("plan", prefix + name, matrix.statistics)
        for format in formats:
            given = {"quantizer": quantizer, "statistics": statistics if reads else None}
            rounded = quantize(weight, format, **given, **({} if format.scale else options))
            total[format_name(format)] += float(
                _added(weight, rounded, statistics, matrix.gradients)
            )
    names = "|".join(matrices)
    rule = rf"^layers\.{index}\.({names})$" if len(matrices) > 1 else rf"^layers\.{index}\.{names}$"
    return Unit(rule, size, total)


@jax.jit
def _added(
    weight: Array, rounded: QuantizedArray, statistics: Statistics, gradients: Array
) -> Array:
    """The divergence that the error of a rounded weight (k, n) adds."""
    error = rounded.dequantize(jnp.float32) - weight
    squares = jnp.sum(error * jnp.matmul(statistics.second_moments, error), axis=0)
    return 0.5 * jnp.sum(gradients * squares)


def _weights(source: Source, index: int) -> dict[str, Array]:
    """The weights of a block, by their names in it."""
    prefix = f"layers.{index}."
    names = [name for name in source.config.shapes() if name.startswith(prefix)]
    return {name.removeprefix(prefix): source.floats(name) for name in names}


def _forward(weights: Mapping[str, Any], x: Array, config: Config, index: int) -> Array:
    return forward(config, {f"layers.{index}.{name}": w for name, w in weights.items()}, index, x)


@functools.partial(jax.jit, static_argnames=("config", "index"))
def _run(x: Array, weights: dict[str, Array], config: Config, index: int) -> Array:
    return _forward(weights, x, config, index)


@functools.partial(jax.jit, static_argnames="config")
def _head_gradient(x: Array, head: Array, norm: Array, key: Array, config: Config) -> Array:
    """The gradient of -log p of drawn tokens by the input (length, width) of the last norm."""

    def logits(row: Array) -> Array:
        found = jnp.matmul(rms_norm(row[None], norm, config.norm_epsilon)[0], head)
        found = found * config.logit_scale
        cap = config.logit_softcap
        return found if cap is None else cap * jnp.tanh(found / cap)

    def of_row(given: tuple[Array, Array]) -> Array:
        row, key = given
        drawn = jax.random.categorical(key, logits(row))
        return jax.grad(lambda row: -jax.nn.log_softmax(logits(row))[drawn])(row)

    keys = jax.random.split(key, len(x))
    return jax.lax.map(of_row, (x, keys), batch_size=min(_ROWS, len(x)))


@dataclasses.dataclass(frozen=True)
class _Probe(RecordingView):
    """A view that adds zeros to the outputs of a weight, for the gradients by the outputs."""

    zeros: Any = None

    def product(self, lhs: Array, dtype: Any) -> Array:
        return super().product(lhs, dtype) + self.zeros[self.name]


@functools.partial(jax.jit, static_argnames=("config", "index"))
def _backward(
    x: Array, gradient: Array, weights: dict[str, Array], config: Config, index: int
) -> tuple[dict[str, _Matrix], Array]:
    """The statistics of matrices, and the gradient by the input x (batch, length, width)."""
    names = [name for unit in UNITS for name in unit if name in weights]

    def block(x: Array, zeros: dict[str, Array]) -> tuple[Array, dict[str, Statistics]]:
        record = Record(True, traced=True)
        views = {}
        for name in names:
            equation = Equation.parse("...k,kn->...n", weights[name].shape)
            view = _Probe.recording(name, weights[name], equation, record)
            views[name] = dataclasses.replace(view, zeros=zeros)
        out = run(lambda floats: _forward({**weights, **floats}, x, config, index), views)
        return out, record.statistics

    zeros = {name: jnp.zeros((*x.shape[:-1], weights[name].shape[-1])) for name in names}
    _, back, statistics = jax.vjp(block, x, zeros, has_aux=True)
    moved, by_output = back(gradient)
    squares = {name: jnp.mean(by_output[name] ** 2, axis=(0, 1)) for name in names}
    return {name: _Matrix(statistics[name], squares[name]) for name in names}, moved
