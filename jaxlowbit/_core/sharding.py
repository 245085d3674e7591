"""Shardings of the leaves of a quantized matrix, a `QuantizedArray`, and their placement."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from . import layout, padding
from .checks import brief


def partition_spec(array: Any, mesh: Any, *, k: Any, n: Any, lead: Any) -> Any:
    """`QuantizedArray.partition_spec`."""
    _check_axes(array, mesh, {"k": k, "n": n}, lead)
    if array.index is not None:
        raise ValueError(
            "partition_spec: this is a view made by select, whose index has separate axes; "
            "shard the stack."
        )
    return leaf_specs(array, k=k, n=n, lead=lead, own=own_parts(array, mesh, k, n))


def _check_axes(array: Any, mesh: Any, own: dict[str, Any], lead: Any) -> None:
    """Raises for entries that are not axes of the mesh, or that use an axis twice."""
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(
            f"partition_spec: mesh is {brief(mesh)}, but it must be a jax.sharding.Mesh, as of "
            "jax.make_mesh((8,), ('model',)), or an AbstractMesh."
        )
    if isinstance(lead, str) or not isinstance(lead, Sequence) or len(lead) > array.ndim - 2:
        raise TypeError(
            f"partition_spec: lead is {brief(lead)}, but it must be a tuple of an entry for each "
            f"of the {array.ndim - 2} leading axes of shape {array.shape}, or fewer."
        )
    used: list[str] = []
    for name, entry in (*own.items(), *((f"lead[{i}]", entry) for i, entry in enumerate(lead))):
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        for axis in axes:
            if not isinstance(axis, str) or axis not in mesh.axis_names:
                raise ValueError(
                    f"partition_spec: {name}={brief(entry)} names no axis of the mesh, whose axes "
                    f"are {mesh.axis_names}; pass one of them, a tuple of them, or None."
                )
        used += axes
    if twice := sorted({axis for axis in used if used.count(axis) > 1}):
        raise ValueError(
            f"partition_spec: the mesh axis {twice[0]!r} occurs twice in k={own['k']!r}, "
            f"n={own['n']!r} and lead={lead!r}; an axis divides one axis of the matrix."
        )


class Own(NamedTuple):
    """Whether each part of k has separate groups, and a separate permutation."""

    groups: bool
    order: bool


def leaf_specs(array: Any, *, k: Any, n: Any, lead: Any, own: Own) -> Any:
    """Puts the entries k, n and lead of a matrix on the corresponding axes of its leaves.

    Leaves that no part of k owns are not split along k.
    """
    lead = (*lead, *[None] * (array.ndim - 2 - len(lead)))
    groups = jax.P(*lead, n, k if own.groups else None, None)
    zero = None if array.zero is None else groups
    order = None if array.permutation is None else jax.P(*lead, k if own.order else None)
    matrix = jax.P(*lead)
    unit = None
    if array.format.has_tensor_scale:
        unit = jax.P(*lead, n) if array.format.scales_channels else matrix
    leaves = (jax.P(*lead, n, k, None), groups, zero, None, order, matrix, unit)
    return array.tree_unflatten(array.tree_flatten()[1], leaves)


def own_parts(array: Any, mesh: Any, k: Any, n: Any) -> Own:
    """The leaves that each part of k on a mesh owns; raises for parts that are not whole atoms."""
    size = array.format.scale_span
    n_blocks, k_blocks, _ = array.packed.shape[-3:]
    unit = array.format.shard_unit
    part = _part_blocks("k", array.k, array.shards[0], unit, k_blocks, k, mesh)
    _part_blocks("n", array.n, array.shards[1], layout.ATOM, n_blocks, n, mesh)
    groups = size != -1 and (part == k_blocks or part * layout.ATOM % size == 0)
    return Own(groups, array.shards[0] % (k_blocks // part) == 0)


def own_parts_anywhere(array: Any) -> Own:
    """The leaves that parts of k own for any split into whole atoms or shards."""
    size, sharded = array.format.scale_span, array.shards[0] > 1
    return Own(size != -1 and (sharded or layout.ATOM % size == 0), sharded)


def _part_blocks(
    name: str, size: int, shards: int, unit: int, blocks: int, axes: Any, mesh: Any
) -> int:
    """The number of atoms along one axis on each device."""
    entry = axes if isinstance(axes, tuple) else (axes,) if axes else ()
    parts = math.prod(mesh.shape[axis] for axis in entry)
    found = blocks // parts
    if parts > 1 and (blocks % parts or padding.part(size, shards, unit, found)[0] == size):
        raise ValueError(
            f"partition_spec: {name}={size} in {parts} parts over {axes!r} does not cut the words "
            f"between atoms of {layout.ATOM}; quantize with shards=, whose entry for {name} is a "
            f"multiple of {parts}."
        )
    return found


def placed(tree: Any, sharding: Any = None) -> Any:
    """Puts arrays on devices, by a sharding for all or one for each; each device reads its part."""
    if all(map(_is_own, jax.tree.leaves(sharding))):
        # `device_put` uses aligned host memory as it is on a CPU, and copies nothing else twice.
        return jax.device_put(tree, sharding)
    if isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.tree.map(lambda leaf: sharding, tree)
    return jax.tree.map(_own_parts, tree, sharding)


def _is_own(found: Any) -> bool:
    """Whether all devices of a sharding or an array belong to this process; numpy arrays do."""
    return getattr(found, "is_fully_addressable", True)


def _own_parts(leaf: Any, sharding: Any) -> Any:
    """Puts an array on the devices of `sharding`. Each process fills the parts of its devices."""
    if _is_own(sharding) or not _is_own(leaf):
        return jax.device_put(leaf, sharding)
    # `device_put` would gather the array from all processes, to compare it.
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])
