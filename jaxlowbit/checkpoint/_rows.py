"""Unpacks matrices to rows of integers, for the formats of other libraries."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._core import layout
from .._core.array import QuantizedArray
from .._core.dequantize import codes_of


class Rows(NamedTuple):
    """The rows (out) of a matrix (out, in): codes uint8 (n, k), scales and zeros (n, groups), 8-bit
    scales as bytes."""

    qvalue: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None


def rows_of(array: QuantizedArray) -> Rows:
    """Unpacks a matrix without two-level scales.

    **Raises:** `ValueError` for a stack, shards, permuted rows and two-level scales.
    """
    if array.ndim != 2 or array.index is not None:
        raise ValueError(f"it is a stack of shape {array.shape}, but matrices are exported")
    if array.shards != (1, 1) or array.permutation is not None:
        raise ValueError("its rows are permuted or padded for shards, which has no counterpart")
    if array.format.two_levels:
        raise ValueError("it has two-level scales; load it without scale_dtype='two_level'")
    size = array.format.group_size
    groups = 1 if size == -1 else -(-array.k // size)

    def per_group(values: jnp.ndarray) -> np.ndarray:
        return np.asarray(layout.unpack_groups(values)[:groups, : array.n]).T

    qvalue = np.asarray(layout.unpack(jnp.asarray(array.packed), array.format.bits))
    return Rows(
        qvalue[: array.k, : array.n].T,
        per_group(jnp.asarray(codes_of(array.scale))),
        None if array.zero is None else per_group(jnp.asarray(array.zero)),
    )
