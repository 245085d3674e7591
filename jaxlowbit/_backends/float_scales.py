"""Scales of two levels as floats, for backends that read one scale for each group.

XLA expands them in front of the product: packed words stay as they are.
"""

import functools
from typing import Any

from jax import Array

from .._core import permutations, super_blocks
from .._core.dequantize import take
from .._core.layout import ATOM
from .problem import Problem
from .stored_rows import Product


def of_float_scales(product: Product) -> Product:
    """Makes a product that reads no scales of two levels one that does; of a stack, those of the
    weights that the index selects are expanded, whose words are copied."""

    @functools.wraps(product)
    def expanding(problem: Problem, *operands: Array, **options: Any) -> Array:
        ops = problem.named(operands)
        if problem.format.scale != "super":
            return product(problem, *operands, **options)
        packed, scale, zero = take(ops.packed, ops.scale, ops.zero, ops.index)
        permutation = ops.permutation
        if permutation is not None:
            permutation = permutations.selected(permutation, ops.index)
        rows = packed.shape[-2] * ATOM
        scale, zero, format = super_blocks.expanded(scale, zero, problem.format, rows)
        changed = problem.replace(format=format, indexed=False)
        ops = ops._replace(
            packed=packed, scale=scale, zero=zero, index=None, permutation=permutation
        )
        return product(changed, *ops.present(), **options)

    return expanding
