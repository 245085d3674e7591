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
from typing import Any, NamedTuple

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


class _Division(NamedTuple):
    """How a mesh shards a product: axes of rows, stack, n and k, and sizes of a shard."""

    problem: Problem
    mesh: Any
    rows: list[Axes]  # of each axis of lhs before the last one
    stack: list[Axes]  # of each leading axis of the words
    n_axes: Axes
    k_axes: Axes
    shard_k: int  # padded input features of a shard of the words
    whole_n: bool  # each shard has whole atoms of channels
    whole_k: bool  # each shard of lhs has the input features of its words
    whole_groups: bool  # each shard has the scales of its words
    own_order: bool  # each shard has whole permutations

    @classmethod
    def of(cls, problem: Problem, mesh: Any, ops: Operands) -> "_Division":
        lhs, packed = _axes(ops.lhs), _axes(ops.packed)
        *stack, n_axes, k_axes, _ = packed
        taken = {axis for axes in packed for axis in axes}
        # Activations are sharded by axes that do not shard the words.
        rows = [tuple(axis for axis in axes if axis not in taken) for axes in lhs[:-1]]
        if problem.indexed:
            stack = [()]  # an index may select any matrix on any device
        else:
            stack = [words or x for words, x in zip(stack, rows[: len(stack)], strict=True)]
            rows[: len(stack)] = stack
        n_parts, k_parts = _size(mesh, n_axes), _size(mesh, k_axes)
        # A permutation that crosses devices applies to the whole lhs.
        own_order = problem.orders % k_parts == 0
        shard_k = ops.packed.shape[-2] // k_parts * ATOM
        span = problem.format.scale_span
        return cls(
            problem,
            mesh,
            rows,
            stack,
            n_axes,
            k_axes,
            shard_k,
            whole_n=not n_axes or problem.columns % (ATOM * n_parts) == 0,
            whole_k=own_order and ops.lhs.shape[-1] % (ATOM * k_parts) == 0,
            whole_groups=span != -1 and shard_k % span == 0,
            own_order=own_order,
        )

    def operands(self, ops: Operands) -> Operands:
        """The axes of each operand."""
        groups = [*self.stack, self.n_axes, self.k_axes if self.whole_groups else (), ()]
        order = [*self.stack, self.k_axes if self.own_order else ()]
        return Operands(
            lhs=[*self.rows, self.k_axes if self.whole_k else ()],
            packed=[*self.stack, self.n_axes, self.k_axes, ()],
            scale=groups,
            zero=None if ops.zero is None else groups,
            index=None if ops.index is None else self.rows[: len(ops.lead)],
            permutation=order if self.problem.orders else None,
        )

    def on_device(self, *operands: Array) -> Array:
        """The product on one device, of its shards."""
        problem, n_axes = self.problem, self.n_axes
        ops = problem.named(operands)
        if self.whole_n:
            problem = problem.replace(columns=problem.columns // _size(self.mesh, n_axes))
        else:
            problem = problem.replace(columns=ops.packed.shape[-3] * ATOM)
        if self.k_axes:
            out = self._sum_of_parts(problem, ops)
        else:
            out = quantized_matmul_p.bind(*operands, problem=problem)
        if self.whole_n:
            return out
        out = lax.all_gather(out, n_axes, axis=out.ndim - 1, tiled=True)
        return out[..., : self.problem.columns]

    def _sum_of_parts(self, problem: Problem, ops: Operands) -> Array:
        """The sum over devices of the products of their input features."""
        axes, parts = self.k_axes, _size(self.mesh, self.k_axes)
        format, orders = problem.format, problem.orders // parts
        if not self.whole_k:
            ops, orders = reordered(ops, problem.orders), 0
            ops = ops._replace(lhs=_own_rows(ops.lhs, self.shard_k, axes, parts))
        if not self.whole_groups and format.group_size != -1:
            rows = self.shard_k * parts
            scale, zero, format = super_blocks.expanded(ops.scale, ops.zero, format, rows)
            ops = ops._replace(scale=scale, zero=zero)
            ops, format = _own_groups(ops, format, self.shard_k, axes)
        local = problem.replace(format=format, orders=orders, out_dtype=problem.sums_dtype)
        out = quantized_matmul_p.bind(*ops.present(), problem=local)
        return lax.psum(out, axes).astype(problem.out_dtype)


def _partition(problem: Problem, mesh: Any, args: Any, result: Any) -> Any:
    del result
    ops = problem.named(args)
    division = _Division.of(problem, mesh, ops)

    def sharding(axes: list[Axes]) -> jax.NamedSharding:
        return jax.NamedSharding(mesh, jax.P(*(entry or None for entry in axes)))

    return (
        mesh,
        functools.partial(_untyped, division.on_device),
        sharding([*division.rows, division.n_axes if division.whole_n else ()]),
        tuple(sharding(axes) for axes in division.operands(ops).present()),
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
