"""A sequence of products and epilogues lowered to one CUDA custom call.

The meaning, derivatives and partitioning of such a call are those of a composition of separate
products. It is lowered to a custom call only for a single CUDA device.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax._src import dispatch  # lowering needs the devices; JAX has no public name for this
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from .._backends import custom_calls, selection
from .._core import explicit, exporting
from .._core.array import QuantizedArray
from . import partition
from .options import Options
from .primitive import equally_varying
from .support import only_gpus_of, unfit_gpus

Rows = Sequence[Any]
Weights = Sequence[QuantizedArray]
Others = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call, hashable.

    The operands of its methods are the leaves of three tuples, which `named` restores: rows (arrays
    with the same leading axes, lhs first), weights, and others, such as biases.
    """

    treedef: Any
    options: Options

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        """The results, computed by separate products."""
        raise NotImplementedError

    def custom_call(self, *operands: Array) -> tuple[Array, ...]:
        """The results, computed by one CUDA custom call."""
        raise NotImplementedError

    def cpu_call(self, *operands: Array) -> tuple[Array, ...]:
        """The results, computed by one CPU custom call."""
        raise NotImplementedError

    def cpu_supports(self, rows: Rows, weights: Weights) -> bool:
        """Whether a CPU custom call computes this, as in `supports`."""
        return False

    def cpu_fits(self, context: Any) -> bool:
        """Whether the CPU call runs on all CPUs that a program is lowered for."""
        return True

    def supports(self, rows: Rows, weights: Weights) -> bool:
        """Whether the CUDA custom call computes this; operands are shapes and dtypes."""
        lhs = rows[0]
        return (
            self.options.backend in (None, "cuda")
            and lhs.dtype != jnp.float32  # only single products split it into parts
            and math.prod(lhs.shape[:-1]) != 0
            and all(is_supported("cuda", lhs, weight) for weight in weights)
        )

    def fits(self, context: Any) -> bool:
        """Whether the CUDA call runs on the GPUs that a program is lowered for."""
        return not unfit_gpus(context)

    def folds(self, weights: Weights) -> bool:
        """Whether a batch of rows, as a new leading axis, is equivalent to more rows."""
        return True

    def named(self, operands: Sequence[Any]) -> tuple[Rows, Weights, Others]:
        return jax.tree.unflatten(self.treedef, operands)

    @property
    def num_rows(self) -> int:
        """The number of rows operands, which come first."""
        return self.treedef.children()[0].num_leaves


class Product(Call):
    """A call of one product, whose rows broadcast against the leading axes of its weight."""

    def folds(self, weights: Weights) -> bool:
        # Leading axes of lhs are rows for a single matrix, but stack axes for a stack.
        return weights[0].ndim == 2


def is_supported(platform: str, lhs: Any, weight: QuantizedArray) -> bool:
    """Whether the kernels of a platform read this weight directly."""
    reason = custom_calls.unsupported(platform, lhs.dtype, weight.format, sizes=weight.padded_shape)
    in_order = weight.permutation is None and weight.shards == (1, 1)
    if weight.format.scale == "two_level":
        rows = math.prod(lhs.shape[:-1])
        size = (rows, weight.k, weight.n)
        in_order &= platform == "cuda" and selection.reads_super_blocks(
            lhs.dtype, *size, weight.format
        )
    return in_order and reason is None


def fits_hopper_alone(weights: Weights) -> bool:
    """Whether calls that read these weights run only on Hopper."""
    return any(weight.format.scale == "two_level" for weight in weights)


_call_p = Primitive("quantized_call")
_call_p.multiple_results = True
_call_p.def_impl(functools.partial(xla.apply_primitive, _call_p))
dispatch.prim_requires_devices_during_lowering.add(_call_p)


def run(
    kind: type[Call],
    rows: Rows,
    weights: Weights,
    options: Options,
    others: Others = (),
    **fields: Any,
) -> tuple[Array, ...]:
    """The results of a kind of call with these `fields`; operands must be checked."""
    rows = tuple(x if x is None else jnp.asarray(x) for x in rows)
    operands, treedef = jax.tree.flatten((rows, tuple(weights), tuple(others)))
    call = kind(treedef, options, **fields)
    if options.out_sharding is not None or explicit.mesh_of(operands) is not None:
        return call.composition(*operands)
    return tuple(_call_p.bind(*equally_varying(*operands), call=call))


@_call_p.def_abstract_eval
def _abstract_eval(lhs: Any, *operands: Any, call: Call) -> list[Any]:
    def aval(out: Any) -> Any:
        sharding = lhs.sharding.update(spec=jax.P(*[None] * len(out.shape)))
        return lhs.update(shape=out.shape, dtype=out.dtype, weak_type=False, sharding=sharding)

    # Tracing the composition also raises the errors of its products.
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, *operands)]
    return [aval(out) for out in jax.eval_shape(call.composition, *shapes)]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> Any:
    moving = {i: dot for i, dot in enumerate(tangents) if type(dot) is not ad.Zero}

    def composition(*values: Array) -> tuple[Array, ...]:
        operands = [*primals]
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return call.composition(*operands)

    return jax.jvp(composition, [primals[i] for i in moving], [*moving.values()])


ad.primitive_jvps[_call_p] = _jvp


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, call: Call) -> Any:
    rows = call.num_rows
    shared = all(dim is None for dim in dims[rows:])
    if shared and call.folds(call.named(operands)[1]):
        # The whole batch shares one set of weights, so it is more rows.
        size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
        front = [
            batching.bdim_at_front(x, dim, size)
            for x, dim in zip(operands[:rows], dims[:rows], strict=True)
        ]
        outs = _call_p.bind(*front, *operands[rows:], call=call)
    else:
        outs = jax.vmap(call.composition, in_axes=tuple(dims))(*operands)
    return outs, [0] * len(outs)


batching.primitive_batchers[_call_p] = _batch


def _lower_cuda(ctx: mlir.LoweringRuleContext, *operands: Any, call: Call) -> Any:
    rows, weights, _ = call.named(ctx.avals_in)
    alone = partition.divided(ctx) is None and call.fits(ctx.module_context)
    if alone and fits_hopper_alone(weights):
        alone = only_gpus_of(90, ctx.module_context)
    one_call = alone and call.supports(rows, weights)
    function = call.custom_call if one_call else call.composition
    function = exporting.with_remedy(ctx, function)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, call: Call) -> Any:
    function = exporting.with_remedy(ctx, call.composition)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _lower_cpu(ctx: mlir.LoweringRuleContext, *operands: Any, call: Call) -> Any:
    rows, weights, _ = call.named(ctx.avals_in)
    alone = partition.divided(ctx) is None and call.cpu_fits(ctx.module_context)
    one_call = alone and call.cpu_supports(rows, weights)
    function = call.cpu_call if one_call else call.composition
    function = exporting.with_remedy(ctx, function)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


mlir.register_lowering(_call_p, _lower)
mlir.register_lowering(_call_p, _lower_cpu, platform="cpu")
mlir.register_lowering(_call_p, _lower_cuda, platform="cuda")
