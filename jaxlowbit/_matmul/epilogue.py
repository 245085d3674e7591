"""Epilogue: bias, activation and residual, applied in float32 before rounding.

`activation(accumulators + bias) + residual`, or `activation(gate) * up` for a gated pair. This file
is the definition; `cuda/kernels/epilogue.cuh` implements it in the kernels.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from .._core import checks
from .._core.array import QuantizedArray
from .._core.dtypes import FLOATS
from .options import Options
from .product import multiply

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
GatedActivation = Literal["silu", "gelu", "gelu_tanh", "relu", "gpt_oss"]
"""Activations of a gate and an up; only products of experts support all of them."""

_ACTIVATIONS: dict[str | None, Callable[[Array], Array]] = {
    None: lambda x: x,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}

GPT_OSS_ALPHA, GPT_OSS_LIMIT = 1.702, 7.0
"""Constants of `swiglu` in `gpt_oss/torch/model.py` of github.com/openai/gpt-oss."""


def check_activation(caller: str, activation: Any, *, optional: bool = False) -> None:
    checks.choice(caller, "activation", activation, get_args(Activation), optional=optional)


def checked_addend(
    caller: str, name: str, array: Any, shape: tuple[int, ...], rule: str
) -> Array | None:
    """Checks a bias or residual, whose required shape `rule` names, and returns it as an array."""
    if array is None:
        return None
    array = checks.array(caller, name, array, f"floats of the shape of {rule}")
    if array.dtype not in FLOATS:
        raise ValueError(
            f"{caller}: {name} is {array.dtype}, but it must be float32, bfloat16 or float16; cast "
            "it."
        )
    if array.shape != shape:
        raise ValueError(
            f"{caller}: {name} has shape {array.shape}, but it must be that of {rule}, {shape}; "
            "reshape or broadcast it."
        )
    return array


def product(
    lhs: Array,
    rhs: QuantizedArray,
    bias: Array | None,
    activation: str | None,
    residual: Array | None,
    options: Options,
) -> Array:
    """`activation(lhs @ rhs + bias) + residual`, with a bias (*stack, n)."""
    sums = accumulators(options.replace(preferred_element_type=None), lhs, rhs)
    if bias is not None and lhs.ndim > 1:
        bias = bias[..., None, :]
    return finished(sums, bias, activation, residual, options.out_dtype(lhs))


def finished(
    sums: Array, bias: Array | None, activation: str | None, residual: Array | None, out_dtype: Any
) -> Array:
    """`activation(sums + bias) + residual`, rounded once; a bias has an axis of rows."""
    out = _ACTIVATIONS[activation](_plus(sums, bias))
    return _plus(out, residual).astype(out_dtype)


def gated_product(
    lhs: Array,
    gate_up: QuantizedArray,
    bias: Array | None,
    activation: str | None,
    options: Options,
) -> Array:
    """`activation(lhs @ gate + bias[0]) * (lhs @ up + bias[1])`, with a bias (2, n)."""
    out_dtype, out_sharding = options.out_dtype(lhs), options.out_sharding
    if out_sharding is not None:
        spec = out_sharding
        if isinstance(spec, jax.NamedSharding):
            spec = spec.spec
        *rows, n = [*spec, *[None] * (lhs.ndim - len(spec))]
        out_sharding = jax.P(*rows, None, None, n)
    # The two weights are a batch, so the axes of lhs are rows.
    options = options.replace(preferred_element_type=None, out_sharding=out_sharding)
    both = accumulators(options, lhs[..., None, None, :], gate_up)
    gate, up = (_plus(both[..., i, 0, :], None if bias is None else bias[i]) for i in range(2))
    return gated(gate, up, activation, out_dtype)


def gated(gate: Array, up: Array, activation: str | None, out_dtype: Any) -> Array:
    """`activation(gate) * up` of float32 products, rounded once; `"gpt_oss"` changes up too."""
    if activation == "gpt_oss":
        gate = jnp.minimum(gate, GPT_OSS_LIMIT)
        up = jnp.clip(up, -GPT_OSS_LIMIT, GPT_OSS_LIMIT) + 1
        return (gate * jax.nn.sigmoid(GPT_OSS_ALPHA * gate) * up).astype(out_dtype)
    return (_ACTIVATIONS[activation](gate) * up).astype(out_dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def accumulators(options: Options, lhs: Array, rhs: QuantizedArray) -> Array:
    """`lhs @ rhs` in float32, without rounding.

    Its tangents and cotangents are rounded to the dtype of lhs, since no kernel multiplies float32
    by transposed weights.
    """
    return multiply(lhs, rhs, options.replace(preferred_element_type=jnp.float32))


@functools.partial(accumulators.defjvp, symbolic_zeros=True)
def _accumulators_jvp(
    options: Options, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    lhs, rhs = primals
    rounded = functools.partial(multiply, options=options)
    out = accumulators(options, lhs, rhs)
    lhs_dot, *dots = jax.tree.leaves(tangents)
    dot = jnp.zeros_like(out) if _is_zero(lhs_dot) else rounded(lhs_dot, rhs).astype(jnp.float32)
    leaves, treedef = jax.tree.flatten(rhs)
    moving = [i for i, leaf_dot in enumerate(dots) if not _is_zero(leaf_dot)]
    if moving:

        def moved(*values: Array) -> Array:
            changed = dict(zip(moving, values, strict=True))
            new = [changed.get(i, leaf) for i, leaf in enumerate(leaves)]
            return rounded(lhs, jax.tree.unflatten(treedef, new))

        at, along = ([values[i] for i in moving] for values in (leaves, dots))
        dot += jax.jvp(moved, at, along)[1].astype(jnp.float32)
    return out, dot


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0


def _plus(values: Array, addend: Array | None) -> Array:
    if addend is None:
        return values
    addend = addend.astype(jnp.float32)
    return values + addend.reshape(*[1] * (values.ndim - addend.ndim), *addend.shape)
