"""`WeightView`: a packed weight with the casts, transpositions and indices that code applied to
it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._core.array import QuantizedArray
from .equation import Equation
from .input_factors import lookup, multiply, multiply_groups


class WeightUseError(ValueError):
    """Code uses a weight in a way that its packed form does not support; the message follows "it
    "."""


class Axis(NamedTuple):
    """An axis of the float weight.

    - `part`: "batch", "contracted" or "features".
    - `number`: its position among the axes of the same part.
    """

    part: str
    number: int
    size: int


@dataclasses.dataclass(frozen=True)
class WeightView:
    """A weight as code sees it after casts, transpositions, reshapes and indices.

    - `kernel`: the matrix (*batch, k, n); its batch axes are `batch`.
    - `dims`: for each visible axis, the axes of the float weight that it merges, the last one
      fastest; empty for an axis of size 1.
    - `batch`: the batch axes that have not been indexed yet.
    - `lhs_qtype`: the dtype of quantized inputs in products, or None.
    - `lhs_factor`: factors (*batch, k) that divide the inputs, or None.
    """

    kernel: QuantizedArray
    dims: tuple[tuple[Axis, ...], ...]
    batch: tuple[Axis, ...]
    contracted: tuple[Axis, ...]
    features: tuple[Axis, ...]
    dtype: Any
    lhs_qtype: Any = None
    lhs_factor: Array | None = None

    @classmethod
    def of(
        cls,
        kernel: QuantizedArray,
        equation: Equation,
        lhs_qtype: Any = None,
        lhs_factor: Array | None = None,
    ) -> "WeightView":
        """Makes the view of a whole weight, or of a stack of weights along leading axes.

        **Raises:** `ValueError` for a shard, as inside `jax.shard_map`.
        """
        if (kernel.k, kernel.n) != equation.matrix_shape:
            raise ValueError(
                f"A device has a part {kernel.shape} of a raw parameter whose matrix is "
                f"{equation.matrix_shape}, as inside jax.shard_map, but its code needs the whole; "
                "let jax.jit divide the product, on a mesh with Auto axes, or keep it in floats."
            )
        lead = kernel.shape[: kernel.ndim - equation.matrix_ndim]

        def named(part: str, sizes: Sequence[int]) -> tuple[Axis, ...]:
            return tuple(Axis(part, number, size) for number, size in enumerate(sizes))

        batch = named("batch", (*lead, *equation.batch))
        contracted = named("contracted", equation.contracted)
        features = named("features", equation.features)
        own = (*batch[len(lead) :], *contracted, *features)
        places = sorted(zip(equation.order, own, strict=True))  # by the axis of the float weight
        dims = tuple((axis,) for axis in (*batch[: len(lead)], *(axis for _, axis in places)))
        inputs = lhs_qtype, lhs_factor
        return cls(kernel, dims, batch, contracted, features, kernel.dtype, *inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(_size(dim) for dim in self.dims)

    def like(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the float weight."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def astype(self, dtype: Any) -> "WeightView":
        if not jnp.issubdtype(dtype, jnp.floating):
            raise WeightUseError(f"casts it to {jnp.dtype(dtype)}")
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def with_dims(self, dims: Sequence[tuple[Axis, ...]]) -> "WeightView":
        return dataclasses.replace(self, dims=tuple(dims))

    def transpose(self, permutation: Sequence[int]) -> "WeightView":
        return self.with_dims([self.dims[axis] for axis in permutation])

    def without(self, dim: int) -> "WeightView":
        """The view without a visible axis of size 1, left by `select`."""
        return self.with_dims([*self.dims[:dim], *self.dims[dim + 1 :]])

    def reshape(self, shape: Sequence[int]) -> "WeightView":
        """Merges visible axes, and splits merged ones."""
        axes = [axis for dim in self.dims for axis in dim]
        dims, at = [], 0
        for size in shape:
            start = at
            while at < len(axes) and _size(axes[start:at]) < size:
                at += 1
            if _size(axes[start:at]) != size:
                raise WeightUseError(f"reshapes it from {self.shape} to {tuple(shape)}")
            dims.append(tuple(axes[start:at]))
        # Axes of size 1 that follow belong to some axis.
        if dims and at < len(axes):
            dims[-1] += tuple(axes[at:])
        return self.with_dims(dims)

    def select(self, dim: int, index: Any) -> "WeightView":
        """Indexes a visible axis by a number, which leaves an axis of size 1, or by an integer
        array.

        The axes of an array come first. With one batch axis, kernels read the index on the device;
        with several, the chosen words are copied.
        """
        axes = self.dims[dim]
        if len(axes) != 1 or axes[0] not in self.batch:
            raise WeightUseError(f"takes a part of its axis {dim}, which is no batch axis")
        index = jnp.asarray(index)
        at = self.batch.index(axes[0])
        factor = self.lhs_factor
        if len(self.batch) == 1 and self.kernel.index is None:
            kernel = self.kernel.select(index)
            factor = None if factor is None else factor[index]
        elif index.ndim == 0:
            place = (slice(None),) * at + (index,)
            kernel = self.kernel[place]
            factor = None if factor is None else factor[place]
        else:
            raise WeightUseError("takes several matrices of one with more than one batch axis")
        unused = 1 + max(axis.number for axis in self.batch)
        new = tuple(Axis("batch", unused + i, size) for i, size in enumerate(index.shape))
        dims = [*self.dims]
        dims[dim] = ()
        batch = (*new, *(axis for axis in self.batch if axis != axes[0]))
        lead = [(axis,) for axis in new]
        changes: Any = {"kernel": kernel, "lhs_factor": factor, "batch": batch}
        return dataclasses.replace(self, dims=(*lead, *dims), **changes)

    def lookup(self, dim: int, tokens: Array) -> Array:
        """The rows (..., other axes) that `tokens` (...) select along the axis of the features."""
        if self.batch or self.dims[dim] != self.features or self.kernel.ndim != 2:
            raise WeightUseError(
                f"looks up parts of its axis {dim}, which is not that of the features"
            )
        if self.kernel.index is not None:
            raise WeightUseError("looks up features of one matrix of a stack")
        others = [axis for at, axes in enumerate(self.dims) if at != dim for axis in axes]
        rows = self.columns(tokens)
        rows = rows.reshape(*tokens.shape, *(axis.size for axis in self.contracted))
        lead = range(tokens.ndim)
        rows = rows.transpose(*lead, *(tokens.ndim + self.contracted.index(x) for x in others))
        sizes = [size for at, size in enumerate(self.shape) if at != dim]
        return rows.reshape(*tokens.shape, *sizes)

    def columns(self, tokens: Array) -> Array:
        """The columns (..., k) of the matrix at tokens (...)."""
        return lookup(self.kernel, tokens, self.dtype, self.lhs_factor)

    def product(self, lhs: Array, dtype: Any) -> Array:
        """The product of inputs (*batch, rows, k), or (..., k) without batch axes, in `dtype`."""
        return multiply(
            lhs,
            self.kernel,
            self.lhs_factor,
            lhs_qtype=self.lhs_qtype,
            preferred_element_type=dtype,
        )

    def multiply(
        self,
        inputs: Array,
        contracted: tuple[Sequence[int], Sequence[int]],
        batch: tuple[Sequence[int], Sequence[int]],
        *,
        inputs_first: bool = True,
        preferred_element_type: Any = None,
    ) -> Array:
        """`jax.lax.dot_general` of inputs and the weight, in this order or the other.

        `contracted` and `batch` are pairs: axes of the inputs, and the visible axes that they
        match.
        """
        added = self._added(contracted[1], batch[1])
        # Labels of the inputs' axes: the matching axes of the weight, and rows.
        places = zip((*contracted[0], *batch[0]), (*contracted[1], *batch[1]), strict=True)
        meets = {at: self.dims[dim] for at, dim in places}
        labels: list[Any] = []
        for at in range(inputs.ndim):
            labels += meets.get(at, [at])
        rows = [label for label in labels if not isinstance(label, Axis)]
        lhs = inputs.reshape([_extent(label, inputs) for label in labels])
        given = [axis for axis in self.batch if axis in labels]
        order = [labels.index(label) for label in (*given, *rows, *self.contracted)]
        sizes = [inputs.shape[at] for at in rows]
        stack = [axis.size if axis in given else 1 for axis in self.batch]
        lead = (*stack, math.prod(sizes)) if stack else sizes
        dtype = jnp.float32 if added or preferred_element_type == jnp.float32 else None
        out = self.product(lhs.transpose(order).reshape(*lead, self.kernel.k), dtype)
        found = [*self.batch, *rows, *self.features]
        out = out.reshape([_extent(label, inputs) for label in found])
        if added:
            out = out.sum([found.index(axis) for axis in added])
            found = [label for label in found if label not in added]
        out = out.astype(preferred_element_type or inputs.dtype)
        free = [dim for at, dim in enumerate(self.dims) if at not in (*contracted[1], *batch[1])]
        # Orders the result as `dot_general` does: batch axes, then the free axes of each operand.
        shared = [self.dims[dim] for dim in batch[1]]
        others = [[(row,) for row in rows], free]
        wanted = [*shared, *(dim for part in others[:: 1 if inputs_first else -1] for dim in part)]
        out = out.transpose([found.index(label) for dim in wanted for label in dim])
        return out.reshape([math.prod(_extent(x, inputs) for x in dim) for dim in wanted])

    def ragged_product(self, lhs: Array, sizes: Array, dtype: Any) -> Array:
        """The product of rows (m, k) in groups of these sizes, each with its matrix, in `dtype`."""
        options = {"lhs_qtype": self.lhs_qtype, "preferred_element_type": dtype}
        return multiply_groups(lhs, self.kernel, sizes, self.lhs_factor, **options)

    def multiply_groups(
        self,
        inputs: Array,
        contracted: tuple[Sequence[int], Sequence[int]],
        group: int,
        sizes: Array,
        *,
        preferred_element_type: Any = None,
    ) -> Array:
        """`jax.lax.ragged_dot` of inputs and the weight, whose matrices are along the visible axis
        `group`."""
        if len(self.batch) != 1 or self.dims[group] != self.batch:
            raise WeightUseError(
                f"multiplies groups of rows by its axis {group}, which is not its one batch axis"
            )
        if self._added(contracted[1], ()):
            raise WeightUseError("sums over its batch axis in a product of groups of rows")
        meets = dict(zip(contracted[0], (self.dims[dim] for dim in contracted[1]), strict=True))
        (row,) = (at for at in range(inputs.ndim) if at not in meets)
        labels: list[Any] = [x for at in range(inputs.ndim) for x in meets.get(at, (at,))]
        lhs = inputs.reshape([_extent(label, inputs) for label in labels])
        order = [labels.index(label) for label in (row, *self.contracted)]
        lhs = lhs.transpose(order).reshape(inputs.shape[row], self.kernel.k)
        dtype = jnp.float32 if preferred_element_type == jnp.float32 else None
        out = self.ragged_product(lhs, sizes, dtype)
        out = out.astype(preferred_element_type or inputs.dtype)
        free = [dim for at, dim in enumerate(self.dims) if at not in (*contracted[1], group)]
        out = out.reshape(-1, *(axis.size for axis in self.features))
        order = [1 + self.features.index(axis) for dim in free for axis in dim]
        return out.transpose(0, *order).reshape(-1, *map(_size, free))

    def _added(self, contracted: Sequence[int], batch: Sequence[int]) -> list[Axis]:
        """The batch axes, such as experts, that a product sums over.

        **Raises:** `WeightUseError` for a product other than the equation's.
        """
        summed = [axis for dim in contracted for axis in self.dims[dim]]
        added = [axis for axis in summed if axis in self.batch]
        if sorted(set(summed) - set(added)) != sorted(self.contracted):
            raise WeightUseError(
                f"sums over its axes {tuple(contracted)} in the shape {self.shape}, which are "
                "not those that the equation contracts"
            )
        if not all(axis in self.batch for dim in batch for axis in self.dims[dim]):
            raise WeightUseError(
                f"takes its axes {tuple(batch)} in the shape {self.shape} as batch axes, which "
                "the equation does not"
            )
        return added


def has_algorithm(precision: Any) -> bool:
    """Whether a `precision` names an algorithm. Others need no action, since accumulation is
    float32."""
    found = precision if isinstance(precision, tuple) else (precision,)
    return not all(isinstance(x, lax.Precision | None) for x in found)


def _size(axes: Sequence[Axis]) -> int:
    return math.prod(axis.size for axis in axes)


def _extent(label: Any, inputs: Array) -> int:
    """The size of an axis of the weight, or of an axis of the inputs by its number."""
    return label.size if isinstance(label, Axis) else inputs.shape[label]
