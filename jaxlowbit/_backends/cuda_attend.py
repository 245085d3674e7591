"""Attention with one query per sequence, as a custom call of CUDA (`cuda/ops/attend.h`)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from . import call, extension, selection
from .extension import ffi

_DTYPES = (jnp.bfloat16, jnp.float16)
_MOST_SHARED, _MOST_SIZE = 16, 256  # as in `cuda/ops/attend.h`
# The kernel divides the slots into as many splits as the workspace has room for, and would use no
# more than these: a split has at least so many slots, and so many CTAs fill any GPU.
_LEAST_SLOTS, _MOST_SPLITS, _FEW_SPLITS, _MOST_CTAS = 32, 64, 4, 512


def unsupported(dtype: jnp.dtype, *, heads: int, kv_heads: int, head_size: int) -> str | None:
    """Why the kernel cannot compute such attention with this build on these GPUs, or None."""
    if reason := extension.unavailable("cuda"):
        return reason
    if dtype not in _DTYPES:
        return f"its kernel takes activations of {call.one_of(('bfloat16', 'float16'))}"
    if head_size % 8 != 0 or head_size > _MOST_SIZE:
        return f"its kernel takes heads of a multiple of 8 up to {_MOST_SIZE} elements"
    if heads > _MOST_SHARED * kv_heads:
        return f"its kernel takes up to {_MOST_SHARED} heads that share keys"
    try:
        gpus = jax.local_devices(backend="cuda")
    except RuntimeError:
        return "JAX sees no NVIDIA GPU"
    capabilities = sorted({selection.compute_capability(gpu) for gpu in gpus})
    return next(filter(None, map(selection.unfit, capabilities)), None)


def attend(
    query: Array,
    key: Array,
    value: Array,
    position: Array,
    positions: Array,
    *,
    reach: int,
    window: int | None,
    scale: float,
) -> Array:
    """Attention of one query per sequence, as one custom call of CUDA that reads a cache in place.

    A query sees the slots whose positions are not negative, not beyond its own, and less than
    `window` before it. One that sees none gets zeros. What other slots hold does not matter.

    **Arguments:**

    - `query`: bfloat16 or float16 (batch, heads, head_size).
    - `key`, `value`: (batch, slots, kv_heads, head_size) of that dtype; `heads / kv_heads`
      consecutive heads, up to 16, share one of these.
    - `position`: those of the queries, int32 (batch,).
    - `positions`: those of what the slots hold, int32 (batch, slots); -1 for nothing.
    - `reach`: how many slots are read, from the first on.

    **Returns:** (batch, heads, head_size) in the dtype of `query`.

    **Raises:** an error of XLA when it runs, for shapes and dtypes that do not fit. There is no
    rule for `vmap`, and no derivative.
    """
    batch, heads, size = query.shape
    result = jax.ShapeDtypeStruct(query.shape, query.dtype)
    bytes = _workspace_bytes(batch, heads, key.shape[2], size, reach)
    workspace = jax.ShapeDtypeStruct((bytes,), jnp.uint8)
    (query,) = call.apart(query)
    out, _ = jax.ffi.ffi_call(call.ATTEND_TARGET, [result, workspace])(
        *(query, key, value, position, positions),
        **call.attributes(
            reach=np.int64(reach), window=np.int64(window or 0), scale=np.float32(scale)
        ),
    )
    return call.apart(out)[0]


def _workspace_bytes(batch: Any, heads: int, kv_heads: int, size: int, reach: int) -> int:
    """Bytes for what the splits leave: sums of every head, a maximum and a sum of weights."""
    if not isinstance(batch, int):  # symbolic
        return ffi.MAX_WORKSPACE_BYTES
    fill = math.ceil(_MOST_CTAS / max(batch * kv_heads, 1))
    splits = min(_MOST_SPLITS, math.ceil(reach / _LEAST_SLOTS), max(_FEW_SPLITS, fill))
    return min(ffi.MAX_WORKSPACE_BYTES, 4 * batch * heads * splits * (size + 2))
