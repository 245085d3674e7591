"""The definition: dequantize, then multiply, in plain jnp. Every other backend is held to it."""

import functools

import jax.numpy as jnp
from jax import Array, lax

from .._core.dequantize import dequantize, take
from .problem import Problem
from .stored_rows import of_stored_rows


@of_stored_rows
def matmul(problem: Problem, *operands: Array) -> Array:
    """The product (*lead, *rows, k) x (*lead, k, n) -> (*lead, *rows, n), n being `columns`.

    Transposed, (*lead, *rows, n) x (*lead, k, n) -> (*lead, *rows, k), k being `columns`: the
    cotangent of lhs.

    The weights, defined in float32, are rounded once to the dtype of lhs; products accumulate in
    float32; the result is rounded once to `out_dtype`. With an index the weight of lead position i
    is `packed[index[i]]`. Where `out_dtype` is int32, lhs is int8, and the integers of the weights
    are multiplied, without float scales.
    """
    lhs, packed, scale, zero, index, _ = problem.named(operands)
    packed, scale, zero = take(packed, scale, zero, index)
    columns, transposed = problem.columns, problem.transposed
    k, n = (columns, lhs.shape[-1]) if transposed else (lhs.shape[-1], columns)
    exact = problem.sums_integers
    if exact and problem.format.scale is None:
        scale = jnp.ones_like(scale)
    weight = dequantize(packed, scale, zero, format=problem.format, k=k, n=n)
    lead = packed.ndim - 3
    axes = tuple(range(lead))
    multiply = functools.partial(
        lax.dot_general,
        dimension_numbers=(((lhs.ndim - 1,), (lead + transposed,)), (axes, axes)),
        preferred_element_type=problem.sums_dtype,
    )
    if exact and problem.format.most_integer > 128:  # beyond int8: twice the half, and the rest
        weight = weight.astype(jnp.int16)
        half, rest = (x.astype(jnp.int8) for x in (weight >> 1, weight & 1))
        return 2 * multiply(lhs, half) + multiply(lhs, rest)
    return multiply(lhs, weight.astype(lhs.dtype)).astype(problem.out_dtype)
