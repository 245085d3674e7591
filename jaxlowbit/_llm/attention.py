"""Attention of queries to the keys and values of a cache."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._backends import cpu_attend, cuda_attend

Implementation = Literal["xla", "cudnn", "native", "cpu"]
"""Implementations; `"native"` is `cuda_attend`, which also rotates and appends."""

# Score of a masked key: finite, so that a row without visible keys has no NaN.
_HIDDEN = -1e30


def choose(
    platform: str,
    dtype: jnp.dtype,
    *,
    batch: int,
    queries: int,
    length: int,
    head_size: int,
    native: bool = False,
    cached: bool = False,
    plain: bool = False,
    sinks: bool = False,
) -> Implementation:
    """Returns the fastest implementation for numbers of sequences, queries per sequence and slots.

    With one query per sequence, it is our CUDA kernel if that supports the sizes (`native`).
    Otherwise, for one sequence and one query, XLA's few small kernels take half the time of cuDNN's
    call. For several sequences or long prompts, cuDNN is faster, since it keeps scores on the chip;
    it needs 16-bit activations and heads of a multiple of 8 up to 256.

    On the CPU, our kernel reads a cache in place. It has no derivative, so XLA computes attention
    without a cache that outlives the call (`cached`).

    Only XLA's implementation supports caps of scores (`plain`), only XLA's and our CUDA kernel
    support `sinks`.
    """
    if plain or (sinks and not (native and platform == "gpu" and queries == 1)):
        return "xla"
    if platform == "cpu" and cached and cpu_attend.unsupported(dtype, head_size=head_size) is None:
        return "cpu"
    possible = (
        platform == "gpu"
        and dtype in (jnp.bfloat16, jnp.float16)
        and head_size % 8 == 0
        and head_size <= 256
    )
    if not possible:
        return "xla"
    if queries == 1:
        return "native" if native else "cudnn" if batch >= 4 else "xla"
    return "cudnn" if batch * queries * length >= 1 << 16 else "xla"


def native(
    dtype: jnp.dtype, heads: int, kv_heads: int, head_size: int, cache_dtype: jnp.dtype
) -> bool:
    """Whether our CUDA kernel supports attention of one query per sequence on this machine's GPUs.

    It takes any number of sequences and slots.
    """
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size}
    return cuda_attend.unsupported(dtype, **sizes, cache_dtype=cache_dtype) is None


def mask(queries: Array, keys: Array, window: int | None) -> Array:
    """The slots that each query sees, bool (batch, queries, slots).

    **Arguments:**

    - `queries`: positions of the queries, int32 (batch, queries).
    - `keys`: positions of the slots, int32 (batch, slots); -1 for an empty slot.
    - `window`: the number of positions that a query sees, up to its own; None for all.
    """
    distance = queries[:, :, None] - keys[:, None, :]
    seen = (keys >= 0)[:, None, :] & (distance >= 0)
    return seen if window is None else seen & (distance < window)


def attend(
    query: Array,
    key: Array,
    value: Array,
    positions: Array,
    held: Array,
    *,
    window: int | None,
    scale: float,
    implementation: Literal["xla", "cudnn", "cpu"],
    reach: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Computes attention of queries to the slots that they see (`mask`).

    Scores, softmax and accumulators are float32. For a query without visible slots, `"cpu"` returns
    zeros, and the others finite values without meaning.

    **Arguments:**

    - `query`: (batch, queries, heads, head_size).
    - `key`, `value`: a cache, (batch, slots, kv_heads, head_size) in the dtype of `query`;
      consecutive heads share one of these.
    - `positions`, `held`, `window`: `queries`, `keys` and `window` of `mask`.
    - `reach`: the number of slots that are read, from the first; None for all.
    - `softcap`: None, or the bound c in `c tanh(score / c)` of scaled scores, only for `"xla"`.
    - `sinks`: None, or float32 (heads,): a score of each head that is in the denominator of its
      softmax and has no value, only for `"xla"`.

    **Returns:** (batch, queries, heads * head_size) in the dtype of `query`.
    """
    batch, queries, heads, size = query.shape
    reach = key.shape[1] if reach is None else reach
    if implementation == "cpu":
        # A program traced here may be lowered for another platform.
        options = {"reach": reach, "window": window, "scale": scale}
        plain = functools.partial(attend, **options, implementation="xla")
        out = lax.platform_dependent(
            *(query, key, value, positions, held),
            cpu=functools.partial(cpu_attend.attend, **options),
            default=lambda *arrays: plain(*arrays).reshape(query.shape),
        )
        return out.reshape(batch, queries, heads * size)
    key, value = key[:, :reach], value[:, :reach]
    seen = mask(positions, held[:, :reach], window)
    if implementation == "cudnn":
        out = jax.nn.dot_product_attention(
            query, key, value, mask=seen[:, None], scale=scale, implementation="cudnn"
        )
        return out.reshape(batch, queries, heads * size)
    # Heads that share keys are rows of one product: faster than a batch axis.
    kv_heads = key.shape[2]
    shared = heads // kv_heads
    rows = query.reshape(batch, queries, kv_heads, shared, size).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, shared * queries, size)
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = einsum("bkrh,bskh->bkrs", rows, key) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = scores.reshape(batch, kv_heads, shared, queries, reach)
    weights = _softmax(jnp.where(seen[:, None, None], scores, _HIDDEN), sinks)
    weights = weights.astype(value.dtype).reshape(batch, kv_heads, shared * queries, reach)
    out = einsum("bkrs,bskh->bkrh", weights, value).astype(query.dtype)
    out = out.reshape(batch, kv_heads, shared, queries, size).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, queries, heads * size)


def _softmax(scores: Array, sinks: Array | None) -> Array:
    """The softmax of scores (batch, kv_heads, shared, queries, slots), with sinks (heads,)."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
    largest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
    raised = jnp.exp(scores - largest)
    return raised / (jnp.sum(raised, axis=-1, keepdims=True) + jnp.exp(sinks - largest))
