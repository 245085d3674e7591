"""Learns the rounding of a block of a language model from its outputs (`quantizers.distill`).

The inputs come from the quantized blocks before it, the wanted outputs from the float model. Each
step reads a few windows. Squared errors of a token are relative to the squares of its wanted
output: the first tokens have much larger ones, which norms divide away. Memory has, in float32, the
inputs and wanted outputs of the block for all windows, about eight copies of its matrices, and the
intermediate results of the windows of a step.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._core.format import Format
from .._core.groups import Groups
from ..quantizers import Statistics, distill
from .config import Config

_SMALLEST = float(jnp.finfo(jnp.float32).tiny)


class Rule(NamedTuple):
    """How the matrices of a block are rounded: their formats by name, and the dtype of scales."""

    formats: tuple[tuple[str, Format], ...]
    scale_dtype: Any
    options: distill.Options


def learned(
    forward: Any,
    config: Config,
    index: int,
    rule: Rule,
    floats: Mapping[str, Array],
    statistics: Mapping[str, Statistics],
    inputs: Array,
    wanted: Array,
) -> tuple[dict[str, Any], float]:
    """The quantized matrices, norms and biases of a block, and the root of the mean relative
    squared error of its outputs.

    **Arguments:**

    - `forward`: `calibration.forward`.
    - `floats`, `statistics`: by the names of weights in the block.
    - `inputs`, `wanted`: (windows, length, width).
    """
    options = rule.options
    count, windows = len(inputs), min(options.windows, len(inputs))
    rng = np.random.default_rng(0)
    rounds = -(-options.steps * windows // count)
    order = np.concatenate([rng.permutation(count) for _ in range(rounds)])
    order = order[: options.steps * windows].reshape(options.steps, windows).astype(np.int32)
    found, error = _learned(
        dict(floats),
        dict(statistics),
        inputs.astype(jnp.float32),
        wanted,
        order,
        forward=forward,
        config=config,
        index=index,
        rule=rule,
    )
    return found, float(error)


@functools.partial(jax.jit, static_argnames=("forward", "config", "index", "rule"))
def _learned(
    floats: dict[str, Array],
    statistics: dict[str, Statistics],
    inputs: Array,
    wanted: Array,
    order: Array,
    *,
    forward: Any,
    config: Config,
    index: int,
    rule: Rule,
) -> tuple[dict[str, Any], Array]:
    matrices, start, rates = {}, {}, {}
    for name, format in rule.formats:
        dtype = {} if format.scale else {"scale_dtype": rule.scale_dtype}
        groups = Groups.of(floats[name], format, **dtype)
        relaxed = distill.Relaxed.of(groups, statistics[name])
        matrices[name] = matrix = distill.Matrix(groups, relaxed)
        start[name], rates[name] = matrix.start(rule.options)
    units = {name: _unit(name, x, config) for name, x in floats.items() if x.ndim == 1}
    start["vectors"] = {name: jnp.zeros_like(floats[name]) for name in units}
    rates["vectors"] = dict.fromkeys(units, rule.options.scale_rate)

    def vectors(parameters: Any) -> dict[str, Array]:
        changes = parameters["vectors"]
        return {name: floats[name] + unit * changes[name] for name, unit in units.items()}

    def error(parameters: Any, x: Array, y: Array) -> Array:
        weights = floats | vectors(parameters)
        for name, matrix in matrices.items():
            weights[name] = matrix.groups.matrix(matrix.values(parameters[name]))
        found = forward(config, {f"layers.{index}.{k}": w for k, w in weights.items()}, index, x)
        squares = jnp.sum(jnp.square(found - y), axis=-1)
        return jnp.mean(squares / jnp.maximum(jnp.sum(jnp.square(y), axis=-1), _SMALLEST))

    def loss(parameters: Any, step: Array) -> Array:
        return error(parameters, inputs[order[step]], wanted[order[step]])

    def total(parameters: Any) -> Array:
        def of_window(x: tuple[Array, Array]) -> Array:
            return error(parameters, x[0][None], x[1][None])

        return jnp.mean(lax.map(of_window, (inputs, wanted)))

    parameters, found = distill.learned(start, rates, loss, total, rule.options.steps)
    packed = {name: matrix.pack(parameters[name]) for name, matrix in matrices.items()}
    return packed | vectors(parameters), jnp.sqrt(found)


def _unit(name: str, vector: Array, config: Config) -> Array:
    """The mean magnitude of a norm or of biases."""
    offset = config.norm_offset if name.endswith("norm") else 0
    return jnp.mean(jnp.abs(vector + offset))
