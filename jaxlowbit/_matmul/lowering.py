"""The lowering of products and of sequences of products, on every platform."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .._backends import definition, registry
from .._backends.problem import Problem
from .._backends.target import Target
from .._core import exporting
from .._core.layout import ATOM
from . import partition
from .primitive import quantized_matmul_p

Choose = Callable[[Any, Sequence[Any], Target | None], Callable[..., Any]]
"""Returns the function that computes the operands of a primitive.

Its arguments are the static parameter, the avals of the operands, and the target, which is None if
XLA partitions the program.
"""


def register(primitive: Primitive, choose: Choose) -> None:
    """Lowers a primitive with one static parameter to the function that `choose` returns."""
    for platform in (None, "cpu", "cuda", "tpu"):
        rule = functools.partial(_lower, primitive, choose, platform)
        mlir.register_lowering(primitive, rule, platform=platform)


def _lower(
    primitive: Primitive,
    choose: Choose,
    platform: str | None,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    **static: Any,
) -> Any:
    (parameter,) = static.values()
    divided = partition.divided(ctx)
    target = Target.of(ctx.module_context, platform) if divided is None else None
    function = choose(parameter, ctx.avals_in, target)
    if ctx.module_context.lowering_parameters.for_export:
        function = jax.named_scope(exporting.REMEDY)(function)
    lower = mlir.lower_fun(function, multiple_results=primitive.multiple_results)
    return lower(divided or ctx, *operands)


def _product(problem: Problem, avals: Sequence[Any], target: Target | None) -> Callable[..., Any]:
    """The function that computes a product on a target: by the requested backend, or by the
    target's custom call, or else by the definition."""
    if target is None:
        # XLA partitions the definition of a transposed product itself.
        product = definition.matmul if problem.transposed else partition.matmul
        return functools.partial(product, problem)
    name, operands, unfit = problem.backend, problem.named(avals), target.unfit
    if target.platform not in registry.PLATFORMS.get(name or "xla", (target.platform,)):
        raise ValueError(
            f"jaxlowbit: backend={name!r}, but this program is compiled for "
            f"{target.platform or 'another platform'}; use backend=None or 'xla'."
        )
    if unfit and name == "cuda":
        raise ValueError(f"jaxlowbit: backend='cuda', but {unfit}; use backend=None or 'xla'.")
    if math.prod(operands.lhs.shape[:-1]) == 0:
        return functools.partial(definition.empty, problem)
    name = target.platform if name is None else name
    n_blocks, k_blocks, _ = operands.packed.shape[-3:]
    sizes = (k_blocks * ATOM, n_blocks * ATOM)
    missing = (unfit if name == "cuda" else None) or registry.unsupported(
        name, operands.lhs.dtype, problem.format, sizes=sizes, transposed=problem.transposed
    )
    backend = definition if missing or name is None else registry.BACKENDS[name]
    return functools.partial(backend.lower(problem, operands, target), problem)


register(quantized_matmul_p, _product)
