"""Times of kernels on a GPU, by a custom call that launches each choice and waits."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from . import call
from .extension import ffi
from .selection import Choice, Product


def times(
    lhs: Array,
    packed: Array,
    scale: Array,
    zero: Array | None,
    *,
    product: Product,
    calls: int,
    choices: tuple[Choice, ...],
) -> Array:
    """Microseconds (choices,) of `lhs` times a matrix, on a GPU, the median for each choice.

    A measurement multiplies by `calls` matrices of the stack (`packed`, `scale`, `zero`) in turn.
    """
    m, n = product.m, product.n
    results = [
        jax.ShapeDtypeStruct((1, m, n), lhs.dtype),
        jax.ShapeDtypeStruct((call.workspace_bytes(1, m, n),), jnp.uint8),
        jax.ShapeDtypeStruct((len(choices),), jnp.float32),
    ]
    numbers = [(ffi.KERNELS.index(choice.kernel), *choice[1:]) for choice in choices]
    *_, microseconds = jax.ffi.ffi_call(call.TIMES_TARGET, results)(
        lhs[None],
        *call.weight_operands(packed, scale, zero, jnp.zeros(1, jnp.int32), product.format),
        **call.attributes(
            product.format,
            **call.format_attributes(product.format),
            calls=np.int64(calls),
            choices=np.array(numbers, np.int64).reshape(-1),
        ),
    )
    return microseconds
