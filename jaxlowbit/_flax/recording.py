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
from jax import Array, lax
from jax.core import Tracer
from jax.experimental import io_callback

from .._composite.ragged_dot import ends_of_groups, groups_of_rows
from .._core.explicit import mesh_of
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
        self._known: dict[Any, tuple[Any, Any, Statistics]] = {}

    def add(
        self,
        name: str,
        inputs: Any,
        rows: Array,
        index: Any,
        stack: tuple[int, ...],
        sizes: Array | None = None,
    ) -> None:
        """Adds inputs (*batch, rows, k) of a matrix, or of the matrix at `index` of a stack; or
        inputs (rows, k) in groups of these sizes, one for each matrix of a stack.

        `inputs` is the operand of the product; weights with the same operand share statistics.
        """
        key = id(inputs), rows.shape, id(sizes)
        if key not in self._known:
            given = (rows, self.full) if sizes is None else (rows, sizes, self.full)
            compute = _statistics if sizes is None else _group_statistics
            self._known[key] = inputs, sizes, compute(*given)
        found = self._known[key][-1]
        if index is None:  # all matrices may share one axis of rows
            lead = found.rows.ndim
            found = jax.tree.map(lambda x: jnp.broadcast_to(x, (*stack, *x.shape[lead:])), found)
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


_ROWS = 128  # of a step of `_group_moments`


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
    sharding: Any = None

    @classmethod
    def recording(
        cls, name: str, weight: Any, equation: Equation, record: Record
    ) -> "RecordingView":
        """Makes the view of a weight, or of a stack of weights along leading axes."""
        matrix = equation.matrix(weight)
        plain = WeightView.of(FloatKernel(matrix), equation)  # pyright: ignore[reportArgumentType]
        fields = {x.name: getattr(plain, x.name) for x in dataclasses.fields(WeightView)}
        explicit = mesh_of(weight) is not None
        sharding = jax.typeof(weight).sharding if explicit else None
        stack = matrix.shape[:-2]
        return cls(**fields, name=name, record=record, stack=stack, sharding=sharding)

    def like(self) -> jax.ShapeDtypeStruct:
        """The type of the weight, with its sharding on a mesh with Explicit axes."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    def columns(self, tokens: Array) -> Array:
        matrix = self.kernel.weight  # pyright: ignore[reportAttributeAccessIssue]
        return jnp.moveaxis(jnp.take(matrix, tokens, axis=-1), 0, -1).astype(self.dtype)

    def product(self, lhs: Array, dtype: Any) -> Array:
        kernel: Any = self.kernel
        rows = lhs.reshape(*lhs.shape[: kernel.ndim - 2], -1, kernel.k)
        self.record.add(self.name, lhs, rows, kernel.index, self.stack)
        weight = kernel.weight.astype(lhs.dtype)
        return jnp.matmul(lhs, weight, preferred_element_type=dtype or lhs.dtype)

    def ragged_product(self, lhs: Array, sizes: Array, dtype: Any) -> Array:
        kernel: Any = self.kernel
        self.record.add(self.name, lhs, lhs, kernel.index, self.stack, sizes)
        options: Any = {"preferred_element_type": dtype or lhs.dtype}
        return lax.ragged_dot(lhs, kernel.weight.astype(lhs.dtype), sizes, **options)


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


@functools.partial(jax.jit, static_argnames="full")
def _group_statistics(rows: Array, sizes: Array, full: bool) -> Statistics:
    """The statistics (groups,) of rows (m, k), whose groups follow one another."""
    values, count = rows.astype(jnp.float32), len(sizes)
    ends = ends_of_groups(sizes, len(values))
    sizes = jnp.diff(ends, prepend=0)
    inside = (jnp.arange(len(values)) < ends[-1])[:, None]
    values = jnp.where(inside, values, 0)
    group = groups_of_rows(sizes, len(values))
    empty = jnp.zeros((count, values.shape[1]), jnp.float32)
    absmax = empty.at[group].max(jnp.abs(values))
    number = jnp.maximum(sizes, 1).astype(jnp.float32)
    if full:
        moments = _group_moments(values, sizes, ends) / number[:, None, None]
    else:
        moments = empty.at[group].add(values * values) / number[:, None]
    return Statistics(moments, absmax, sizes.astype(jnp.int32))


def _group_moments(values: Array, sizes: Array, ends: Array) -> Array:
    """The sums of `outer(x, x)` over the rows x of each group, (groups, k, k).

    A step adds up to `_ROWS` rows of one group: the work grows with the rows, not with the groups.
    """
    (m, k), count = values.shape, len(sizes)
    padded = jnp.pad(values, ((0, _ROWS), (0, 0)))
    parts = -(-sizes // _ROWS)
    steps = m // _ROWS + count  # at least the sum of parts
    group = groups_of_rows(parts, steps)
    first = jnp.arange(steps) - (jnp.cumsum(parts) - parts)[group]
    start = (ends - sizes)[group] + _ROWS * first

    def step(moments: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        group, start = part
        rows = lax.dynamic_slice_in_dim(padded, start, _ROWS)
        own = (start + jnp.arange(_ROWS) < ends[group])[:, None]
        rows = jnp.where(own, rows, 0)
        return moments.at[group].add(jnp.matmul(rows.T, rows, precision="highest")), None

    return lax.scan(step, jnp.zeros((count, k, k), jnp.float32), (group, start))[0]


def _sum(first: Statistics, second: Statistics) -> Statistics:
    return first + second
