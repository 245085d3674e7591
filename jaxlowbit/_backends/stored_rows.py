"""Products whose backend knows no permutation: lhs is gathered in front of them.

Weights are never gathered at run time; activations, which are smaller, are.
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
    """Makes a product with the rows as they are stored one with the matrix they stand for."""

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
    """The operands with lhs in the order of the stored rows, and no permutation."""
    if ops.permutation is None:
        return ops
    permutation = permutations.selected(ops.permutation, ops.index)
    return ops._replace(lhs=permutations.permute(ops.lhs, permutation, orders), permutation=None)
