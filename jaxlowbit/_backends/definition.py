"""The definition: dequantize, then multiply, in plain jnp. Every other backend is held to it."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from .._core.dequantize import dequantize, take
from .problem import Problem
from .stored_rows import of_stored_rows

EXACT_K = 512
"""Products of int8 and integers up to 255 whose sums float32, and tensor cores, hold exactly."""


@of_stored_rows
def matmul(problem: Problem, *operands: Array) -> Array:
    """The product (*lead, *rows, k) x (*lead, k, n) -> (*lead, *rows, n), n being `columns`.

    Transposed, (*lead, *rows, n) x (*lead, k, n) -> (*lead, *rows, k), k being `columns`: the
    cotangent of lhs.

    The weights, defined in float32, are rounded once to the dtype of lhs; products accumulate in
    float32; the result is rounded once to `out_dtype`. With an index the weight of lead position i
    is `packed[index[i]]`. Where `out_dtype` is int32, lhs is int8, and the integers of the weights
    are multiplied, without float scales, exactly.
    """
    lhs, packed, scale, zero, index, _ = problem.named(operands)
    packed, scale, zero = take(packed, scale, zero, index)
    columns, transposed = problem.columns, problem.transposed
    k, n = (columns, lhs.shape[-1]) if transposed else (lhs.shape[-1], columns)
    if problem.sums_integers and not problem.format.scales_channels:
        scale = jnp.ones_like(scale)
    weight = dequantize(packed, scale, zero, format=problem.format, k=k, n=n)
    lead = packed.ndim - 3
    axes = tuple(range(lead))
    multiply = functools.partial(
        lax.dot_general,
        dimension_numbers=(((lhs.ndim - 1,), (lead + transposed,)), (axes, axes)),
        preferred_element_type=jnp.float32,
    )
    if problem.sums_integers:
        return _integer_sums(multiply, lhs.astype(jnp.float32), weight)
    return multiply(lhs, weight.astype(lhs.dtype)).astype(problem.out_dtype)


def _integer_sums(multiply: Callable[..., Array], lhs: Array, weight: Array) -> Array:
    """The product of integers of 8 bits in float32, (..., k) x (*lead, k, n), as int32.

    Any precision that a platform multiplies float32 in holds such integers. XLA's product of int8
    is not taken: without autotuning, that of jaxlib 0.11 gave twice the sums on an H200.
    """
    multiply = functools.partial(multiply, precision=lax.Precision.DEFAULT)
    parts = -(-lhs.shape[-1] // EXACT_K)
    if parts == 1:
        return multiply(lhs, weight).astype(jnp.int32)

    def divided(array: Array, axis: int) -> Array:
        """Parts of k on an axis in front; zeros follow the last."""
        pad = [(0, 0)] * array.ndim
        pad[axis] = (0, parts * EXACT_K - array.shape[axis])
        shape = (*array.shape[:axis], parts, EXACT_K, *array.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(array, pad).reshape(shape), axis, 0)

    def add(sums: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        return sums + multiply(*part).astype(jnp.int32), None

    lhs, weight = divided(lhs, lhs.ndim - 1), divided(weight, weight.ndim - 2)
    sums = multiply(lhs[0], weight[0]).astype(jnp.int32)
    return lax.scan(add, sums, (lhs[1:], weight[1:]))[0]
