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


def equally_varying(*operands: Array | None) -> list[Array]:
    """The operands that are not None; inside `jax.shard_map`, marked as varying along every mesh
    axis that any varies along."""
    present = [operand for operand in operands if operand is not None]
    varying = [frozenset(jax.typeof(x).mat.varying) for x in present]
    axes = frozenset().union(*varying)
    return [
        x if own == axes else lax.pcast(x, tuple(axes - own), to="varying")
        for x, own in zip(present, varying, strict=True)
    ]
