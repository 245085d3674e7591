"""Equal parts of k and n, each padded separately to whole atoms and groups.

Each device of a mesh has whole parts (`docs/sharding.md`).
"""

import jax.numpy as jnp
from jax import Array, lax

from .layout import ATOM, blocks


def spread_size(size: int, shards: int, unit: int) -> int:
    """`size` split into equal shards, each padded to a multiple of `unit`; unchanged for one."""
    return size if shards == 1 else shards * (-(-size // (shards * unit)) * unit)


def spread(values: Array, axis: int, shards: int, unit: int, mode: str = "constant") -> Array:
    """Pads each of `shards` equal parts of an axis, counted from the end (-1 or -2)."""
    size = values.shape[axis]
    missing = (spread_size(size, shards, unit) - size) // shards
    if missing == 0:
        return values
    before, after = values.shape[:axis], values.shape[values.ndim + axis + 1 :]
    parts = values.reshape(*before, shards, size // shards, *after)
    pad = [(0, 0)] * (parts.ndim + axis) + [(0, missing)] + [(0, 0)] * len(after)
    return jnp.pad(parts, pad, mode=mode).reshape(*before, size + shards * missing, *after)


def spread_position(position: Array, size: int, shards: int, unit: int) -> Array:
    """Positions after `spread` of elements of an axis of `size`."""
    before, after = size // shards, spread_size(size, shards, unit) // shards
    return position // before * after + position % before


def join(values: Array, axis: int, shards: int, size: int) -> Array:
    """The inverse of `spread`: an axis of `size`, without the padding of each part."""
    if values.shape[axis] == size:
        return values
    before, after = values.shape[:axis], values.shape[values.ndim + axis + 1 :]
    parts = values.reshape(*before, shards, values.shape[axis] // shards, *after)
    parts = lax.slice_in_dim(parts, 0, size // shards, axis=axis)
    return parts.reshape(*before, size, *after)


def part(size: int, shards: int, unit: int, found: int) -> tuple[int, int]:
    """The size of an axis, and the number of shards, that `found` atoms along it represent.

    Inside `jax.shard_map`, an array has some atoms of the whole: the result describes that part, or
    the whole if the atoms are not a whole part of it.
    """
    padded = spread_size(size, shards, unit)
    parts = blocks(padded) // found if found and blocks(padded) % found == 0 else 1
    if shards % parts == 0:
        return size // parts, shards // parts
    if padded == size and size % (parts * ATOM) == 0:
        return size // parts, 1
    return size, shards
