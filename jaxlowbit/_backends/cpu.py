"""Products, and a transformer's block, as custom calls of the CPU (`cpu/`)."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._core.activations import EXACT
from .._core.array import QuantizedArray
from .._core.dtypes import FLOATS
from .._core.format import Format
from . import call, extension
from .block import add_block
from .extension import ffi
from .float_scales import of_float_scales
from .problem import Operands, Problem
from .stored_rows import Product, of_stored_rows
from .target import Target


def unsupported(
    lhs: jnp.dtype, format: Format, *, sizes: Sequence[int], transposed: bool, built: bool
) -> str | None:
    """Returns None if the kernel supports this problem, else the reason."""
    del format, sizes  # all are supported
    if built and (reason := extension.UNAVAILABLE["cpu"]):
        return reason
    if lhs not in FLOATS:
        return call.unsupported_lhs(lhs)
    return "it has no kernel for the transposed product" if transposed else None


def lower(problem: Problem, operands: Operands, target: Target) -> Product:
    del operands, target
    product = of_stored_rows(matmul) if problem.orders else matmul
    return of_float_scales(product) if problem.format.two_levels else product


def matmul(problem: Problem, *operands: Array) -> Array:
    """`definition.matmul` with rows in stored order, as one custom call."""
    ops = problem.named(operands)
    batch, m = math.prod(ops.lead), math.prod(ops.rows)
    product = call.Call("quantized_matmul")
    lhs = product.operand(ops.lhs.reshape(batch, m, ops.lhs.shape[-1]))
    result = product.result((batch, m, problem.columns), problem.out_dtype)
    weight = call.stored(*ops[1:5], problem.format)
    product.multiply(
        product.add_product(weight, lhs, result, accumulate_float16=problem.accumulate_float16)
    )
    (out,) = product.run(workspace=False)
    return out.reshape(*ops.lead, *ops.rows, problem.columns)


def unsupported_activations(values: jnp.dtype, rows: int, format: Format) -> str | None:
    """Returns None if a kernel of this CPU multiplies quantized activations faster than bfloat16,
    else the reason."""
    product = call.record(format, values, EXACT, m=rows)
    return ffi.unsupported_int8_on_cpu(product, extension.BUILD["cpu_isa"][0]) or None


def quantized(values: Array, scale: Array, rhs: QuantizedArray, *, out_dtype: jnp.dtype) -> Array:
    """`cuda_calls.quantized` for int8, as one CPU custom call."""
    rows, m = values.shape[:-1], math.prod(values.shape[:-1])
    product = call.Call("quantized_matmul")
    lhs = product.operand(values.reshape(1, m, rhs.k))
    lhs_scale = product.operand(scale.reshape(1, m))
    result = product.result((1, m, rhs.n), out_dtype)
    weight = call.stored_weight(rhs, jnp.dtype(jnp.bfloat16))
    product.multiply(product.add_product(weight, lhs, result, lhs_scale=lhs_scale))
    return product.run(workspace=False)[0].reshape(*rows, rhs.n)


def block(
    attended: Array,
    residual: Array,
    norm: Array,
    following_norm: Array | None,
    weights: Sequence[QuantizedArray],
    *,
    activation: str,
    epsilon: float,
) -> tuple[Array, ...]:
    """`cuda_calls.block` as one CPU custom call; all threads share each product."""
    rows, m = attended.shape[:-1], math.prod(attended.shape[:-1])
    block = call.Call("quantized_block")
    lhs, residual = call.apart(
        attended.reshape(1, m, attended.shape[-1]), residual.reshape(1, m, residual.shape[-1])
    )
    add_block(
        *(block, block.operand(lhs), residual, norm, following_norm, weights),
        read=lambda weight: call.stored_weight(weight, weight.scale.dtype),
        activation=activation,
    )
    results = block.run(workspace=False, epsilon=np.float32(epsilon))
    results = call.apart(*results[: 1 + len(weights) - 3])
    return tuple(x.reshape(*rows, x.shape[-1]) for x in results)
