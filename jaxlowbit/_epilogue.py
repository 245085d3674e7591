"""What becomes of the sums of a product before they are rounded, in float32.

`activation(sums + bias) + residual`, and of a gated pair `activation(gate) * up`. The definition of
the calls in `_fused.py` and `_calls.py`; the kernels' is `cuda/epilogue.cuh`.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from ._array import QuantizedArray
from ._matmul import quantized_matmul

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

_ACTIVATIONS: dict[str | None, Callable[[Array], Array]] = {
    None: lambda x: x,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def check_activation(caller: str, activation: Any, *, optional: bool = False) -> None:
    if activation not in _ACTIVATIONS or (activation is None and not optional):
        raise ValueError(
            f"{caller}: activation={activation!r} is unknown; it is one of "
            f"{', '.join(map(repr, get_args(Activation)))}{', or None' if optional else ''}."
        )


def product(
    lhs: Array,
    rhs: QuantizedArray,
    bias: Array | None,
    activation: str | None,
    residual: Array | None,
    *,
    preferred_element_type: Any,
    **options: Any,
) -> Array:
    """`activation(lhs @ rhs + bias) + residual`, with a bias (*stack, n)."""
    sums = _sums(tuple(options.items()), lhs, rhs)
    if bias is not None and lhs.ndim > 1:
        bias = bias[..., None, :]
    out = _ACTIVATIONS[activation](_plus(sums, bias))
    return _plus(out, residual).astype(preferred_element_type or lhs.dtype)


def gated_product(
    lhs: Array,
    gate_up: QuantizedArray,
    bias: Array | None,
    activation: str,
    *,
    preferred_element_type: Any,
    out_sharding: Any,
    **options: Any,
) -> Array:
    """`activation(lhs @ gate + bias[0]) * (lhs @ up + bias[1])`, with a bias (2, n)."""
    if out_sharding is not None:
        spec = getattr(out_sharding, "spec", out_sharding)
        *rows, n = [*spec, *[None] * (lhs.ndim - len(spec))]
        out_sharding = jax.P(*rows, None, None, n)
    # The two weights are a batch, for which the axes of lhs are rows.
    options["out_sharding"] = out_sharding
    both = _sums(tuple(options.items()), lhs[..., None, None, :], gate_up)
    gate, up = (_plus(both[..., i, 0, :], None if bias is None else bias[i]) for i in range(2))
    return (_ACTIVATIONS[activation](gate) * up).astype(preferred_element_type or lhs.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sums(options: tuple[tuple[str, Any], ...], lhs: Array, rhs: QuantizedArray) -> Array:
    """`lhs @ rhs` in float32.

    Its tangents are rounded to the dtype of lhs, and so are its cotangents: no kernel multiplies
    float32 by transposed weights.
    """
    return quantized_matmul(lhs, rhs, preferred_element_type=jnp.float32, **dict(options))


@functools.partial(_sums.defjvp, symbolic_zeros=True)
def _sums_jvp(
    options: tuple[tuple[str, Any], ...], primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    lhs, rhs = primals
    rounded = functools.partial(quantized_matmul, **dict(options))
    out = _sums(options, lhs, rhs)
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


def _plus(sums: Array, addend: Array | None) -> Array:
    if addend is None:
        return sums
    addend = addend.astype(jnp.float32)
    return sums + addend.reshape(*[1] * (sums.ndim - addend.ndim), *addend.shape)
