"""A Pallas kernel for TPUs that reads the packed words; on the CPU, Pallas interprets it.

Shifting all words of an atom by one slot gives 32 channels by some of its 64 rows. The kernel
leaves both in the order they come in and never permutes a weight; activations and results are put
into that order outside.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import _layout
from .._formats import Format
from . import definition

PLATFORMS = ("cpu", "tpu")
_BITS = (1, 2, 4, 8)
_MAX_BLOCK_M = 256


def unsupported(format: Format) -> str | None:
    """Why the kernel cannot compute products of this format, or None."""
    if format.bits not in _BITS:
        return f"its kernel reads 1, 2, 4 or 8 bits, the format has {format.bits}"
    return None


def matmul(
    lhs: Array,
    packed: Array,
    scale: Array,
    zero: Array | None,
    index: Array | None,
    *,
    format: Format,
    columns: int,
    out_dtype: jnp.dtype,
    platform: str | None,
) -> Array:
    """`definition.matmul` as one kernel; weights that an index selects are copied."""
    from jax.experimental import pallas as pl  # slow to import, and seldom needed

    packed, scale, zero = definition.take(packed, scale, zero, index)
    lead = packed.shape[:-3]
    n_blocks, k_blocks, num_words = packed.shape[-3:]
    rows, k = lhs.shape[len(lead) : -1], lhs.shape[-1]
    batch, m = math.prod(lead), math.prod(rows)
    block_m = min(_MAX_BLOCK_M, -(-m // 16) * 16)
    m_blocks = -(-m // block_m)
    lhs = lhs.reshape(batch, m, k)
    lhs = jnp.pad(lhs, [(0, 0), (0, m_blocks * block_m - m), (0, k_blocks * _layout.ATOM - k)])
    lhs = jnp.moveaxis(_layout.rows_by_slot(lhs, format.bits), 2, 1)
    steps = _layout.rows_by_slot(jnp.arange(_layout.ATOM, dtype=jnp.int32) // 16, format.bits)
    packed = packed.reshape(batch, n_blocks, k_blocks, 32, num_words // 32)
    groups = [
        _layout.channels_by_slot(x.astype(jnp.float32)).reshape(batch, n_blocks, -1, 64, 1)
        for x in (scale, zero)
        if x is not None
    ]

    out = pl.pallas_call(
        functools.partial(_kernel, format=format),
        grid=(batch, m_blocks, n_blocks, k_blocks),
        in_specs=[
            pl.BlockSpec((1, 64), lambda b, i, j, t: (0, 0)),
            pl.BlockSpec((None, None, block_m, 64), lambda b, i, j, t: (b, t, i, 0)),
            pl.BlockSpec(
                (None, None, None, *packed.shape[-2:]), lambda b, i, j, t: (b, j, t, 0, 0)
            ),
            *(
                pl.BlockSpec((None, None, *x.shape[-3:]), lambda b, i, j, t: (b, j, 0, 0, 0))
                for x in groups
            ),
        ],
        out_specs=pl.BlockSpec((None, None, block_m, 64), lambda b, i, j, t: (b, j, i, 0)),
        out_shape=jax.ShapeDtypeStruct(
            (batch, n_blocks, m_blocks * block_m, 64),
            jnp.float32,
            manual_axis_type=jax.typeof(lhs).mat,
        ),
        interpret=platform != "tpu",
    )(steps, lhs, packed, *groups)
    out = jnp.moveaxis(_layout.channels_from_slots(out), 1, 2).reshape(batch, -1, n_blocks * 64)
    return out[:, :m, :columns].reshape(*lead, *rows, columns).astype(out_dtype)


def _kernel(steps: Any, lhs: Any, packed: Any, scale: Any, *rest: Any, format: Format) -> None:
    """Adds the product with one atom to the sums (block_m, 64) of a strip of channels."""
    from jax.experimental import pallas as pl

    *zero, out = rest
    k_block = pl.program_id(3)

    def per_weight(groups: Any) -> Array:
        """The values of the groups in which the atom's steps of 16 rows lie, (channel, row)."""
        if format.group_size == -1:
            return groups[0]
        at = [lax.div(64 * k_block + 16 * step, format.group_size) for step in range(4)]
        values = groups[at[0]]
        for step in (1, 2, 3):
            values = jnp.where(steps[...] == step, groups[at[step]], values)
        return values

    words, bits = packed[...], format.bits
    slots = [(words >> shift) & (2**bits - 1) for shift in range(0, 32, bits)]
    halves = [jnp.concatenate(slots[h::2], axis=1) for h in (0, 1)]
    codes = jnp.concatenate(halves, axis=0).astype(jnp.int32).astype(jnp.float32)
    if format.zero == "none":
        weight = (codes - format.offset) * per_weight(scale)
    elif format.zero == "integer":
        weight = (codes - per_weight(zero[0])) * per_weight(scale)
    else:
        weight = codes * per_weight(scale) + per_weight(zero[0])
    product = lax.dot_general(
        lhs[...],
        weight.astype(lhs.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )

    @pl.when(k_block == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    out[...] += product
