"""Lowering of the primitive: to a custom call, to Pallas, or to the definition."""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.interpreters import mlir

from .._backends import cuda, custom_calls, definition, pallas, selection
from .._backends.float_scales import of_float_scales
from .._backends.problem import Operands, Problem
from .._backends.stored_rows import Product, of_stored_rows
from .._core import exporting
from .._core.layout import ATOM
from . import partition
from .primitive import quantized_matmul_p
from .support import only_gpus_of, unfit_gpus

# Backends that run on some platforms only.
_PLATFORMS: dict[str | None, tuple[str | None, ...]] = {
    "cuda": ("cuda",),
    "cpu": ("cpu",),
    "pallas": pallas.PLATFORMS,
}


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: Any, problem: Problem, platform: str | None
) -> Any:
    divided = partition.divided(ctx)
    if divided is None:
        unfit = unfit_gpus(ctx.module_context) if platform == "cuda" else None
        operands_in = problem.named(ctx.avals_in)
        product = _product(platform, unfit, problem, operands_in)
        if problem.format.scale == "two_level" and product is not definition.matmul:
            kernels = platform == "cuda" and problem.backend != "pallas"
            hopper = kernels and only_gpus_of(90, ctx.module_context)
            if not (hopper and _reads_super_blocks(problem, operands_in)):
                product = of_float_scales(product)
    elif problem.transposed:
        # XLA partitions the definition itself; the rules here are for the other backends.
        product, divided = definition.matmul, None
    else:
        product = partition.matmul
    traced = exporting.with_remedy(ctx, functools.partial(product, problem))
    lower = mlir.lower_fun(traced, multiple_results=False)
    return lower(divided or ctx, *operands)


for _platform in (None, "cpu", "cuda", "tpu"):
    _rule = functools.partial(_lower, platform=_platform)
    mlir.register_lowering(quantized_matmul_p, _rule, platform=_platform)


def _product(
    platform: str | None, unfit: str | None, problem: Problem, operands: Operands
) -> Product:
    """The product on `platform`, by the requested backend or the best one there.

    `unfit` is the reason why the kernels do not run on the device, if this is known; `operands` are
    shapes and dtypes.
    """
    backend = problem.backend
    if platform not in _PLATFORMS.get(backend, (platform,)):
        raise ValueError(
            f"jaxlowbit: backend={backend!r}, but this program is compiled for "
            f"{platform or 'another platform'}; use backend=None or 'xla'."
        )
    if backend == "cuda" and unfit:
        raise ValueError(f"jaxlowbit: backend='cuda', but {unfit}; use backend=None or 'xla'.")
    if math.prod(operands.lhs.shape[:-1]) == 0:
        return _empty
    if backend == "pallas" and not problem.transposed:
        return functools.partial(pallas.matmul, platform=platform)
    if platform is None or unfit or backend in ("xla", "pallas"):
        return definition.matmul
    n_blocks, k_blocks, _ = operands.packed.shape[-3:]
    reason = custom_calls.unsupported(
        platform,
        operands.lhs.dtype,
        problem.format,
        sizes=(k_blocks * ATOM, n_blocks * ATOM),
        transposed=problem.transposed,
    )
    if reason is not None:
        return definition.matmul
    product = custom_calls.PRODUCTS[platform]
    if not problem.orders or (platform == "cuda" and cuda.gathers(problem, operands)):
        return product
    return of_stored_rows(product)


def _reads_super_blocks(problem: Problem, operands: Operands) -> bool:
    """Whether a Hopper kernel reads scales of two levels directly."""
    n_blocks, k_blocks, _ = operands.packed.shape[-3:]
    lhs, n = operands.lhs, n_blocks * ATOM
    m = math.prod(operands.rows)
    k = k_blocks * ATOM if problem.transposed else lhs.shape[-1]
    return selection.reads_super_blocks(
        lhs.dtype, m, k, n, problem.format, transposed=problem.transposed
    )


def _empty(problem: Problem, lhs: Array, *operands: Array) -> Array:
    del operands
    return jnp.zeros((*lhs.shape[:-1], problem.columns), problem.out_dtype)
