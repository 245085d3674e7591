"""Products on meshes with Explicit axes, where shardings are part of types.

The sharding of the result follows from the operands, as in `jnp.dot`; inside, the axes are Auto, so
that one set of rules (`_matmul/partition.py`) partitions every product.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType

from .array import QuantizedArray

Sharding = jax.NamedSharding | jax.P


def multiply(
    product: Callable[[Array, QuantizedArray], Array],
    lhs: Array,
    rhs: QuantizedArray,
    out_sharding: Sharding | None,
) -> Array:
    """`product(lhs, rhs)`, with the sharding of the result if there are Explicit axes."""
    return chain(product, (lhs, rhs), lhs, (rhs,), out_sharding)


def chain(
    product: Callable[..., Array],
    operands: Any,
    lhs: Array,
    weights: Sequence[QuantizedArray],
    out_sharding: Sharding | None,
) -> Array:
    """`product(*operands)`, with the sharding of the result if there are Explicit axes.

    The default sharding is the result of a chain of products of lhs and `weights`.
    """
    mesh = mesh_of(operands)
    if mesh is None:
        if out_sharding is not None:
            raise ValueError(
                f"quantized_matmul: out_sharding is {out_sharding}, but lhs and rhs are on no mesh "
                "with Explicit axes; use jax.lax.with_sharding_constraint on the result."
            )
        return product(*operands)
    if isinstance(out_sharding, jax.NamedSharding):
        out_sharding = out_sharding.spec
    *_, spec = (_spec(lhs, rhs) if out_sharding is None else out_sharding for rhs in weights)
    return automatic(product, mesh, spec)(*operands)


def mesh_of(tree: Any) -> Any:
    """The mesh with Explicit axes of the arrays in a tree, or None."""
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(tree)]
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def automatic(function: Callable[..., Any], mesh: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` of arrays on `mesh`, with the Explicit axes made Auto inside."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(axis for axis, kind in types if kind is AxisType.Explicit)

    def run(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            inner: Any = jax.sharding.auto_axes(function, axes=axes, out_sharding=out_specs)
            return inner(*args)

    return run


def _spec(lhs: Array, rhs: QuantizedArray) -> jax.P:
    """The sharding of the result: of the rows, the leading axes and n, if it is unambiguous."""
    *rows, lhs_k = entries(lhs)
    *stack, n, rhs_k, _ = entries(rhs.packed)
    if lhs_k is not None or rhs_k is not None:
        raise ValueError(
            f"quantized_matmul: the contracted axis is sharded (lhs over {lhs_k!r}, rhs over "
            f"{rhs_k!r}), which leaves the sharding of the result open; name it by out_sharding=, "
            "such as jax.P(), as for jnp.dot."
        )
    lead = stack if rhs.index is None else entries(rhs.index)
    batch, row = rows[:-1], rows[-1:]
    ndim = max(len(batch), len(lead))
    batch, lead = ([None] * (ndim - len(axes)) + axes for axes in (batch, lead))
    batch = [x if x is not None else y for x, y in zip(batch, lead, strict=True)]
    spec = [*batch, *row, n]
    used = [axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))]
    if any(axis is not None and used.count(axis) > 1 for axis in used):
        raise ValueError(
            f"quantized_matmul: lhs is sharded as {jax.P(*rows)} and rhs over {n!r} along n, so "
            "that a mesh axis would occur twice in the result; name its sharding by out_sharding=."
        )
    return jax.P(*spec)


def entries(array: Any) -> list[Any]:
    """The entries of an array's sharding, one per axis."""
    spec = jax.typeof(array).sharding.spec
    return [*spec, *[None] * (array.ndim - len(spec))]


def beside(values: Array, result: Array) -> Array:
    """Gives values (..., 1) the row sharding of a result (..., n), if types carry shardings."""
    if mesh_of((values, result)) is None:
        return values
    rows = entries(result)[:-1][result.ndim - values.ndim :]
    sizes = values.shape[:-1]
    spec = (None if size == 1 else row for row, size in zip(rows, sizes, strict=True))
    return jax.sharding.reshard(values, jax.P(*spec, None))
