"""One product as a custom call of CUDA (`xla_ffi/cuda_sequence.cc`)."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from .._core.dtypes import FLOATS
from .._core.format import Format
from . import call
from .extension import ffi
from .problem import Operands, Problem

_MOST_SIZE = 2**30  # k and n
FEW_ROWS_K, FEW_ROWS_GROUP = 64, 32
"""What k is a multiple of, and the least group, where qmm_sm90_stream scales few rows."""

_FLOAT32_PARTS = 3  # bfloat16 has 8 significant bits, float32 24


def unsupported(
    lhs: jnp.dtype, format: Format, *, sizes: Sequence[int] = (), transposed: bool = False
) -> str | None:
    """Why the kernels cannot compute this problem, or None."""
    if max(sizes, default=0) > _MOST_SIZE:
        return f"its kernels take k and n up to 2^30, this matrix has {max(sizes)}"
    looked_up = format.codebook is not None and format.float_dtype is None
    if looked_up and format.bits > ffi.MOST_TABLE_BITS:
        return (
            f"its kernels look up numbers of codebooks of up to {ffi.MOST_TABLE_BITS} bits, the "
            f"format has {format.bits}"
        )
    if lhs not in FLOATS:
        return call.unsupported_lhs(lhs)
    if lhs == jnp.float16 and format.outgrows_float16:
        return (
            "float16 does not hold numbers of this format times e4m3 scales, and with float32 lhs "
            "its kernels take no 8-bit scales"
        )
    if lhs != jnp.float32:
        return None
    if transposed or format.zero == "float":
        return "with float32 lhs its kernels take no float zero and no transposed product"
    if format.codebook is not None or format.scale is not None:
        return "with float32 lhs its kernels take integers with scales of 16 or 32 bits"
    return None


def unsupported_activations(values: jnp.dtype, format: Format) -> str | None:
    """Why the kernels multiply no 8-bit activations of this dtype by such weights, or None."""
    if values == jnp.int8:
        taken = format.codebook is None and format.bits in ffi.KERNEL_BITS
    else:
        taken = format.float_dtype == jnp.float8_e4m3fn
    if not taken:
        return "its kernels multiply int8 by integers of 4 and 8 bits, and float8_e4m3fn by e4m3"
    four_by_int8 = format.bits == 4 and values == jnp.int8
    if format.zero != "none" and not (four_by_int8 and format.zero == "integer"):
        return (
            "its kernels for 8-bit activations take no zeros but integers of 4 bits, beside int8: "
            f"the format has zero={format.zero!r}"
        )
    if format.scale is not None and not (four_by_int8 and format.scale == "int8"):
        return (
            "its kernels for 8-bit activations take no 8-bit scales but those of int4 that are "
            "integers, beside int8"
        )
    size = format.group_size
    if size != -1 and size != 64 and size % 128 != 0:
        return (
            "its kernels for 8-bit activations take groups of 64, multiples of 128 or whole "
            f"columns, the format has groups of {size}"
        )
    return None


def most_few_rows(format: Format) -> int:
    """The most rows of qmm_sm90_stream (`cuda/kernels/sm90_stream/plan.h`)."""
    return 32 if format.bits <= 4 else 16


def gathers(problem: Problem, operands: Operands) -> bool:
    """Whether the custom call itself gathers lhs: by the permutation of a single matrix."""
    matrix = operands.permutation is not None and operands.permutation.ndim == 1
    return matrix and operands.lhs.dtype != jnp.float32 and not problem.transposed


def parts_of(lhs: jnp.dtype) -> int:
    """The bfloat16 parts of activations: tensor cores multiply no float32."""
    return _FLOAT32_PARTS if lhs == jnp.float32 else 1


def matmul(problem: Problem, *operands: Array) -> Array:
    """`definition.matmul` as one custom call; a permutation is one for which `gathers` is true.

    Float32 activations are split into bfloat16 parts, which the kernel multiplies as more rows,
    exactly, and whose results are added.
    """
    lhs, packed, scale, zero, index, permutation = ops = problem.named(operands)
    batch, m = math.prod(ops.lead), math.prod(ops.rows)
    parts, factor = parts_of(lhs.dtype), None
    if parts > 1:
        lhs, factor = _in_range(lhs)
        lhs = _in_parts(lhs, len(ops.lead))
    scale, zero = call.as_read(scale, zero, problem.format, ops.lhs.dtype)
    product = call.Call("quantized_matmul")
    x = product.operand(*call.apart(lhs.reshape(batch, parts * m, lhs.shape[-1])))
    result = product.result((batch, parts * m, problem.columns), problem.out_dtype)
    order = None
    if permutation is not None:
        gathered = product.result(product.at(x).shape, lhs.dtype)
        order = (product.operand(permutation.reshape(problem.orders, -1)), gathered)
    number = product.add_product(
        call.stored(packed, scale, zero, index, problem.format),
        x,
        result,
        transposed=problem.transposed,
        permutation=order,
        scale_sums=parts > 1,
        half_sums=problem.half_sums,
    )
    product.multiply(number)
    (out,) = call.apart(product.run()[0])
    if factor is not None:
        out = out.reshape(batch, parts, m, problem.columns)[:, ::-1].sum(1)  # the smallest first
        out *= factor.reshape(batch, m, 1)
    return out.reshape(*ops.lead, *ops.rows, problem.columns)


def _in_range(lhs: Array) -> tuple[Array, Array]:
    """Float32 rows whose accumulators cannot overflow, and the factor to multiply results by.

    Rows that reach beyond 2^96 are divided by 2^32, which leaves room for the rounding of parts and
    for accumulators of up to 2^24 products with 8-bit integers.
    """
    large = jnp.max(jnp.abs(lhs), axis=-1, keepdims=True, initial=0) >= 2.0**96
    return lhs * jnp.where(large, 2.0**-32, 1.0), jnp.where(large, 2.0**32, 1.0)


def _in_parts(lhs: Array, axis: int) -> Array:
    """Float32 as bfloat16 values that add up to it, on a new axis."""
    parts = []
    for _ in range(_FLOAT32_PARTS):
        # XLA may drop a cast there and back, so the mantissa is reduced instead.
        part = lax.reduce_precision(lhs, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        lhs = jnp.where(jnp.isfinite(part), lhs - part, 0)
    return jnp.stack(parts, axis=axis)
