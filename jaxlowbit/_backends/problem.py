"""The product as a value: what the primitive is bound with and every backend is given."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._core.format import Format


class Operands(NamedTuple):
    """Values, tangents, batch axes or shardings of the operands, by name; None for absent ones.

    - `lhs`: (*lead, *rows, k).
    - `packed`, `scale`, `zero`: the arrays of the weights, with stacked axes in front; of 8-bit
      scales the bits, uint8, and no tensor scale, which multiplies results. Without an
      index these are the lead; with one there is one stacked axis, and the lead is the shape of the
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
        """The operands that are there, in order: what a primitive is bound with."""
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
    """What a product computes, hashable.

    - `format`: the format of the weights.
    - `columns`: the last axis of the result: n, or k of the transposed product.
    - `transposed`: whether weights multiply from the other side: the cotangent of lhs.
    - `indexed`: whether there is an index.
    - `orders`: the equal parts of k with an order of rows of their own; 0 without a permutation.
    - `out_dtype`: the dtype of the result; int32 for sums of integers, of an int8 lhs.
    - `half_sums`: whether kernels may accumulate in float16.
    - `backend`: the backend that is asked for, or None.
    """

    format: Format
    columns: int
    transposed: bool
    indexed: bool
    orders: int
    out_dtype: Any
    half_sums: bool
    backend: str | None

    def replace(self, **changes: Any) -> "Problem":
        return dataclasses.replace(self, **changes)

    @property
    def sums_integers(self) -> bool:
        """Whether int8 multiplies the integers of the weights, exactly and without float scales."""
        return self.out_dtype == jnp.int32

    @property
    def sums_dtype(self) -> Any:
        """The dtype in which products are added."""
        return jnp.dtype("int32" if self.sums_integers else "float32")

    def named(self, operands: Sequence[Any]) -> Operands:
        """The operands of this problem by name, given those that are present."""
        lhs, packed, scale, *rest = operands
        zero = None if self.format.zero == "none" else rest.pop(0)
        index = rest.pop(0) if self.indexed else None
        return Operands(lhs, packed, scale, zero, index, rest.pop(0) if self.orders else None)
