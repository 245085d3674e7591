"""A decode step's attention as a CUDA custom call (`cuda/ops/attend.h`)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._core.activations import VALUES
from . import call, extension
from .call import Call
from .extension import ffi
from .target import local_gpus

_DTYPES = (jnp.bfloat16, jnp.float16)


def unsupported(
    dtype: jnp.dtype, *, heads: int, kv_heads: int, head_size: int, cache_dtype: Any = None
) -> str | None:
    """Returns None if this build's kernel supports the attention on these GPUs, else a reason."""
    if reason := extension.UNAVAILABLE["cuda"]:
        return reason
    if dtype not in _DTYPES:
        return f"its kernel takes activations of {call.one_of(('bfloat16', 'float16'))}"
    if head_size % 8 != 0 or head_size > ffi.MAX_ATTEND_HEAD_SIZE:
        return (
            f"its kernel takes heads of a multiple of 8 up to {ffi.MAX_ATTEND_HEAD_SIZE} elements"
        )
    if cache_dtype in VALUES and head_size % 16 != 0:
        return f"its kernel takes heads of a multiple of 16 elements for a cache of {cache_dtype}"
    if heads > ffi.MAX_ATTEND_SHARED * kv_heads:
        return f"its kernel takes up to {ffi.MAX_ATTEND_SHARED} heads that share keys"
    gpus = local_gpus()
    if not gpus.capabilities:
        return "JAX sees no NVIDIA GPU"
    if cache_dtype in VALUES and gpus.capabilities != {ffi.BYTE_CACHE_CAPABILITY}:
        return f"its kernel takes a cache of {cache_dtype} on Hopper"
    return gpus.unfit


class Operands(NamedTuple):
    """Inputs of a decode step's attention, and the cache that it updates.

    - `query`: bfloat16 or float16 (batch, heads, head_size).
    - `key`, `value`: (batch, kv_heads, head_size) of that dtype; `heads / kv_heads` consecutive
      heads, up to 16, share one of these.
    - `rotation`: cosines and sines, float32 (batch, head_size / 2).
    - `norms`: factors of the norms of query and key heads before rotation, float32 (head_size,)
      each; or None.
    - `keys`, `values`: the cache, (batch, slots, kv_heads, head_size) of that dtype, int8 or
      float8_e4m3fn, updated in place if XLA can alias it, as it can a donated one.
    - `slot`: the slot of the new keys and values, int32 (); out of range, nothing is written.
    - `position`: the positions of the queries, int32 (batch,).
    - `positions`: the positions of all slots, including `slot`, int32 (batch, slots); -1 for empty
      slots.
    - `scales`: of 8-bit keys and values, float32 (batch, slots, kv_heads) each, updated with them.
    - `biases`: of query, key and value, (heads * head_size,) and twice (kv_heads * head_size,),
      which are rounded to their dtype and added before the norms; or ().
    - `sinks`: a score of each head that is in the denominator of its softmax and has no value,
      (heads,); or None.
    """

    query: Array
    key: Array
    value: Array
    rotation: tuple[Array, Array]
    norms: tuple[Array, Array] | None
    keys: Array
    values: Array
    slot: Array
    position: Array
    positions: Array
    scales: tuple[Array, ...] = ()
    biases: tuple[Array, ...] = ()
    sinks: Array | None = None


class Options(NamedTuple):
    """Options of a decode step's attention.

    - `pairs`: of the rotation, `"neighbours"` or `"halves"` as in `rope.rotate`.
    - `epsilon`: of the norms.
    - `reach`: the number of slots that are read, from the first.
    - `window`: the number of positions that a query sees, up to its own; None for all.
    - `scale`: of the scores.
    """

    pairs: str
    epsilon: float
    reach: int
    window: int | None
    scale: float


def attend(operands: Operands, options: Options) -> tuple[Array, ...]:
    """Rotates queries and keys, appends keys and values to a cache, and attends, in one call.

    A query sees the slots whose positions are not negative, not beyond the query's, and less than
    `window` before it. A query that sees no slot gets zeros. Other slots may contain anything.

    **Returns:** (batch, heads, head_size) in the dtype of the query, and the updated keys, values
    and `scales`.

    **Raises:** an XLA error when it runs, for invalid shapes and dtypes. It supports neither `vmap`
    nor derivatives.
    """
    calls = Call("attend")
    add_attention(calls, operands, operands.query.shape)
    out, *cache = calls.run(
        sums=workspace_bytes(operands, options),
        aliases=aliases(operands),
        **call_attributes(operands, options),
    )
    return call.apart(out)[0], *cache


# --- calls that begin with attention --------------------------------------------------------------


def aliases(operands: Operands) -> dict[int, int]:
    """The operands that results overwrite: keys, values and their scales."""
    return {7: 1, 8: 2} | ({12: 3, 13: 4} if operands.scales else {})


def add_attention(calls: Call, operands: Operands, shape: Sequence[Any]) -> int:
    """Begins a call with the attention step, and returns the place of its result.

    The first results of the call are that result, in `shape`, and the cache.
    """
    norms = operands.norms or (jnp.zeros(0, jnp.float32),) * 2
    new = call.apart(operands.query, operands.key, operands.value)
    for array in (*new, *operands.rotation, *norms, *operands[5:10], *operands.scales):
        calls.operand(array)
    for array in (*operands.biases, *([] if operands.sinks is None else [operands.sinks])):
        calls.operand(array.astype(jnp.float32))
    out = calls.result(shape, operands.query.dtype)
    for array in (operands.keys, operands.values, *operands.scales):
        calls.result(array.shape, array.dtype)
    calls.step("attend")
    return out


def call_attributes(operands: Operands, options: Options) -> dict[str, Any]:
    present = {"biases": bool(operands.biases), "sinks": operands.sinks is not None}
    return {
        **{name: np.bool_(True) for name, is_present in present.items() if is_present},
        "reach": np.int64(options.reach),
        "window": np.int64(options.window or 0),
        "scale": np.float32(options.scale),
        "norm_epsilon": np.float32(options.epsilon),
        "neighbours": np.bool_(options.pairs == "neighbours"),
    }


def workspace_bytes(operands: Operands, options: Options) -> int:
    """Bytes for the partial results of any number of splits."""
    batch, heads, size = operands.query.shape
    if not isinstance(batch, int):  # symbolic
        return ffi.MAX_WORKSPACE_BYTES
    sizes = {"heads": heads, "kv_heads": operands.keys.shape[2], "head_size": size}
    return ffi.attend_bytes(batch=batch, **sizes, reach=options.reach)
