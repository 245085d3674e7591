"""A product as a value: the parameter of the primitive, and the input of every backend."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._core.format import Format


class Operands(NamedTuple):
    """Values, tangents, batch axes or shardings of the operands, by name; None for absent ones.

    - `lhs`: (*lead, *rows, k).
    - `packed`, `scale`, `zero`: the arrays of the weights, with stack axes first; 8-bit scales as
      bits, uint8, without the tensor scale, which multiplies results. Without an index, the stack
      axes are the lead; with an index there is one stack axis, and the lead is the shape of the
      index.
    - `index`: positions in the stack.
    - `permutation`: (*stack, k), the order of the stored rows.
    """

    lhs: Any
    packed: Any
    scale: Any
    zero: Any
    index: Any
    permutation: Any

    def present(self) -> list[Any]:
        """The operands of the primitive: all that are not None, in order."""
        return [operand for operand in self if operand is not None]

    @property
    def lead(self) -> tuple[Any, ...]:
        """The sizes of the leading axes that lhs and the weights share."""
        return self.packed.shape[:-3] if self.index is None else self.index.shape

    @property
    def rows(self) -> tuple[Any, ...]:
        """The sizes of the axes of rows of lhs."""
        return self.lhs.shape[len(self.lead) : -1]


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static part of a product, hashable.

    - `format`: the format of the weights.
    - `columns`: the last axis of the result: n, or k of the transposed product.
    - `transposed`: whether weights multiply from the other side: the cotangent of lhs.
    - `indexed`: whether there is an index.
    - `orders`: the number of equal parts of k with separate permutations; 0 without any.
    - `out_dtype`: the dtype of the result; int32 for integer sums, with an int8 lhs.
    - `accumulate_float16`: whether kernels may accumulate in float16.
    - `backend`: the requested backend, or None.
    """

    format: Format
    columns: int
    transposed: bool
    indexed: bool
    orders: int
    out_dtype: Any
    accumulate_float16: bool
    backend: str | None

    def replace(self, **changes: Any) -> "Problem":
        return dataclasses.replace(self, **changes)

    @property
    def sums_integers(self) -> bool:
        """Whether int8 multiplies the integers of the weights, exactly and without float scales."""
        return self.out_dtype == jnp.int32

    @property
    def sums_dtype(self) -> Any:
        """The dtype of accumulators."""
        return jnp.dtype("int32" if self.sums_integers else "float32")

    def named(self, operands: Sequence[Any]) -> Operands:
        """The operands of this problem by name, given the operands that are not None."""
        lhs, packed, scale, *rest = operands
        zero = None if self.format.zero == "none" else rest.pop(0)
        index = rest.pop(0) if self.indexed else None
        return Operands(lhs, packed, scale, zero, index, rest.pop(0) if self.orders else None)
