"""The definition: dequantize, then multiply, in plain jnp. Other backends are tested against it."""

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

from .._core.dequantize import dequantize, take
from .._core.format import Format
from .problem import Operands, Problem
from .stored_rows import Product, of_stored_rows
from .target import Target


def unsupported(
    lhs: jnp.dtype, format: Format, *, sizes: Sequence[int], transposed: bool, built: bool
) -> None:
    """Returns None: the definition computes every product."""


def lower(problem: Problem, operands: Operands, target: Target) -> Product:
    del problem, operands, target
    return matmul


def empty(problem: Problem, lhs: Array, *operands: Array) -> Array:
    """A product without rows."""
    del operands
    return jnp.zeros((*lhs.shape[:-1], problem.columns), problem.out_dtype)


EXACT_K = 512
"""Number of products of int8 and integers up to 255 that float32, and tensor cores, sum exactly."""


@of_stored_rows
def matmul(problem: Problem, *operands: Array) -> Array:
    """The product (*lead, *rows, k) x (*lead, k, n) -> (*lead, *rows, n), where n is `columns`.

    Transposed, (*lead, *rows, n) x (*lead, k, n) -> (*lead, *rows, k), where k is `columns`: the
    cotangent of lhs.

    The weights, defined in float32, are rounded once to the dtype of lhs; products accumulate in
    float32; the result is rounded once to `out_dtype`. With an index, the weight of lead position i
    is `packed[index[i]]`. With `out_dtype` int32, lhs is int8 and multiplies the integers of the
    weights exactly, without float scales.
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
    """The product of 8-bit integers in float32, (..., k) x (*lead, k, n), as int32.

    Such integers are exact at any float32 matmul precision of a platform. XLA's int8 product is not
    used: in jaxlib 0.11, without autotuning, it returned twice the sums on an H200.
    """
    multiply = functools.partial(multiply, precision=lax.Precision.DEFAULT)
    parts = -(-lhs.shape[-1] // EXACT_K)
    if parts == 1:
        return multiply(lhs, weight).astype(jnp.int32)

    def divided(array: Array, axis: int) -> Array:
        """Splits k into parts on a new leading axis, padding the last with zeros."""
        pad = [(0, 0)] * array.ndim
        pad[axis] = (0, parts * EXACT_K - array.shape[axis])
        shape = (*array.shape[:axis], parts, EXACT_K, *array.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(array, pad).reshape(shape), axis, 0)

    def add(sums: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        return sums + multiply(*part).astype(jnp.int32), None

    lhs, weight = divided(lhs, lhs.ndim - 1), divided(weight, weight.ndim - 2)
    sums = multiply(lhs[0], weight[0]).astype(jnp.int32)
    return lax.scan(add, sums, (lhs[1:], weight[1:]))[0]
