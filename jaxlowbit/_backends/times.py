"""Times kernels on a GPU with a custom call that launches each choice and synchronizes."""

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
    """Median microseconds (choices,) of `lhs` times a matrix on a GPU, for each choice.

    A measurement multiplies by `calls` matrices of the stack (`packed`, `scale`, `zero`) in turn.
    """
    m, n = product.m, product.n
    timed = call.Call("jaxlowbit.tune")
    weight = call.stored(packed, scale, zero, jnp.zeros(1, jnp.int32), product.format)
    out = timed.result((1, m, n), lhs.dtype)
    timed.result((len(choices),), jnp.float32)
    timed.multiply(timed.add_product(weight, timed.operand(lhs[None]), out))
    numbers = [(ffi.KERNELS.index(choice.kernel), *choice[1:]) for choice in choices]
    _, microseconds = timed.run(
        call.TIMES_TARGET,
        calls=np.int64(calls),
        choices=np.array(numbers, np.int64).reshape(-1),
    )
    return microseconds
