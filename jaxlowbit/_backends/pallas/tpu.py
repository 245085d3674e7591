"""The kernel for TPUs.

It keeps the slots of an atom in separate rows and never permutes a weight; instead, activations and
results are permuted outside.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._core import layout
from ..._core.format import Format
from . import slots

_MAX_BLOCK_M = 256


def product(
    lhs: Array, packed: Array, groups: list[Array], format: Format, *, interpret: bool
) -> Array:
    """Products (batch, m, k) x (batch, k, n) in float32, with padding of m and n."""
    from jax.experimental import pallas as pl  # slow to import and rarely needed

    batch, m, k = lhs.shape
    n_blocks, k_blocks, num_words = packed.shape[1:]
    block_m = min(_MAX_BLOCK_M, -(-m // 16) * 16)
    m_blocks = -(-m // block_m)
    lhs = jnp.pad(lhs, [(0, 0), (0, m_blocks * block_m - m), (0, k_blocks * layout.ATOM - k)])
    lhs = jnp.moveaxis(layout.rows_by_slot(lhs, format.bits), 2, 1)
    packed = packed.reshape(batch, n_blocks, k_blocks, 32, num_words // 32)
    steps = layout.steps_by_slot(format.bits)
    groups = [
        layout.channels_by_slot(x.astype(jnp.float32)).reshape(batch, n_blocks, -1, 2, 32, 1)
        for x in groups
    ]
    out = pl.pallas_call(
        functools.partial(_kernel, format=format),
        grid=(batch, m_blocks, n_blocks, k_blocks),
        in_specs=[
            pl.BlockSpec(steps.shape, lambda b, i, j, t: (0, 0, 0)),
            pl.BlockSpec((None, None, block_m, 64), lambda b, i, j, t: (b, t, i, 0)),
            pl.BlockSpec(
                (None, None, None, *packed.shape[-2:]), lambda b, i, j, t: (b, j, t, 0, 0)
            ),
            *(
                pl.BlockSpec((None, None, *x.shape[-4:]), lambda b, i, j, t: (b, j, 0, 0, 0, 0))
                for x in groups
            ),
        ],
        out_specs=pl.BlockSpec((None, None, block_m, 64), lambda b, i, j, t: (b, j, i, 0)),
        out_shape=jax.ShapeDtypeStruct(
            (batch, n_blocks, m_blocks * block_m, 64),
            jnp.float32,
            manual_axis_type=jax.typeof(lhs).mat,
        ),
        interpret=interpret,
    )(steps, lhs, packed, *groups)
    out = jnp.moveaxis(layout.channels_from_slots(out), 1, 2)
    return out.reshape(batch, -1, n_blocks * layout.ATOM)


def _kernel(steps: Any, lhs: Any, packed: Any, *rest: Any, format: Format) -> None:
    """Adds the product with one atom to the accumulators (block_m, 64) of a strip of channels."""
    from jax.experimental import pallas as pl

    *groups, out = rest
    k_block = pl.program_id(3)

    def load(values: Any, group: Any, half: int) -> Array:
        return values[group, half]

    weights = slots.dequantize(packed[...], steps, groups, load, k_block, format)
    halves = [jnp.concatenate(weights[h::2], axis=1) for h in (0, 1)]
    added = lax.dot_general(
        lhs[...],
        jnp.concatenate(halves, axis=0).astype(lhs.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )

    @pl.when(k_block == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    out[...] += added
