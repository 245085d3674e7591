"""The weight of a layer: quantizing one, which may be abstract, and one made of stored arrays."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from .._array import _LEAVES, QuantizedArray
from .._formats import Format
from .._quantize import quantize

Shards = tuple[int, int]


ARRAYS = tuple(name for name in _LEAVES if name != "index")
"""The arrays of a weight that a layer holds, each in a variable of its own."""


class Packing(NamedTuple):
    """How a weight is packed."""

    format: Format
    shards: Shards = (1, 1)


def quantize_weight(
    weight: Any,
    format: Format,
    matrix: Callable[[Any], Any] = lambda weight: weight,
    shards: Shards = (1, 1),
) -> QuantizedArray:
    """`quantize(matrix(weight), format)`, of an abstract weight to an abstract array."""

    def run(weight: Any) -> QuantizedArray:
        return quantize(matrix(weight), format, shards=shards)

    return jax.eval_shape(run, weight) if isinstance(weight, jax.ShapeDtypeStruct) else run(weight)


def kernel_from(
    arrays: Mapping[str, Any],
    format: Format,
    matrix_shape: tuple[int, int],
    shards: Shards = (1, 1),
) -> QuantizedArray:
    """The weight whose arrays a layer holds; inside `jax.shard_map`, the part on this device."""
    k, n = matrix_shape
    if jax.sharding.get_abstract_mesh().manual_axes:
        leaves = tuple(arrays.get(name) for name in _LEAVES)
        return QuantizedArray.tree_unflatten((format, k, n, shards), leaves)
    known: Any = {name: arrays.get(name) for name in _LEAVES}
    return QuantizedArray(**known, format=format, k=k, n=n, shards=shards)
