"""Derivatives and batching of the primitive."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.interpreters import ad, batching

from .._backends import definition
from .._backends.problem import Operands, Problem
from .._backends.stored_rows import of_stored_rows
from .._core import indexing
from .primitive import quantized_matmul_p


def _bind(problem: Problem, *operands: Any) -> Array:
    return quantized_matmul_p.bind(*operands, problem=problem)


# The product is linear in lhs, and in scale and float zero together; the rest is integers.
def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, problem: Problem) -> Any:
    values, dots = problem.named(primals), problem.named(tangents)
    out = _bind(problem, *primals)
    terms = []
    if type(dots.lhs) is not ad.Zero:
        terms.append(_bind(problem, dots.lhs, *primals[1:]))
    float_zero = problem.format.zero == "float"
    if type(dots.scale) is not ad.Zero or (float_zero and type(dots.zero) is not ad.Zero):
        moved = values._replace(scale=ad.instantiate_zeros(dots.scale))
        if float_zero:
            moved = moved._replace(zero=ad.instantiate_zeros(dots.zero))
        terms.append(_bind(problem, *moved.present()))
    if not terms:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, functools.reduce(lax.add, terms)


ad.primitive_jvps[quantized_matmul_p] = _jvp


def _transpose(cotangent: Any, *operands: Any, problem: Problem) -> list[Any]:
    linear = [i for i, operand in enumerate(operands) if ad.is_undefined_primal(operand)]
    avals = [operands[i].aval for i in linear]
    if type(cotangent) is ad.Zero:
        cotangents = [ad.Zero(aval) for aval in avals]
    elif linear == [0]:
        # The cotangent is the transposed product with the same words; its transpose is this one.
        turned = problem.replace(
            columns=avals[0].shape[-1],
            transposed=not problem.transposed,
            out_dtype=avals[0].dtype,
        )
        cotangents = [_bind(turned, cotangent, *operands[1:])]
    else:
        cotangents = _definition_transpose(cotangent, operands, linear, avals, problem)
    found = dict(zip(linear, cotangents, strict=True))
    return [found.get(i) for i in range(len(operands))]


def _definition_transpose(
    cotangent: Array,
    operands: Sequence[Any],
    linear: list[int],
    avals: list[Any],
    problem: Problem,
) -> Sequence[Array]:
    """Cotangents of scale and float zero, as for the definition."""

    def product(*values: Array) -> Array:
        filled = dict(zip(linear, values, strict=True))
        return definition.matmul(problem, *(filled.get(i, x) for i, x in enumerate(operands)))

    # The product is affine in scale or float zero: its linear part, at zero, is transposed.
    at = [
        lax.pcast(jnp.zeros(aval.shape, aval.dtype), tuple(aval.mat.varying), to="varying")
        for aval in avals
    ]
    return jax.vjp(product, *at)[1](cotangent)


ad.primitive_transposes[quantized_matmul_p] = _transpose


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, problem: Problem) -> tuple[Array, int]:
    values, axes = problem.named(operands), problem.named(dims)
    mapped = {name for name, axis in axes._asdict().items() if axis is not None}
    if mapped == {"lhs"}:
        # The whole batch shares one weight, so it is more rows.
        axis = len(values.lead)
        return _bind(problem, jnp.moveaxis(values.lhs, axes.lhs, axis), *operands[1:]), axis
    if "permutation" in mapped and "packed" not in mapped:
        # Each element permutes the same words differently: gather activations instead.
        product = functools.partial(of_stored_rows(_bind), problem)
        return jax.vmap(product, in_axes=tuple(dims))(*operands), 0
    size = next(getattr(values, name).shape[getattr(axes, name)] for name in mapped)
    front: dict[str, Any] = {
        name: None if value is None else batching.bdim_at_front(value, getattr(axes, name), size)
        for name, value in values._asdict().items()
    }
    if problem.indexed and mapped <= {"lhs", "index"}:
        # Each element selects different weights from one stack.
        picked = values._replace(lhs=front["lhs"], index=front["index"])
        return _bind(problem, *picked.present()), 0
    if problem.indexed:
        # Each element has a different stack: concatenate them and index the result.
        lhs, index = front.pop("lhs"), front.pop("index")
        depth = front["packed"].shape[1]
        start = jnp.arange(size, dtype=jnp.int32).reshape(-1, *[1] * (index.ndim - 1)) * depth
        front = jax.tree.map(lambda stacks: stacks.reshape(-1, *stacks.shape[2:]), front)
        front |= {"lhs": lhs, "index": indexing.positions(index, depth) + start}
    return _bind(problem, *Operands(**front).present()), 0


batching.primitive_batchers[quantized_matmul_p] = _batch
