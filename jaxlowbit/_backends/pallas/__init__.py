"""Pallas kernels that read the packed words: for TPUs (`tpu.py`) and for GPUs (`triton.py`).

Pallas interprets the kernel for TPUs on the CPU.
"""

import functools
import importlib.util
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from ..._core.dequantize import take
from ..._core.format import Format
from .. import call
from ..float_scales import of_float_scales
from ..problem import Operands, Problem
from ..stored_rows import Product, of_stored_rows
from ..target import Target
from . import tpu, triton

PLATFORMS = ("cpu", "cuda", "tpu")
_BITS = (1, 2, 4, 8)


def unsupported(
    lhs: jnp.dtype, format: Format, *, sizes: Sequence[int], transposed: bool, built: bool
) -> str | None:
    """Returns None if the kernels support such products, else the reason."""
    del lhs, sizes, built  # all are supported
    if transposed:
        return "it has no kernel for the transposed product"
    if format.scale is not None:
        return call.NO_NARROW_SCALES
    if format.codebook is not None:
        return call.NO_CODEBOOK
    if format.bits not in _BITS:
        return f"its kernels read 1, 2, 4 or 8 bits, the format has {format.bits}"
    return None


def lower(problem: Problem, operands: Operands, target: Target) -> Product:
    del operands
    product = functools.partial(matmul, platform=target.platform)
    return of_float_scales(product) if problem.format.two_levels else product


@of_stored_rows
def matmul(problem: Problem, *operands: Array, platform: str | None) -> Array:
    """`definition.matmul` as one kernel; weights selected by an index are copied."""
    lhs, packed, scale, zero, index, _ = problem.named(operands)
    packed, scale, zero = take(packed, scale, zero, index)
    format, columns = problem.format, problem.columns
    lead = packed.shape[:-3]
    rows, k = lhs.shape[len(lead) : -1], lhs.shape[-1]
    batch, m = math.prod(lead), math.prod(rows)
    _check(batch, m, platform)
    lhs = lhs.reshape(batch, m, k)
    packed = packed.reshape(batch, *packed.shape[-3:])
    groups = [x.reshape(batch, *x.shape[-3:]) for x in (scale, zero) if x is not None]
    if platform == "cuda":
        out = triton.product(lhs, packed, groups, format)
    else:
        out = tpu.product(lhs, packed, groups, format, interpret=platform != "tpu")
    return out[:, :m, :columns].reshape(*lead, *rows, columns).astype(problem.out_dtype)


def _check(batch: int, m: int, platform: str | None) -> None:
    if not (isinstance(batch, int) and isinstance(m, int)):
        raise ValueError(
            f"quantized_matmul: backend='pallas' with {m} rows and a batch of {batch}, but its "
            "kernels need numbers; use backend=None or 'xla'."
        )
    if platform == "cuda" and importlib.util.find_spec(triton.MODULE) is None:
        raise ValueError(
            f"quantized_matmul: backend='pallas' for cuda, but jax {jax.__version__} has no "
            f"{triton.MODULE}; use backend=None or 'xla'."
        )
