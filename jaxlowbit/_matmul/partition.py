"""Partitioning of a product over the devices of a mesh with Auto axes.

Packed words are not moved. Sharded channels (n_blocks) and leading axes need no communication. If
input features (k_blocks) are sharded, every device computes a partial product, in float32 or int32,
and one all-reduce sums them before the result is rounded.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AxisType

from .._backends.problem import Operands, Problem
from .._backends.stored_rows import reordered
from .._core import super_blocks
from .._core.format import Format
from .._core.layout import ATOM
from .primitive import quantized_matmul_p

Axes = tuple[str, ...]


def divided(ctx: mlir.LoweringRuleContext) -> mlir.LoweringRuleContext | None:
    """The context with the mesh that XLA partitions the program over, or None.

    XLA does not partition programs for one device, or inside `jax.shard_map`.
    """
    context: Any = ctx.module_context.axis_context
    if getattr(context, "num_devices", 1) == 1 or not hasattr(context, "abstract_mesh"):
        return None
    # Arguments without a sharding leave out the mesh of `jax.set_mesh`.
    mesh = context.abstract_mesh or jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    context = dataclasses.replace(context, abstract_mesh=mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=context))


@functools.partial(custom_partitioning, static_argnums=(0,))
def matmul(problem: Problem, *operands: Array) -> Array:
    """The primitive, partitioned by the rules below."""
    return quantized_matmul_p.bind(*operands, problem=problem)


def _sharding_rule(problem: Problem, mesh: Any, operands: Any, results: Any) -> Any:
    """The axes that are sharded together, in the notation of `custom_partitioning`.

    Scales follow only the channels; `_partition` moves them along k, since a shard of the words may
    end inside a group.
    """
    del mesh, results
    ops = problem.named(operands)
    lead = [f"l{i}" for i in range(len(ops.lead))]
    rows = [f"m{i}" for i in range(len(ops.rows))]
    stack = ["s"] if problem.indexed else lead
    n_blocks, k_blocks, _ = ops.packed.shape[-3:]
    sizes = {}

    def blocked(size: int, blocks: int, factor: str, inner: str) -> str:
        if size != blocks * ATOM or blocks == 1:
            return inner
        sizes[inner] = ATOM
        return f"({factor} {inner})"

    k = blocked(ops.lhs.shape[-1], k_blocks, "c", "k")
    positions = "r" if problem.orders == 1 else k
    groups = [*stack, "b", "g", "e"]
    axes = Operands(
        lhs=[*lead, *rows, k],
        packed=[*stack, "b", "c", "w"],
        scale=groups,
        zero=None if ops.zero is None else groups,
        index=None if ops.index is None else lead,
        permutation=[*stack, positions] if problem.orders else None,
    )
    result = [*lead, *rows, blocked(problem.columns, n_blocks, "b", "n")]
    rule = ", ".join(" ".join(names) for names in axes.present()) + " -> " + " ".join(result)
    order = list(dict.fromkeys(re.findall(r"\w+", rule)))  # special factors are named in it
    return rule, {
        "reduction_factors": tuple(factor for factor in order if factor in "cg"),
        "need_replication_factors": tuple(factor for factor in order if factor in "knwer"),
        **sizes,
    }


def _partition(problem: Problem, mesh: Any, args: Any, result: Any) -> Any:
    del result
    ops = problem.named(args)
    lhs, packed = _axes(ops.lhs), _axes(ops.packed)
    *stack, n_axes, k_axes, _ = packed
    taken = {axis for axes in packed for axis in axes}
    k, size = ops.lhs.shape[-1], functools.partial(_size, mesh)

    def free(axes: Axes) -> Axes:
        """The axes of activations that do not shard the words."""
        return tuple(axis for axis in axes if axis not in taken)

    rows = [free(axes) for axes in lhs[:-1]]
    if problem.indexed:
        stack = [()]  # an index may select any matrix on any device
    else:
        stack = [words or x for words, x in zip(stack, rows[: len(stack)], strict=True)]
        rows[: len(stack)] = stack
    lead = rows[: len(ops.lead)]
    whole_n = not n_axes or problem.columns % (ATOM * size(n_axes)) == 0
    # A permutation that crosses devices applies to the whole lhs.
    own_order = problem.orders % size(k_axes) == 0
    whole_k = own_order and k % (ATOM * size(k_axes)) == 0
    shard_k = ops.packed.shape[-2] // size(k_axes) * ATOM
    span = problem.format.scale_span
    whole_groups = span != -1 and shard_k % span == 0

    groups = [*stack, n_axes, k_axes if whole_groups else (), ()]
    shardings = Operands(
        lhs=[*rows, k_axes if whole_k else ()],
        packed=[*stack, n_axes, k_axes, ()],
        scale=groups,
        zero=None if ops.zero is None else groups,
        index=None if ops.index is None else lead,
        permutation=[*stack, k_axes if own_order else ()] if problem.orders else None,
    )

    def on_device(*operands: Array) -> Array:
        ops = problem.named(operands)
        n = problem.columns // size(n_axes) if whole_n else ops.packed.shape[-3] * ATOM
        if not k_axes:
            local = problem.replace(columns=n)
            out = quantized_matmul_p.bind(*operands, problem=local)
        else:
            format, orders = problem.format, problem.orders // size(k_axes)
            if not whole_k:
                ops, orders = reordered(ops, problem.orders), 0
                ops = ops._replace(lhs=_own_rows(ops.lhs, shard_k, k_axes, size(k_axes)))
            if not whole_groups and format.group_size != -1:
                rows = problem.named(args).packed.shape[-2] * ATOM  # of all shards
                scale, zero, format = super_blocks.expanded(ops.scale, ops.zero, format, rows)
                ops, format = _own_groups(
                    ops._replace(scale=scale, zero=zero), format, shard_k, k_axes
                )
            local = problem.replace(
                columns=n, format=format, orders=orders, out_dtype=problem.sums_dtype
            )
            out = quantized_matmul_p.bind(*ops.present(), problem=local)
            out = lax.psum(out, k_axes).astype(problem.out_dtype)
        if whole_n:
            return out
        return lax.all_gather(out, n_axes, axis=out.ndim - 1, tiled=True)[..., : problem.columns]

    def sharding(axes: list[Axes]) -> jax.NamedSharding:
        return jax.NamedSharding(mesh, jax.P(*(entry or None for entry in axes)))

    wanted = tuple(sharding(axes) for axes in shardings.present())
    return (
        mesh,
        functools.partial(_untyped, on_device),
        sharding([*rows, n_axes if whole_n else ()]),
        wanted,
    )


matmul.def_partition(partition=_partition, sharding_rule=_sharding_rule)


def _untyped(local: Callable[..., Array], *operands: Array) -> Array:
    """`local(*operands)` without the Explicit axes of `jax.set_mesh`, which do not apply inside."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return local(*operands)
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    with jax.sharding.use_abstract_mesh(mesh.update(axis_types=auto)):
        return local(*jax.sharding.reshard(operands, jax.P()))


def _own_rows(lhs: Array, shard_k: int, axes: Axes, shards: int) -> Array:
    """The input features for this device's words, sliced from all of them."""
    pad = [(0, 0)] * (lhs.ndim - 1) + [(0, shards * shard_k - lhs.shape[-1])]
    start = lax.axis_index(axes) * shard_k
    return lax.dynamic_slice_in_dim(jnp.pad(lhs, pad), start, shard_k, axis=-1)


def _own_groups(ops: Operands, format: Format, shard_k: int, axes: Axes) -> tuple[Operands, Format]:
    """The scales and zeros for this device's words, if a shard ends inside a group.

    Groups are repeated as finer ones that divide a shard; a single group is shared by all shards.
    """
    if ops.scale.shape[-2] == 1:
        return ops, format.replace(group_size=-1)
    size = math.gcd(format.group_size, shard_k)
    count = shard_k // size

    def own(values: Array | None) -> Array | None:
        if values is None:
            return None
        finer = jnp.repeat(values, format.group_size // size, axis=-2)
        return lax.dynamic_slice_in_dim(finer, lax.axis_index(axes) * count, count, axis=-2)

    ops = ops._replace(scale=own(ops.scale), zero=own(ops.zero))
    return ops, format.replace(group_size=size)


def _axes(operand: Any) -> list[Axes]:
    """The mesh axes that shard each axis of an operand."""
    spec = operand.sharding.spec
    entries = (*spec, *[None] * (len(operand.shape) - len(spec)))
    return [entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in entries]


def _size(mesh: Any, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
