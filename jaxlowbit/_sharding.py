"""`partition_spec`: where the words of a matrix lie when its axes are sharded."""

import math
from typing import Any

import jax

from . import _layout
from ._array import QuantizedArray


def partition_spec(
    array: QuantizedArray, mesh: Any, *, k: Any = None, n: Any = None, lead: Any = ()
) -> QuantizedArray:
    """The `jax.P` of each leaf of `array`, for a matrix sharded as `jax.P(*lead, k, n)` on `mesh`.

    A part must hold whole atoms of 64 x 64, or be one that `quantize(..., shards=...)` has padded.
    Scales and zeros go with their words, except that all groups stay on every device where a part
    of k ends inside one. So does a permutation that goes beyond the rows of a part.

    **Arguments:**

    - `array`: the array, or what `jax.eval_shape` knows of it.
    - `mesh`: a `jax.sharding.Mesh` or `AbstractMesh`.
    - `k`, `n`: a mesh axis, a tuple of them, or None.
    - `lead`: one such entry for each leading axis, or fewer.

    **Returns:** a tree like `array`, for `in_specs` of `jax.shard_map` and, made into
    `NamedSharding`s, for `jax.device_put` and `jax.jit`.

    **Raises:** `ValueError` for parts of k or n that are no whole parts of the words, and for a
    view made by `select`.

    ```python
    specs = partition_spec(q, mesh, n="model")
    q = jax.device_put(q, jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs))
    ```
    """
    if array.index is not None:
        raise ValueError(
            "partition_spec: this is a view made by select, whose index has axes of its own; "
            "shard the stack."
        )
    size = array.format.group_size
    n_blocks, k_blocks, _ = array.packed.shape[-3:]
    unit = _layout.shard_unit(size)
    part = _part_blocks("k", array.k, array.shards[0], unit, k_blocks, k, mesh)
    _part_blocks("n", array.n, array.shards[1], _layout.ATOM, n_blocks, n, mesh)
    whole_groups = size != -1 and (part == k_blocks or part * _layout.ATOM % size == 0)
    lead = (*lead, *[None] * (array.ndim - 2 - len(lead)))
    groups = jax.P(*lead, n, k if whole_groups else None, None)
    zero = None if array.zero is None else groups
    permutation = None
    if array.permutation is not None:
        own_order = array.shards[0] % (k_blocks // part) == 0
        permutation = jax.P(*lead, k if own_order else None)
    leaves = (jax.P(*lead, n, k, None), groups, zero, None, permutation, jax.P(*lead))
    return QuantizedArray.tree_unflatten(array.tree_flatten()[1], leaves)


def _part_blocks(
    name: str, size: int, shards: int, unit: int, blocks: int, axes: Any, mesh: Any
) -> int:
    """The atoms along one axis that each device holds."""
    entry = axes if isinstance(axes, tuple) else (axes,) if axes else ()
    parts = math.prod(mesh.shape[axis] for axis in entry)
    found = blocks // parts
    if parts > 1 and (blocks % parts or _layout.part(size, shards, unit, found)[0] == size):
        raise ValueError(
            f"partition_spec: {name}={size} in {parts} parts over {axes!r} does not cut the words "
            f"between atoms of {_layout.ATOM}; quantize with shards=, whose entry for {name} is a "
            f"multiple of {parts}."
        )
    return found
