"""A single product as a CUDA custom call (`xla_ffi/cuda_sequence.cc`)."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .._core.activations import EXACT
from .._core.dtypes import FLOATS
from .._core.format import Format
from .._core.layout import ATOM
from . import call, extension
from .extension import ffi
from .float_scales import of_float_scales
from .problem import Operands, Problem
from .stored_rows import Product, of_stored_rows
from .target import Target

OLDEST, HOPPER = 80, 90  # compute capabilities
FLOAT32_PARTS = 3
"""The number of bfloat16 parts of float32 activations, which tensor cores do not multiply: bfloat16
has 8 significant bits, float32 24."""


def unsupported(
    lhs: jnp.dtype, format: Format, *, sizes: Sequence[int], transposed: bool, built: bool
) -> str | None:
    """Returns None if the kernels support this product on some GPU, else the reason."""
    if built and (reason := extension.UNAVAILABLE["cuda"]):
        return reason
    if lhs not in FLOATS:
        return call.unsupported_lhs(lhs)
    if lhs == jnp.float16 and format.outgrows_float16:
        return (
            "float16 does not hold numbers of this format times e4m3 scales, and with float32 lhs "
            "its kernels take no 8-bit scales"
        )
    k, n = sizes or (ATOM, ATOM)
    sums = lhs == jnp.float32
    dtypes = (EXACT, lhs) if sums else (lhs, lhs)
    fields = {"scale_accumulators": sums, "transposed": transposed}
    product = call.record(format, *dtypes, k=k, n=n, **fields)
    reason = ffi.unsupported(product, OLDEST) or None
    if reason is None and built and (what := ffi.compiled_for(product)):
        reason = extension.no_compiler(what)
    return reason


def unsupported_activations(
    values: jnp.dtype, format: Format, k: int = ATOM, *, built: bool = False
) -> str | None:
    """Returns None if Hopper kernels multiply 8-bit activations of this dtype by these weights,
    else the reason. `built`: as for `registry.unsupported`."""
    product = _of_bytes(values, format, k)
    reason = ffi.unsupported(product, HOPPER, "qmm_sm90") or None
    if reason is None and built:
        reason = extension.no_compiler(ffi.compiled_for(product))
    return reason


def unsupported_few_rows(rows: int, format: Format, k: int) -> str | None:
    """Returns None if the Hopper kernel for small M multiplies rounded rows in bfloat16."""
    product = call.record(format, EXACT, EXACT, m=rows, k=k, apply_lhs_scale=True)
    return ffi.unsupported(product, HOPPER, "qmm_sm90_stream") or None


def least_rows(values: jnp.dtype, format: Format, k: int) -> int:
    """The minimum M for 8-bit products of 8-bit values on Hopper; bfloat16 is faster below it."""
    return ffi.min_rows_for_8bit(_of_bytes(values, format, k))


def _of_bytes(values: jnp.dtype, format: Format, k: int) -> list[int]:
    return call.record(format, values, EXACT, k=call.padded_columns(k))


def reads_super_blocks(
    lhs: jnp.dtype, m: Any, k: int, n: int, format: Format, *, transposed: bool = False
) -> bool:
    """Whether Hopper kernels read two-level scales directly in a product of m rows, also in a
    gated pair; otherwise XLA expands them."""
    if not isinstance(m, int) or m == 0 or lhs == jnp.float32 or format.codebook is not None:
        return False
    products = [
        call.record(format, lhs, lhs, m=m, k=k, n=n, transposed=transposed, gated=gated)
        for gated in (False, True)
    ]
    if extension.no_compiler(ffi.compiled_for(products[0])) is not None:
        return False
    return not any(ffi.unsupported(product, HOPPER) for product in products)


def lower(problem: Problem, operands: Operands, target: Target) -> Product:
    whole = not problem.orders or gathers(problem, operands)
    product = matmul if whole else of_stored_rows(matmul)
    if not problem.format.two_levels:
        return product
    n_blocks, k_blocks, _ = operands.packed.shape[-3:]
    lhs, m, n = operands.lhs, math.prod(operands.rows), n_blocks * ATOM
    k = k_blocks * ATOM if problem.transposed else lhs.shape[-1]
    read = target.is_only(HOPPER) and reads_super_blocks(
        lhs.dtype, m, k, n, problem.format, transposed=problem.transposed
    )
    return product if read else of_float_scales(product)


def gathers(problem: Problem, operands: Operands) -> bool:
    """Whether the custom call gathers lhs itself: by the permutation of a single matrix."""
    matrix = operands.permutation is not None and operands.permutation.ndim == 1
    return matrix and operands.lhs.dtype != jnp.float32 and not problem.transposed


def matmul(problem: Problem, *operands: Array) -> Array:
    """`definition.matmul` as one custom call; `gathers` must be true for a permutation.

    Float32 activations are split into bfloat16 parts, which the kernel multiplies exactly as more
    rows; their results are added.
    """
    lhs, packed, scale, zero, index, permutation = ops = problem.named(operands)
    lead = ops.lead
    rows = lhs.shape[len(lead) : -1]
    batch, m = math.prod(lead), math.prod(rows)
    weight = call.stored(packed, scale, zero, index, problem.format, lhs.dtype)
    parts, factor = 1, None
    if lhs.dtype == jnp.float32:
        parts, (lhs, factor) = FLOAT32_PARTS, _in_range(lhs)
        lhs = _in_parts(lhs, len(lead))
    product = call.Call("quantized_matmul")
    x = product.operand(*call.apart(lhs.reshape(batch, parts * m, lhs.shape[-1])))
    result = product.result((batch, parts * m, problem.columns), problem.out_dtype)
    order = None
    if permutation is not None:
        gathered = product.result(product.at[x].shape, lhs.dtype)
        order = (product.operand(permutation.reshape(problem.orders, -1)), gathered)
    number = product.add_product(
        weight,
        x,
        result,
        transposed=problem.transposed,
        permutation=order,
        scale_accumulators=parts > 1,
        accumulate_float16=problem.accumulate_float16,
    )
    product.multiply(number)
    (out,) = call.apart(product.run()[0])
    if factor is not None:
        out = out.reshape(batch, parts, m, problem.columns)[:, ::-1].sum(1)  # the smallest first
        out *= factor.reshape(batch, m, 1)
    return out.reshape(*lead, *rows, problem.columns)


def _in_range(lhs: Array) -> tuple[Array, Array]:
    """Float32 rows whose accumulators cannot overflow, and the factor to multiply results by.

    Rows with magnitudes beyond 2^96 are divided by 2^32, which leaves room for the rounding of
    parts and for accumulators of up to 2^24 products with 8-bit integers.
    """
    large = jnp.max(jnp.abs(lhs), axis=-1, keepdims=True, initial=0) >= 2.0**96
    return lhs * jnp.where(large, 2.0**-32, 1.0), jnp.where(large, 2.0**32, 1.0)


def _in_parts(lhs: Array, axis: int) -> Array:
    """Splits float32 into bfloat16 values that add up to it, on a new axis."""
    parts = []
    for _ in range(FLOAT32_PARTS):
        # XLA may drop a round-trip cast, so reduce the mantissa instead.
        part = lax.reduce_precision(lhs, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        lhs = jnp.where(jnp.isfinite(part), lhs - part, 0)
    return jnp.stack(parts, axis=axis)
