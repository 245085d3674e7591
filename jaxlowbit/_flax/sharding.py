"""Sharding of the arrays of a kernel, from the metadata of the float kernel."""

import dataclasses
from typing import Any

import jax
from jax.core import Tracer

from .._core.array import QuantizedArray
from .._core.sharding import Own, leaf_specs, own_parts, own_parts_anywhere

Entries = tuple[Any, ...]
"""The entries of a `jax.P`, one for each axis."""


@dataclasses.dataclass(frozen=True)
class MatrixSharding:
    """The sharding of a matrix (*lead, k, n).

    - `names`: the entries in the metadata: mesh axes, or logical names.
    - `axes`: the mesh axes that rules assign to these; without rules, the same.
    - `mesh`: None if there is none yet.
    """

    names: Entries
    axes: Entries
    mesh: Any

    def divide(self, kernel: QuantizedArray) -> tuple[QuantizedArray, QuantizedArray]:
        """Returns the kernel, sharded if the mesh is known, and the names of each leaf as a
        `jax.P`.

        **Raises:** `ValueError` if `QuantizedArray.partition_spec` does.
        """
        if not self._known:
            return kernel, _specs(kernel, self.names, own_parts_anywhere(kernel))
        *_, k, n = self.axes
        own = own_parts(kernel, self.mesh, k, n)
        if isinstance(kernel.packed, jax.Array):
            kernel = jax.tree.map(self._place, kernel, _specs(kernel, self.axes, own))
        return kernel, _specs(kernel, self.names, own)

    def divide_factor(self, factor: Any) -> tuple[Any, jax.P]:
        """Returns factors (*lead, k) of the inputs, sharded if the mesh is known, and their
        names."""
        if self._known and isinstance(factor, jax.Array):
            factor = self._place(factor, jax.P(*self.axes[:-1]))
        return factor, jax.P(*self.names[:-1])

    @property
    def _known(self) -> bool:
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in self.axes)
        named = {axis for entry in entries for axis in entry if axis is not None}
        return self.mesh is not None and named <= set(self.mesh.axis_names)

    def _place(self, leaf: Any, spec: jax.P) -> Any:
        sharding = jax.NamedSharding(self.mesh, spec)
        if self.mesh.are_all_axes_explicit:
            return jax.sharding.reshard(leaf, sharding)
        if self.mesh.are_all_axes_auto:
            return jax.lax.with_sharding_constraint(leaf, sharding)
        return leaf


def mesh_of(weight: Any) -> Any:
    """The mesh of the context, else the mesh of a weight outside `jax.jit`, or None."""
    context = jax.sharding.get_abstract_mesh()
    if not context.empty:
        return context
    sharding = None if isinstance(weight, Tracer) else getattr(weight, "sharding", None)
    return sharding.mesh if isinstance(sharding, jax.NamedSharding) else None


def padded(entries: Any, ndim: int) -> Entries:
    return (*entries, *[None] * (ndim - len(entries)))


def _specs(kernel: QuantizedArray, entries: Entries, own: Own) -> QuantizedArray:
    *lead, k, n = entries
    return leaf_specs(kernel, k=k, n=n, lead=lead, own=own)
