"""Expands two-level scales to floats, for backends that read one scale per group.

XLA expands them before the product; packed words are unchanged.
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
    """A product of two-level scales, by a product that lacks them. For a stack with an index, it
    expands only the scales of the selected weights, and copies their words."""

    @functools.wraps(product)
    def expanding(problem: Problem, *operands: Array, **options: Any) -> Array:
        ops = problem.named(operands)
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
