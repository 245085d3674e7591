"""Distillation: learns scales and float zeros, from the outputs of the float model.

GPTQ chooses the words and the first scales; then gradient descent on the error of the outputs
changes the scales and the float zeros, as mlx-lm's DWQ does; for language models also norms and
biases. With a `rounding_rate` it changes words too, as AutoRound does (Cheng et al., "Optimize
Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", 2023): each weight has a
position between the numbers of its format, and rounding passes gradients on unchanged. The
optimizer is Adam (Kingma and Ba, 2014), with linearly smaller steps.

A language model (`jaxlowbit.llm`) learns block by block: inputs come from the quantized blocks
before, wanted outputs from the float model. Other models learn layer by layer: the error of the
products of a layer follows from the second moments of its inputs. Results that
do not lower the error are dropped, so no block, and without blocks no column, is worse than after
GPTQ.

8-bit scales and scales of two levels stay as they are.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._core import scales
from .._core.array import QuantizedArray
from .._core.format import Format
from .._core.groups import Groups
from .._core.scales import rows_of
from . import gptq
from ._statistics import Statistics

STATISTICS = "full"
REQUIRED = True  # of models

importance = gptq.importance  # for factors of another quantizer, such as awq

_MOMENTUM, _DECAY = 0.9, 0.99


def unsupported(format: Format) -> str | None:
    """Returns None if scales of the format can be learned, else the reason."""
    if format.scale is not None:
        return (
            f"it has {format.scale} scales, which are not learned; use 'gptq', or learn the words: "
            "functools.partial(jaxlowbit.quantizers.distill.quantize, rounding_rate=0.003)"
        )
    return scales.unsupported(format)


Learned = dict[str, Array]
"""Parameters of a matrix, if they are learned: `steps` (groups, size, n), positions in units of the
scale; `scale` and `zero` (groups, n), changes in units of the scale."""


class Options(NamedTuple):
    """How to learn.

    - `steps`: number of steps.
    - `windows`: number of windows of a language model that each step reads.
    - `scale_rate`: change of a scale or zero in the first step, in units of the scale; for language
      models, also of norms and biases, in units of their mean magnitude.
    - `rounding_rate`: change of the position of a weight in the first step, in mean distances of
      the numbers of the format; 0 to keep the words of GPTQ.
    """

    steps: int = 64
    windows: int = 2
    scale_rate: float = 0.01
    rounding_rate: float = 0.0


def quantize(
    weight: Array,
    format: Format,
    statistics: Statistics | None,
    *,
    steps: int = Options().steps,
    windows: int = Options().windows,
    scale_rate: float = Options().scale_rate,
    rounding_rate: float = Options().rounding_rate,
    **options: Any,
) -> QuantizedArray:
    """Rounds a weight by GPTQ, and learns the scales that lower the error of its products.

    **Arguments:** of `Options`; `windows` is read for language models only.

    **Raises:** `ValueError` without full second moments.
    """
    found = gptq.with_moments("distill", statistics)
    settings = Options(steps, windows, scale_rate, rounding_rate)
    groups = Groups.of(weight, format, **options)
    relaxed = Relaxed.of(groups, found)

    def of_matrix(relaxed: Relaxed, moments: Array) -> Learned:
        matrix = Matrix(groups, relaxed)

        def total(parameters: Learned, precision: Any = lax.Precision.HIGHEST) -> Array:
            error = jnp.where(groups.counted, matrix.values(parameters) - relaxed.values, 0)
            error = error.reshape(len(moments), -1)
            moved = jnp.matmul(moments, error, precision=precision)
            return jnp.sum(error * lax.stop_gradient(moved), axis=0)  # half of the gradient

        def loss(parameters: Learned, step: Array) -> Array:
            return jnp.sum(total(parameters, None))

        start, rates = matrix.start(settings)
        return learned(start, rates, loss, total, settings.steps)[0]

    moments = _of_unit(gptq.moments_of(groups, found))
    parameters = gptq.mapped(of_matrix, groups.values.ndim - 3, relaxed, moments)
    return Matrix(groups, relaxed).pack(parameters)


def _of_unit(moments: Array) -> Array:
    """Moments (..., rows, rows) times a power of two, the largest below 1: squares of gradients
    neither overflow nor vanish."""
    _, exponent = jnp.frexp(jnp.max(moments, axis=(-2, -1), keepdims=True))
    return jnp.ldexp(moments, -exponent)


class Relaxed(NamedTuple):
    """The arrays of a matrix that learning starts from.

    - `values`: float32 (..., groups, size, n), the weight.
    - `scale`, `zero`: (..., groups, n), as `Groups.pack` takes them.
    - `represented`, `represented_zero`: the same as stored, scales in float32.
    - `numbers`: float32 (..., groups, size, n), rounded values in units of the scale.
    - `steps`: float32 (..., groups, size, n), the position of each weight in units of the scale,
      whose nearest number is `numbers`.
    """

    values: Array
    scale: Array
    zero: Array | None
    represented: Array
    represented_zero: Array | None
    numbers: Array
    steps: Array

    @classmethod
    def of(cls, groups: Groups, statistics: Statistics) -> "Relaxed":
        """The result of GPTQ. A weight whose number is also the nearest one is at its own
        position, others in the middle of their number's range."""
        scale, zero, values = gptq.rounded(groups, statistics)
        stored = groups.represented(scale, zero)
        exact, nearest = groups.in_steps(*stored)
        _, numbers = scales.in_steps(values, *stored, groups.format)
        own = nearest + jnp.clip(exact - nearest, -0.5, 0.5)  # within the range of the format
        steps = jnp.where(nearest == numbers, own, numbers)
        return cls(groups.values, scale, zero, *stored, numbers, steps)


class Matrix(NamedTuple):
    """A matrix in training."""

    groups: Groups
    relaxed: Relaxed

    @property
    def gap(self) -> float:
        """The mean distance of the numbers of the format, in units of the scale."""
        numbers = [x for x in self.groups.format.values if math.isfinite(x)]
        return (max(numbers) - min(numbers)) / (len(numbers) - 1) if numbers else 1.0

    def start(self, options: Options) -> tuple[Learned, dict[str, float]]:
        """The parameters at the start, and their rates."""
        found = {"steps": self.relaxed.steps} if options.rounding_rate > 0 else {}
        if self.groups.format.scale is None:
            found["scale"] = jnp.zeros_like(self.relaxed.represented)
            if self.groups.format.zero == "float":
                found["zero"] = jnp.zeros_like(self.relaxed.represented)
        rates = dict.fromkeys(found, options.scale_rate)
        if "steps" in found:
            rates["steps"] = options.rounding_rate * self.gap
        return found, rates

    def values(self, learned: Learned) -> Array:
        """The rounded matrix, float32 (..., groups, size, n), with gradients by parameters."""
        scale, zero = self._scale(learned)
        numbers = self._numbers(learned)
        if "steps" in learned:
            numbers = _passing(learned["steps"], numbers)
        return _joined(numbers, scale, zero, self.groups.format)

    def pack(self, learned: Learned) -> QuantizedArray:
        """The packed matrix."""
        found, dtype = self.relaxed, self.groups.scale_dtype
        numbers = self._numbers(learned)
        if "scale" not in learned:
            operands = found.represented, found.represented_zero, self.groups.format
            return self.groups.pack(found.scale, found.zero, _joined(numbers, *operands))
        scale, zero = self._scale(learned)
        values = _joined(numbers, scale, zero, self.groups.format)
        if "zero" in learned and zero is not None:
            zero = zero.astype(dtype)
        return self.groups.pack(scale.astype(dtype), zero, values)

    def _numbers(self, learned: Learned) -> Array:
        """The numbers of the format nearest to the positions."""
        if "steps" not in learned:
            return self.relaxed.numbers
        zero = self.relaxed.represented_zero
        if zero is not None and self.groups.format.zero == "float":
            zero = jnp.zeros_like(zero)
        ones = jnp.ones_like(self.relaxed.represented)
        return scales.in_steps(learned["steps"], ones, zero, self.groups.format)[1]

    def _scale(self, learned: Learned) -> tuple[Array, Array | None]:
        """Scales, and zeros, that the dtype of scales represents."""
        scale, zero = self.relaxed.represented, self.relaxed.represented_zero
        dtype = self.groups.scale_dtype
        if "scale" in learned:
            change = jnp.clip(learned["scale"], -0.5, 1)
            least = jnp.where(scale > 0, scales.least(dtype), 0)
            scale = _stored(jnp.maximum(scale * (1 + change), least), dtype)
        if "zero" in learned and zero is not None:
            moved = learned["zero"] * self.relaxed.represented
            zero = _stored(zero.astype(jnp.float32) + moved, dtype)
        return scale, zero


def _joined(numbers: Array, scale: Array, zero: Array | None, format: Format) -> Array:
    values = numbers * rows_of(scale)
    return values + rows_of(zero) if zero is not None and format.zero == "float" else values


def _passing(values: Array, rounded: Array) -> Array:
    """Rounded values, with the gradients of the values."""
    return values + lax.stop_gradient(rounded - values)


def _stored(values: Array, dtype: Any) -> Array:
    return _passing(values, lax.optimization_barrier(values.astype(dtype)).astype(jnp.float32))


def learned(
    start: Any,
    rates: Any,
    loss: Callable[[Any, Array], Array],
    total: Callable[[Any], Array],
    steps: int,
) -> tuple[Any, Array]:
    """The parameters after gradient descent, or those at the start if these are better.

    **Arguments:**

    - `start`: a pytree of parameters.
    - `rates`: the change of each parameter in the first step, a pytree of the same structure.
    - `loss`: the error of parameters, for the number of a step.
    - `total`: the error of parameters, to judge the result by; or an error for each column of
      parameters (..., n), as (n,), if columns do not affect each other.

    **Returns:** the parameters, and their total error.
    """

    def step(i: Array, state: Any) -> Any:
        parameters, mean, square = state
        slope = jax.grad(loss)(parameters, i)
        mean = jax.tree.map(lambda m, g: _MOMENTUM * m + (1 - _MOMENTUM) * g, mean, slope)
        square = jax.tree.map(lambda v, g: _DECAY * v + (1 - _DECAY) * g * g, square, slope)
        done = (i + 1).astype(jnp.float32)
        part = 1 - i.astype(jnp.float32) / steps
        part = part * jnp.sqrt(1 - _DECAY**done) / (1 - _MOMENTUM**done)

        def moved(x: Array, rate: float, m: Array, v: Array) -> Array:
            return x - rate * part * m / (jnp.sqrt(v) + 1e-20)

        return jax.tree.map(moved, parameters, rates, mean, square), mean, square

    zeros = jax.tree.map(jnp.zeros_like, start)
    found, _, _ = lax.fori_loop(0, steps, step, (start, zeros, zeros))
    before, after = total(start), total(found)
    better = after < before
    found = jax.tree.map(lambda new, old: jnp.where(better, new, old), found, start)
    return found, jnp.where(better, after, before)
