"""Attention to a cache as a CPU custom call (`xla_ffi/cpu_attend.cc`)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._core.dtypes import FLOATS
from . import call, extension
from .extension import ffi


def unsupported(dtype: jnp.dtype, *, head_size: int) -> str | None:
    """Returns None if this build's kernel supports such attention, else the reason."""
    if reason := extension.UNAVAILABLE["cpu"]:
        return reason
    if dtype not in FLOATS:
        return f"its kernel takes activations of {call.one_of(FLOATS)}"
    size = ffi.MAX_CPU_ATTEND_HEAD_SIZE
    return None if head_size <= size else f"its heads have up to {size} elements"


def attend(
    query: Array,
    key: Array,
    value: Array,
    positions: Array,
    held: Array,
    *,
    reach: int,
    window: int | None,
    scale: float,
) -> Array:
    """Attention of queries to a cache, as one CPU custom call that reads it in place.

    A query sees the slots whose positions are not negative, not beyond the query's, and less than
    `window` before it. A query that sees no slot gets zeros. Slots that no query sees may contain
    anything.

    **Arguments:**

    - `query`: float32, bfloat16 or float16 (batch, queries, heads, head_size).
    - `key`, `value`: (batch, slots, kv_heads, head_size) of that dtype; `heads / kv_heads`
      consecutive heads share one of these.
    - `positions`: the positions of the queries, int32 (batch, queries).
    - `held`: the positions of the slots, int32 (batch, slots); -1 for empty slots.
    - `reach`: the number of slots that are read, from the first.

    **Returns:** an array like `query`.

    **Raises:** an XLA error when it runs, for invalid shapes and dtypes. It supports neither `vmap`
    nor derivatives.
    """
    result = jax.ShapeDtypeStruct(query.shape, query.dtype)
    (query,) = call.apart(query)
    out = jax.ffi.ffi_call(call.ATTEND_TARGET, result)(
        *(query, key, value, positions, held),
        reach=np.int64(reach),
        window=np.int64(window or 0),
        scale=np.float32(scale),
        caller="attend",
        **call.VERSIONS,
    )
    return call.apart(out)[0]
