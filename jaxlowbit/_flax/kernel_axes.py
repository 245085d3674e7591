"""Kernels of more than two axes: which matrix they are, and how inputs meet it."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax import Array

from .._core import explicit
from .._core.array import QuantizedArray
from .._matmul.api import quantized_matmul


@dataclasses.dataclass(frozen=True)
class KernelAxes:
    """The axes of a float kernel, which is quantized as a matrix (*batch, k, n).

    - `batch`, `contracted`, `features`: sizes of the axes that inputs and result share, that are
      summed over, and that only the result has. k is the product of the contracted ones, n that of
      the features.
    - `order`: where the float kernel has these axes; None if in this order.
    """

    batch: tuple[int, ...]
    contracted: tuple[int, ...]
    features: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return math.prod(self.contracted), math.prod(self.features)

    @property
    def matrix_ndim(self) -> int:
        """The axes of the matrix (*batch, k, n)."""
        return len(self.batch) + 2

    @property
    def flat_shape(self) -> tuple[int, int]:
        """The shape that Flax passes to the initialiser of a kernel with several axes."""
        k, n = self.matrix_shape
        return math.prod(self.batch) * k, n

    def matrix(self, weight: Array) -> Array:
        """The matrix (..., *batch, k, n) of a kernel with perhaps more leading axes, or flat."""
        sizes = (*self.batch, *self.contracted, *self.features)
        lead = weight.shape[: max(weight.ndim - len(sizes), 0)]
        if self.order is not None:
            axes = (*range(len(lead)), *(len(lead) + axis for axis in self.order))
            weight = weight.transpose(axes)
        return weight.reshape(*lead, *self.batch, *self.matrix_shape)

    def matrix_entries(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """The sharding of that matrix, given that of the kernel.

        An axis made of several is divided as the first of them is, whose parts are contiguous.
        """
        start = len(self.batch) + len(self.contracted)
        lead = len(entries) - start - len(self.features)
        own = [entries[lead + axis] for axis in self.order or range(len(entries) - lead)]
        return (*entries[:lead], *own[: len(self.batch)], own[len(self.batch)], own[start])

    def multiply(
        self,
        inputs: Array,
        kernel: QuantizedArray,
        batch: Sequence[int],
        contracted: Sequence[int],
        preferred_element_type: Any = None,
        bias: Array | None = None,
        activation_dtype: Any = None,
    ) -> Array:
        """The product (*batch, *rows, *features), like that of `jax.lax.dot_general`.

        `batch` and `contracted` are the axes of the inputs that meet those of the kernel, the
        others are rows. A bias (*batch, *features) is added before the product is rounded.
        """
        self._check(inputs, "batch", batch, self.batch)
        self._check(inputs, "contracted", contracted, self.contracted)
        rows = [axis for axis in range(inputs.ndim) if axis not in (*batch, *contracted)]
        sizes = tuple(inputs.shape[axis] for axis in rows)
        k, _ = self.matrix_shape
        lhs = inputs.transpose(*batch, *rows, *contracted)
        # Leading axes of lhs broadcast against those of a stack, which takes rows as one axis.
        lhs = lhs.reshape(*self.batch, *((math.prod(sizes),) if self.batch else sizes), k)
        if bias is not None:
            bias = bias.reshape(*self.batch, -1)
        out = quantized_matmul(
            lhs,
            kernel,
            bias=bias,
            activation_dtype=activation_dtype,
            preferred_element_type=preferred_element_type,
        )
        return out.reshape(*self.batch, *sizes, *self.features)

    def _check(self, inputs: Array, kind: str, axes: Sequence[int], sizes: tuple[int, ...]) -> None:
        found = tuple(inputs.shape[axis] for axis in axes)
        if found != sizes:
            raise ValueError(
                f"The inputs have shape {inputs.shape}, which is {found} along the {kind} axes "
                f"{tuple(axes)}, but the kernel has {sizes} there; pass inputs that agree."
            )


def positions(axes: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Axes counted from the front and sorted, as Flax matches them with those of the kernel."""
    if not all(-ndim <= axis < ndim for axis in axes):
        raise ValueError(
            f"The inputs have {ndim} axes, but the layer contracts the axes {tuple(axes)}; pass "
            "inputs with all of them."
        )
    return tuple(sorted(axis % ndim for axis in axes))


def as_tuple(sizes: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(sizes) if isinstance(sizes, Iterable) else (sizes,)


def check_batch(axes: Sequence[int]) -> None:
    if sorted(axes) != list(range(len(axes))):
        raise ValueError(
            f"The batch axes are {tuple(axes)}, but they are the first axes of the inputs, 0, 1 "
            "and so on; transpose the inputs."
        )


def place(product: Callable[..., Array], inputs: Array, kernel: Any, out_sharding: Any) -> Array:
    """`product(inputs, kernel)`, with `out_sharding` if it is not None; of a kernel and more."""
    if out_sharding is None:
        return product(inputs, kernel)
    return explicit.multiply(product, inputs, kernel, out_sharding)
