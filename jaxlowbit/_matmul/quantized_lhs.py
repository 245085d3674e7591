"""Products of quantized activations, as compositions of a product and the scales of tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._core import checks, explicit
from .._core.activations import QuantizedActivations, quantize_activations, value_dtype
from .._core.array import QuantizedArray
from . import epilogue, fused
from .options import Options
from .product import multiply

EXACT = jnp.dtype("bfloat16")
"""A dtype that holds every value of 8 bits, in which kernels multiply them."""


def product(
    lhs: Any,
    rhs: QuantizedArray,
    activation_dtype: Any,
    options: Options,
    *,
    bias: Any,
    activation: Any,
    residual: Any,
) -> Array:
    """`quantized_matmul` of activations that are quantized, or are to be; checks all but `options`.

    **Raises:** what `quantized_matmul` raises.
    """
    caller, given = "quantized_matmul", isinstance(lhs, QuantizedActivations)
    if not given:
        lhs = checks.array(caller, "lhs", lhs, "activations (..., k)")
        activation_dtype = value_dtype(caller, "activation_dtype", activation_dtype)
    elif activation_dtype is not None:
        raise ValueError(
            f"{caller}: activation_dtype is {checks.brief(activation_dtype)}, but lhs is quantized "
            "already; leave activation_dtype out."
        )
    if options.precision is not None:
        raise ValueError(
            f"{caller}: precision is {options.precision}, but quantized activations are multiplied "
            "in bfloat16 with float32 sums; leave precision out."
        )
    floats, values = (jax.ShapeDtypeStruct(lhs.shape, dtype) for dtype in (lhs.dtype, EXACT))
    options.replace(backend=None).check(caller, floats, rhs)
    options.replace(preferred_element_type=None).check(caller, values, rhs)
    bias, residual = fused.checked(floats, rhs, bias, activation, residual)
    out_dtype, options = options.out_dtype(lhs), options.replace(preferred_element_type=None)
    if given:
        sums = accumulators(options, lhs, rhs)
    else:
        sums = straight_through(options, activation_dtype, lhs, rhs)
    if bias is not None and lhs.ndim > 1:
        bias = bias[..., None, :]
    return epilogue.finished(sums, bias, activation, residual, out_dtype)


def accumulators(options: Options, lhs: QuantizedActivations, rhs: QuantizedArray) -> Array:
    """`lhs @ rhs` in float32, not rounded: values are multiplied, then scaled."""
    options = options.replace(preferred_element_type=jnp.float32)
    sums = multiply(lhs.values.astype(EXACT), rhs, options)
    return sums * explicit.beside(lhs.scale, sums)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def straight_through(options: Options, dtype: Any, lhs: Array, rhs: QuantizedArray) -> Array:
    """`accumulators` of activations that are quantized on the way.

    The derivative takes their rounding for the identity (the straight-through estimator of Bengio
    et al., 2013): it is that of the product with the dequantized activations.
    """
    return accumulators(options, quantize_activations(lhs, dtype), rhs)


@straight_through.defjvp
def _straight_through_jvp(
    options: Options, dtype: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    lhs, rhs = primals
    product = functools.partial(epilogue.accumulators, options)
    dequantized = quantize_activations(lhs, dtype).dequantize()
    return straight_through(options, dtype, lhs, rhs), jax.jvp(
        product, (dequantized, rhs), tangents
    )[1]
