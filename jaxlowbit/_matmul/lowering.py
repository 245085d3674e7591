"""The lowering of products and of sequences of products, on every platform."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir

from .._backends import definition, registry
from .._backends.problem import Problem
from .._backends.target import Target
from .._core import exporting
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
    function = exporting.with_remedy(ctx, choose(parameter, ctx.avals_in, target))
    lower = mlir.lower_fun(function, multiple_results=primitive.multiple_results)
    return lower(divided or ctx, *operands)


def _product(problem: Problem, avals: Sequence[Any], target: Target | None) -> Callable[..., Any]:
    if target is not None:
        product = registry.lower(problem, problem.named(avals), target)
    else:
        # XLA partitions the definition of a transposed product itself.
        product = definition.matmul if problem.transposed else partition.matmul
    return functools.partial(product, problem)


register(quantized_matmul_p, _product)
