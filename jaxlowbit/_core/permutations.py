"""Permutations: the storage order of the rows of a matrix.

A permutation is int32 (..., k): stored row r is row `permutation[r]`, both counted from the start
of their shard.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from . import checks, indexing


def permute(values: Array, permutation: Array, shards: int, axis: int = -1) -> Array:
    """Puts rows into stored order, along an axis counted from the end.

    Values and permutation have the same leading axes.
    """
    axis += values.ndim
    *lead, k = permutation.shape
    before, after = values.shape[:axis], values.shape[axis + 1 :]
    middle = [1] * (axis - len(lead))
    rows = permutation.reshape(*lead, *middle, shards, k // shards, *[1] * len(after))
    parts = values.reshape(*before, shards, k // shards, *after)
    parts = jnp.take_along_axis(parts, rows, axis + 1, mode="promise_in_bounds")
    return parts.reshape(values.shape)


def restore(values: Array, permutation: Array, shards: int, axis: int = -1) -> Array:
    """The inverse of `permute`."""
    orders = permutation.reshape(-1, permutation.shape[-1] // shards)
    inverse = jax.vmap(_inverse)(orders).reshape(permutation.shape)
    return permute(values, inverse, shards, axis)


def _inverse(order: Array) -> Array:
    positions = jnp.arange(order.size, dtype=order.dtype)
    at = jnp.zeros_like(order).at[order]
    return at.set(positions, mode="promise_in_bounds", unique_indices=True)


def spread(permutation: Array, shards: int, padded: int) -> Array:
    """The permutation of k including the padding of each shard, which stays in place."""
    *lead, k = permutation.shape
    padding = jnp.arange(k // shards, padded // shards, dtype=permutation.dtype)
    if not padding.size:
        return permutation
    parts = permutation.reshape(*lead, shards, k // shards)
    padding = jnp.broadcast_to(padding, (*lead, shards, padding.size))
    return jnp.concatenate([parts, padding], axis=-1).reshape(*lead, padded)


def selected(permutation: Array, index: Array | None) -> Array:
    """The permutations of the weights selected by an index."""
    if index is None:
        return permutation
    return permutation[indexing.positions(index, permutation.shape[0])]


def of_groups(
    caller: str, g_idx: Any, shape: tuple[int, ...], group_size: int, shards: int
) -> np.ndarray | None:
    """The order of rows that makes the groups of GPTQ's `g_idx` consecutive, stable within each.

    Checkpoints quantized in order of activation (`desc_act`, the `act-order` option of GPTQ's
    reference code, Frantar et al., 2023) keep rows in the original order and store the group of
    each. `shape` is (..., k, n). Groups are numbered from the first part of k to the last.

    **Returns:** integers (..., k) or (k,), counted in each part; None if rows are in that order.

    **Raises:** as `QuantizedArray.from_integers`.
    """
    if isinstance(g_idx, Tracer):
        raise TypeError(
            f"{caller}: g_idx is traced, but the order of rows depends on its values; call it "
            "outside of jax.jit."
        )
    found = np.asarray(checks.integers(caller, "g_idx", g_idx, "integers (..., k)"))
    if not np.issubdtype(found.dtype, np.integer) or found.shape not in (shape[-2:-1], shape[:-1]):
        raise ValueError(
            f"{caller}: g_idx is {found.dtype}{found.shape}, but it has the number of its group "
            f"for each row, integers {shape[:-1]} for values of shape {shape}, or {shape[-2:-1]} "
            "for all leading axes."
        )
    rows = shape[-2] // shards
    size = rows if group_size == -1 else group_size
    parts = found.reshape(*found.shape[:-1], shards, rows)
    order = np.argsort(parts, axis=-1, kind="stable")
    groups = np.arange(rows) // size + -(-rows // size) * np.arange(shards)[:, None]
    groups = np.broadcast_to(groups, parts.shape)
    ordered = np.take_along_axis(parts, order, -1)
    wrong = np.argwhere(ordered != groups)
    if wrong.size:
        at = tuple(wrong[0])
        group = int(min(groups[at], ordered[at]))
        count, needed = (int(np.sum(x[at[:-1]] == group)) for x in (parts, groups))
        of_part = f" of part {at[-2]} of k" if shards > 1 else ""
        raise ValueError(
            f"{caller}: group {group} of g_idx has {count} rows, but {rows} rows{of_part} in "
            f"groups of {group_size} make it {needed}; use the group_size with which the weight "
            "was quantized."
        )
    return None if np.all(order == np.arange(rows)) else order.reshape(found.shape)


def checked(caller: str, permutation: Any, shape: tuple[int, ...], shards: int) -> Array:
    """A user's permutation for a matrix (..., k, n) of `shape`, as int32 (..., k)."""
    permutation = checks.integers(caller, "permutation", permutation, "integers (..., k)")
    if not jnp.issubdtype(permutation.dtype, jnp.integer) or permutation.ndim == 0:
        raise ValueError(
            f"{caller}: permutation is {permutation.dtype}{permutation.shape}, but it has a "
            "position for each row, integers (..., k)."
        )
    if permutation.shape not in (shape[-2:-1], shape[:-1]):
        raise ValueError(
            f"{caller}: permutation has shape {permutation.shape}, but a matrix of shape {shape} "
            f"needs {shape[:-1]}, or {shape[-2:-1]} for all leading axes."
        )
    check_values(caller, permutation, shards)
    return jnp.broadcast_to(indexing.saturated(permutation), shape[:-1])


def check_values(caller: str, permutation: Any, shards: int) -> None:
    """Raises if it is not an order of the rows of each shard. Does nothing while tracing."""
    if isinstance(permutation, Tracer) or not hasattr(permutation, "__array__"):
        return
    found = np.asarray(permutation)
    size = found.shape[-1] // shards
    parts = found.reshape(-1, size)
    if np.array_equal(np.sort(parts, axis=-1), np.broadcast_to(np.arange(size), parts.shape)):
        return
    before = np.zeros(size, bool)
    for i, value in enumerate(parts.ravel()):
        before = np.zeros(size, bool) if i % size == 0 else before
        if not 0 <= value < size or before[value]:
            at = tuple(map(int, np.unravel_index(i, found.shape)))
            raise ValueError(
                f"{caller}: permutation has {value} at {at}"
                f"{' again' if 0 <= value < size else ''}, but each of the rows 0 to {size - 1}"
                f"{f' of each of {shards} shards' if shards > 1 else ''} comes once; pass an "
                "order of the rows, such as jnp.argsort gives."
            )
        before[value] = True
