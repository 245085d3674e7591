"""Gathers lhs before products of backends that do not support permutations.

Weights are never gathered at run time, only activations, which are smaller.
"""

import functools
from collections.abc import Callable
from typing import Any

from jax import Array

from .._core import permutations
from .problem import Operands, Problem

Product = Callable[..., Array]
"""A function `(problem, *operands)` that computes a product."""


def of_stored_rows(product: Product) -> Product:
    """Adds support for permutations to a product that multiplies rows in stored order."""

    @functools.wraps(product)
    def permuting(problem: Problem, *operands: Array, **options: Any) -> Array:
        ops = problem.named(operands)
        stored = problem.replace(orders=0)
        if ops.permutation is not None and problem.transposed:
            out = product(stored, *ops._replace(permutation=None).present(), **options)
            permutation = permutations.selected(ops.permutation, ops.index)
            return permutations.restore(out, permutation, problem.orders)
        return product(stored, *reordered(ops, problem.orders).present(), **options)

    return permuting


def reordered(ops: Operands, orders: int) -> Operands:
    """The operands with lhs in stored row order, and no permutation."""
    if ops.permutation is None:
        return ops
    permutation = permutations.selected(ops.permutation, ops.index)
    return ops._replace(lhs=permutations.permute(ops.lhs, permutation, orders), permutation=None)
