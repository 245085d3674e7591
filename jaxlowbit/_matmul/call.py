"""A sequence of products and epilogues lowered to one CUDA custom call.

Such a call has the values, derivatives and partitioning of a composition of separate products. It
is lowered to a custom call only for a single device.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax._src import dispatch  # lowering needs the devices; JAX has no public name for this
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, xla

from .._backends import registry
from .._backends.cuda import HOPPER, reads_super_blocks
from .._backends.target import Target
from .._core import explicit
from .._core.array import QuantizedArray
from .lowering import register
from .options import Options
from .primitive import equally_varying

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

    @property
    def custom_calls(self) -> Mapping[str, Callable[..., tuple[Array, ...]]]:
        """The functions that compute the results by one custom call, by platform."""
        raise NotImplementedError

    @property
    def differentiable(self) -> "Call":
        """The call with a composition that JAX differentiates and batches, of equal results."""
        return self

    def unsupported(self, rows: Rows, weights: Weights, target: Target) -> str | None:
        """Returns None if the custom call of a target computes this, else the reason; operands are
        shapes and dtypes."""
        lhs = rows[0]
        if self.options.backend not in (None, target.platform):
            return f"backend={self.options.backend!r} is requested"
        if math.prod(lhs.shape[:-1]) == 0:
            return "the result is empty"
        if target.platform == "cuda" and lhs.dtype == jnp.float32:
            return "only single products split float32 into bfloat16 parts"
        return target.unfit or first(unread(target, lhs, weight) for weight in weights)

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


def unread(target: Target, lhs: Any, weight: QuantizedArray) -> str | None:
    """Returns None if the kernels of a target read this weight directly, else the reason."""
    reason = registry.unsupported(
        target.platform, lhs.dtype, weight.format, sizes=weight.padded_shape
    )
    if reason is not None:
        return reason
    if weight.permutation is not None or weight.shards != (1, 1):
        return "the rows of a weight are permuted or padded in shards"
    if not weight.format.two_levels:
        return None
    m, k, n = math.prod(lhs.shape[:-1]), weight.k, weight.n
    if target.is_only(HOPPER) and reads_super_blocks(lhs.dtype, m, k, n, weight.format):
        return None
    return "XLA expands scales of two levels for this product"


def first(reasons: Iterable[str | None]) -> str | None:
    """The first reason, or None."""
    return next(filter(None, reasons), None)


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
        return call.differentiable.composition(*operands)

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
        outs = jax.vmap(call.differentiable.composition, in_axes=tuple(dims))(*operands)
    return outs, [0] * len(outs)


batching.primitive_batchers[_call_p] = _batch


def _choose(call: Call, avals: Sequence[Any], target: Target | None) -> Callable[..., Any]:
    custom_call = None if target is None else call.custom_calls.get(target.platform or "")
    if target is not None and custom_call is not None:
        rows, weights, _ = call.named(avals)
        if call.unsupported(rows, weights, target) is None:
            return custom_call
    return call.composition


register(_call_p, _choose)
