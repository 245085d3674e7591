"""Rules of both primitives for `jax.experimental.jet`, which computes Taylor coefficients."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._backends.problem import Operands, Problem
from .call import Call, _call_p
from .primitive import quantized_matmul_p

Series = Sequence[Sequence[Any]]
"""The coefficients of each operand from the first order on, not scaled by factorials."""


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _product(
    primals: Sequence[Any], series: Series, *, problem: Problem
) -> tuple[Array, list[Array]]:
    """The Cauchy product of two series: lhs, and scale with float zero.

    Other operands are integers, with zero coefficients.
    """
    orders = range(1 + len(series[0]))
    constant = problem.named(primals)
    terms = [constant, *(problem.named(kth) for kth in zip(*series, strict=True))]
    lhs = [term.lhs for term in terms] if _is_float(constant.lhs) else [constant.lhs]
    weights: list[Operands] = [constant]
    if _is_float(constant.scale):
        for term in terms[1:]:
            zero = term.zero if problem.format.zero == "float" else constant.zero
            weights.append(constant._replace(scale=term.scale, zero=zero))

    def coefficient(order: int) -> Array:
        products = [
            quantized_matmul_p.bind(*weight._replace(lhs=lhs[order - i]).present(), problem=problem)
            for i, weight in enumerate(weights)
            if 0 <= order - i < len(lhs)
        ]
        return sum(products[1:], start=products[0])

    first, *others = (coefficient(order) for order in orders)
    return first, others


def _call(primals: Sequence[Any], series: Series, *, call: Call) -> Any:
    raise NotImplementedError(
        f"jax.experimental.jet: a call of several operations ({type(call).__name__}) has no Taylor "
        "coefficients, because jet does not pass through its custom derivatives; compute it from "
        "single products, such as `activation(lhs @ rhs + bias)`, or nest jax.jvp."
    )


try:
    from jax.experimental.jet import jet_rules
except ImportError:  # a later JAX may drop the experiment
    pass
else:
    jet_rules[quantized_matmul_p] = _product
    jet_rules[_call_p] = _call
