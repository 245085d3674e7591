"""The primitive and its operands by name. `_matmul.py` has its rules."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import xla

from ._formats import Format

# Operands: lhs (*lead, *rows, k), packed, scale, zero if the format has one, index if `indexed`,
# permutation (*stack, k) if `orders` is not 0, which then many equal parts of k have of their own.
# Without an index the stacked axes of the weights are the lead; with one, the weights have one
# stacked axis and the lead is the shape of the index.
quantized_matmul_p = Primitive("quantized_matmul")
quantized_matmul_p.def_impl(functools.partial(xla.apply_primitive, quantized_matmul_p))


@dataclasses.dataclass
class Operands:
    """Values, tangents, batch axes or shardings of the operands; None for those left out."""

    lhs: Any
    packed: Any
    scale: Any
    zero: Any
    index: Any
    permutation: Any

    @classmethod
    def of(
        cls,
        operands: Sequence[Any],
        *,
        format: Format,
        indexed: bool,
        orders: int = 0,
        **params: Any,
    ) -> "Operands":
        del params
        lhs, packed, scale, *rest = operands
        zero = None if format.zero == "none" else rest.pop(0)
        index = rest.pop(0) if indexed else None
        return cls(lhs, packed, scale, zero, index, rest.pop(0) if orders else None)

    def named(self) -> dict[str, Any]:
        return dict(vars(self))

    def stored(self) -> dict[str, Any]:
        """What a backend multiplies, by name: rows are as they are stored."""
        return {name: value for name, value in vars(self).items() if name != "permutation"}

    def present(self) -> list[Any]:
        return [operand for operand in self.named().values() if operand is not None]

    def replace(self, **changes: Any) -> "Operands":
        return dataclasses.replace(self, **changes)

    def bind(self, **params: Any) -> Array:
        params["indexed"] = self.index is not None
        params["orders"] = 0 if self.permutation is None else params["orders"]
        return quantized_matmul_p.bind(*self.present(), **params)

    @property
    def lead_ndim(self) -> int:
        return len(self.packed.shape) - 3 if self.index is None else len(self.index.shape)
