"""Two-level scales: an integer per group, times a float per super-block of 256 rows.

Scales, and likewise float zeros, are bytes (..., rows, n). Each super-block has a row of bytes for
each of its groups, two's complement integers, followed by two rows with its float16 floats: the low
bytes, then the high ones. So a part of k of whole super-blocks is whole rows, as for other scales.
The functions here expect the rows on the last axis but one, so they also work on bytes in the order
of `layout.pack_groups`.

Shifts split and join the bytes of a float16, not a bitcast to another width: when XLA folds such a
bitcast of a transposed constant, it ignores the transposition and gives wrong numbers.
"""

import jax.numpy as jnp
from jax import Array, lax

from . import layout
from .format import SUPER_BLOCK, Format

MOST = 127
"""The largest integer; the smallest is -128."""
_FLOAT_ROWS = 2


def stored_shapes(
    k: int, n: int, format: Format
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The shapes of the words and of the scales of a (k, n) matrix: (n_blocks, k_blocks, words),
    and (n_blocks, groups, 64), with rows of bytes in place of groups for two levels."""
    n_blocks, k_blocks = layout.blocks(n), layout.blocks(k)
    rows, size = k_blocks * layout.ATOM, format.group_size  # every padded row has a scale
    groups = 1 if size == -1 else -(-rows // size)
    if format.two_levels:
        groups = num_blocks(rows) * (_groups(format) + _FLOAT_ROWS)
    words = layout.WORDS_PER_BIT * format.bits
    return (n_blocks, k_blocks, words), (n_blocks, groups, layout.ATOM)


def num_blocks(rows: int) -> int:
    """Number of super-blocks that cover this many rows."""
    return -(-rows // SUPER_BLOCK)


def packed(integers: Array, floats: Array, format: Format) -> Array:
    """The bytes (..., rows, n) of integers, int8 (..., groups, n), and floats, float16 (...,
    super-blocks, n). If the last super-block lacks groups, its last group is repeated."""
    *lead, groups, n = integers.shape
    blocks = floats.shape[-2]
    missing = blocks * _groups(format) - groups
    pad = [(0, 0)] * len(lead) + [(0, missing), (0, 0)]
    own = jnp.pad(lax.bitcast_convert_type(integers, jnp.uint8), pad, mode="edge")
    own = own.reshape(*lead, blocks, _groups(format), n)
    bits = lax.bitcast_convert_type(floats, jnp.uint16)
    both = jnp.stack([bits & 0xFF, bits >> 8], axis=-2).astype(jnp.uint8)
    return jnp.concatenate([own, both], axis=-2).reshape(*lead, -1, n)


def unpacked(values: Array, format: Format) -> tuple[Array, Array]:
    """The inverse of `packed`: the integers of whole super-blocks, and the floats."""
    *lead, _, n = values.shape
    groups = _groups(format)
    blocks = values.reshape(*lead, -1, groups + _FLOAT_ROWS, n)
    integers = lax.bitcast_convert_type(blocks[..., :groups, :], jnp.int8)
    low, high = (blocks[..., groups + i, :].astype(jnp.uint16) for i in range(_FLOAT_ROWS))
    floats = lax.bitcast_convert_type(low | high << 8, jnp.float16)
    return integers.reshape(*lead, -1, n), floats


def expanded(
    scale: Array, zero: Array | None, format: Format, rows: int
) -> tuple[Array, Array | None, Format]:
    """Expands two-level scales and zeros of a matrix with `rows` rows exactly to float32, one per
    group, and returns them with the matching format. Other scales are returned unchanged."""
    if not format.two_levels:
        return scale, zero, format
    _, (_, groups, _) = stored_shapes(rows, 1, format.expanded)

    def products(values: Array) -> Array:
        integers, floats = unpacked(values, format)
        floats = jnp.repeat(floats.astype(jnp.float32), _groups(format), axis=-2)
        return (integers.astype(jnp.float32) * floats)[..., :groups, :]

    return products(scale), None if zero is None else products(zero), format.expanded


def _groups(format: Format) -> int:
    """The number of groups in a super-block."""
    return SUPER_BLOCK // format.group_size
