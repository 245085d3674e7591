"""Records the inputs of float weights while code multiplies by them.

`weight_program.run` finds the products of code with a weight, in layers of Flax and of other
packages, raw parameters, `jit`, `scan` and `checkpoint`. Here the weights are floats, and each
product adds the statistics of its inputs to a `Record`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.experimental import io_callback

from ..quantizers import Statistics
from .equation import Equation
from .weight_view import WeightUseError, WeightView


class Record:
    """Statistics of the inputs of weights, by the names of the weights.

    - `full`: whether second moments are matrices.
    - `traced`: whether all products are in one trace, which returns the statistics. Otherwise
      products inside of traces, such as the body of a scan, use callbacks.
    - `statistics`: by name; for a stack of matrices, with the axes of the stack.
    - `inputs`: by name, a number that is equal for weights with the same inputs.
    """

    def __init__(self, full: bool, traced: bool = False) -> None:
        self.full, self.traced = full, traced
        self.statistics: dict[str, Statistics] = {}
        self.inputs: dict[str, int] = {}
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Any, Statistics]] = {}

    def add(self, name: str, inputs: Any, rows: Array, index: Any, stack: tuple[int, ...]) -> None:
        """Adds inputs (*batch, rows, k) of a matrix, or of the matrix at `index` of a stack.

        `inputs` is the operand of the product; weights with the same operand share statistics.
        """
        key = id(inputs), rows.shape
        if key not in self._known:
            self._known[key] = inputs, _statistics(rows, self.full)
        found = self._known[key][1]
        self.inputs.setdefault(name, key[0])
        if index is None and (self.traced or not isinstance(rows, Tracer)):
            self._add(name, found)
        else:
            call = functools.partial(self._add_at, name, stack)
            io_callback(call, None, () if index is None else index, found, ordered=True)

    def forget(self) -> None:
        """Ends a batch: from now on, equal ids no longer mean equal inputs."""
        self._known.clear()

    def _add(self, name: str, found: Statistics) -> None:
        before = self.statistics.get(name)
        self.statistics[name] = found if before is None else _sum(before, found)

    def _add_at(self, name: str, stack: tuple[int, ...], index: Any, found: Statistics) -> None:
        """Adds to the statistics of the matrix at `index` of a stack, or of all matrices for ()."""
        found = jax.tree.map(np.asarray, found)
        whole = () if isinstance(index, tuple) else stack
        empty = jax.tree.map(lambda x: np.zeros((*whole, *x.shape), x.dtype), found)
        held = self.statistics.setdefault(name, empty)
        before = jax.tree.map(lambda x: np.asarray(x)[index], held)
        new = _sum(before, found)
        for whole, part in zip(jax.tree.leaves(held), jax.tree.leaves(new), strict=True):
            whole[index] = part


@dataclasses.dataclass(frozen=True)
class FloatKernel:
    """A float matrix (*batch, k, n) with the attributes of a `QuantizedArray` that views read."""

    weight: Any
    index: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.weight.dtype

    @property
    def k(self) -> int:
        return self.shape[-2]

    @property
    def n(self) -> int:
        return self.shape[-1]

    def select(self, index: Array) -> "FloatKernel":
        if index.ndim:
            raise WeightUseError("selects several matrices of it by an array")
        return FloatKernel(self.weight[index], index)

    def __getitem__(self, index: Any) -> "FloatKernel":
        raise WeightUseError("takes a part of it along one of several batch axes")


@dataclasses.dataclass(frozen=True)
class RecordingView(WeightView):
    """A view of a float weight, whose products record their inputs."""

    name: str = ""
    record: Any = None
    stack: tuple[int, ...] = ()

    @classmethod
    def recording(
        cls, name: str, weight: Any, equation: Equation, record: Record
    ) -> "RecordingView":
        """Makes the view of a weight, or of a stack of weights along leading axes."""
        matrix = equation.matrix(weight)
        plain = WeightView.of(FloatKernel(matrix), equation)  # pyright: ignore[reportArgumentType]
        fields = {x.name: getattr(plain, x.name) for x in dataclasses.fields(WeightView)}
        return cls(**fields, name=name, record=record, stack=matrix.shape[:-2])

    def columns(self, tokens: Array) -> Array:
        matrix = self.kernel.weight  # pyright: ignore[reportAttributeAccessIssue]
        return jnp.moveaxis(jnp.take(matrix, tokens, axis=-1), 0, -1).astype(self.dtype)

    def product(self, lhs: Array, dtype: Any) -> Array:
        kernel: Any = self.kernel
        rows = lhs.reshape(*kernel.shape[:-2], -1, kernel.k)
        self.record.add(self.name, lhs, rows, kernel.index, self.stack)
        weight = kernel.weight.astype(lhs.dtype)
        return jnp.matmul(lhs, weight, preferred_element_type=dtype or lhs.dtype)

    def ragged_product(self, lhs: Array, sizes: Array, dtype: Any) -> Array:
        raise WeightUseError("multiplies groups of rows by it, whose statistics are not recorded")


@functools.partial(jax.jit, static_argnums=1)
def _statistics(rows: Array, full: bool) -> Statistics:
    """The statistics of inputs (*batch, rows, k)."""
    values = rows.astype(jnp.float32)
    count = jnp.full(values.shape[:-2], values.shape[-2], jnp.int32)
    absmax = jnp.max(jnp.abs(values), axis=-2)
    if full:
        product = jnp.matmul(jnp.swapaxes(values, -1, -2), values, precision="highest")
        return Statistics(product / values.shape[-2], absmax, count)
    return Statistics(jnp.mean(values * values, axis=-2), absmax, count)


def _sum(first: Statistics, second: Statistics) -> Statistics:
    return first + second
