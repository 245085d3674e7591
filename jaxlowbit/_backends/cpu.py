"""Products as a custom call of the CPU (`xla_ffi/cpu/`)."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from .._core.dtypes import FLOATS
from .._core.format import Format
from . import call
from .problem import Problem


def unsupported(
    lhs: jnp.dtype, format: Format, *, sizes: Sequence[int] = (), transposed: bool = False
) -> str | None:
    """Why the kernel cannot compute this problem, or None."""
    del format, sizes  # it takes all of them
    if lhs not in FLOATS:
        return call.unsupported_lhs(lhs)
    return "it has no kernel for the transposed product" if transposed else None


def matmul(problem: Problem, *operands: Array) -> Array:
    """`definition.matmul` of rows as they are stored, as one custom call."""
    ops = problem.named(operands)
    batch, m = math.prod(ops.lead), math.prod(ops.rows)
    lhs = ops.lhs.reshape(batch, m, ops.lhs.shape[-1])
    weights = call.weight_operands(ops.packed, ops.scale, ops.zero, ops.index, problem.format)
    result = jax.ShapeDtypeStruct((batch, m, problem.columns), problem.out_dtype)
    (out,) = jax.ffi.ffi_call(call.MATMUL_TARGET, [result])(
        lhs, *weights, **call.product_attributes(problem, scale_sums=False)
    )
    return out.reshape(*ops.lead, *ops.rows, problem.columns)
