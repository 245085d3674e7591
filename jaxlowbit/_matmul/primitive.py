"""The primitive: its operands (`Operands.present`) and parameter, a `Problem`.

`rules.py` contains derivatives and batching, `lowering.py` the lowering.
"""

import functools
from typing import Any

import jax
from jax import Array, lax
from jax._src import dispatch  # lowering needs the devices; JAX has no public name for this
from jax.extend.core import Primitive
from jax.interpreters import xla

from .._backends.problem import Problem

quantized_matmul_p = Primitive("quantized_matmul")
quantized_matmul_p.def_impl(functools.partial(xla.apply_primitive, quantized_matmul_p))
dispatch.prim_requires_devices_during_lowering.add(quantized_matmul_p)


@quantized_matmul_p.def_abstract_eval
def _abstract_eval(lhs: Any, *operands: Any, problem: Problem) -> Any:
    del operands
    sharding = lhs.sharding.update(spec=jax.P(*[None] * lhs.ndim))
    shape, dtype = (*lhs.shape[:-1], problem.columns), problem.out_dtype
    return lhs.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _varying(array: Any) -> frozenset[Any]:
    """The mesh axes along which an array varies inside `jax.shard_map`."""
    return frozenset(jax.typeof(array).mat.varying)


def equally_varying(*operands: Array | None) -> list[Array | None]:
    """Inside `jax.shard_map`, marks operands as varying along every axis that any varies along."""
    axes = frozenset().union(*(_varying(x) for x in operands if x is not None))
    return [
        x
        if x is None or axes == _varying(x)
        else lax.pcast(x, tuple(axes - _varying(x)), to="varying")
        for x in operands
    ]
