"""Permutations: the order in which rows of a matrix are stored.

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


def group_permutation(group_index: Any, group_size: int) -> Array | None:
    """The order of rows that makes the groups of GPTQ's `g_idx` consecutive.

    Checkpoints quantized in order of activation (`desc_act`, the `act-order` option of GPTQ's
    reference code, Frantar et al., 2023) keep rows in the original order and store the group of
    each. Here the rows of a group must be consecutive, so they are stored in the order returned,
    which is stable within a group.

    **Arguments:**

    - `group_index`: concrete integers (..., k), the group of each row.
    - `group_size`: the group size of the format; -1 for one group.

    **Returns:** int32 (..., k) for `permutation=` of `QuantizedArray.from_integers`; None if the
    rows are already in that order.

    **Raises:** `ValueError` if a group other than the last does not have `group_size` rows, or if
    the last one does not have the rest.

    ```python
    values, scale = jnp.zeros((256, 64), jnp.int8), jnp.ones((2, 64))
    permutation = group_permutation(jnp.arange(256) % 2, 128)
    QuantizedArray.from_integers(values, scale, format=INT4, permutation=permutation)
    ```
    """
    caller = "group_permutation"
    if isinstance(group_index, Tracer):
        raise TypeError(
            f"{caller}: group_index is traced, but the order depends on its values; call it "
            "outside of jax.jit."
        )
    found = np.asarray(checks.integers(caller, "group_index", group_index, "integers (..., k)"))
    if not (isinstance(group_size, int | np.integer) and group_size == -1):
        rule = "the rows of a group, from 1 on, or -1 for one group"
        group_size = checks.integer(caller, "group_size", group_size, rule)
    if not np.issubdtype(found.dtype, np.integer) or found.ndim == 0:
        raise ValueError(
            f"group_permutation: group_index is {found.dtype}{found.shape}, but it has the number "
            "of its group for each row, integers (..., k)."
        )
    k = found.shape[-1]
    order = np.argsort(found, axis=-1, kind="stable")
    groups = np.arange(k) // (k if group_size == -1 else group_size)
    ordered = np.take_along_axis(found, order, -1)
    wrong = np.argwhere(ordered != groups)
    if wrong.size:
        at = tuple(wrong[0])
        group = int(min(groups[at[-1]], ordered[at]))
        rows = int(np.sum(found[at[:-1]] == group))
        raise ValueError(
            f"group_permutation: group {group} has {rows} rows, but {k} rows in groups of "
            f"{group_size} make it {int(np.sum(groups == group))}; use the group_size with which "
            "the weight was quantized."
        )
    return None if np.all(order == np.arange(k)) else jnp.asarray(order, jnp.int32)


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
