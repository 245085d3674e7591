"""A product without an epilogue: from arrays to the primitive."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._backends.problem import Operands, Problem
from .._core import explicit, padding, permutations
from .._core.array import QuantizedArray
from .._core.dequantize import codes_of, in_units
from .options import Options
from .primitive import equally_varying, quantized_matmul_p


def multiply(lhs: Array, rhs: QuantizedArray, options: Options) -> Array:
    """`lhs @ rhs` for checked operands; on a mesh with Explicit axes, inside `auto_axes`."""
    if options.out_sharding is not None or explicit.mesh_of((lhs, rhs)) is not None:
        product = functools.partial(multiply, options=options.replace(out_sharding=None))
        return explicit.multiply(product, lhs, rhs, options.out_sharding)
    out_dtype, accumulate_float16 = options.out_dtype(lhs), options.accumulate_float16
    if lhs.dtype == jnp.float16 and rhs.format.outgrows_float16:
        lhs, accumulate_float16 = lhs.astype(jnp.float32), False
    k_shards, n_shards = rhs.shards
    if k_shards > 1:
        lhs = padding.spread(lhs, -1, k_shards, rhs.format.shard_unit)
    lead = rhs.shape[:-2]
    vector = lhs.ndim == 1
    lhs = lhs[None] if vector else lhs
    batch = jnp.broadcast_shapes(lhs.shape[:-2], lead)
    # Leading axes of lhs that the stack lacks are more rows of the same weights.
    stacked, extra = range(len(lead)), len(batch) - len(lead)
    if lead:
        rhs = rhs if batch[extra:] == lead else _broadcast(rhs, batch[extra:])
        lhs = jnp.broadcast_to(lhs, (*batch, *lhs.shape[-2:]))
        lhs = jnp.moveaxis(lhs, [extra + i for i in stacked], stacked)
    permutation = rhs.permutation
    if permutation is not None:
        permutation = permutations.spread(permutation, k_shards, rhs.padded_shape[0])
    scale = rhs.scale if rhs.format.scale is None else codes_of(rhs.scale)
    operands = Operands(lhs, rhs.packed, scale, rhs.zero, rhs.index, permutation)
    problem = Problem(
        format=rhs.format,
        columns=rhs.padded_shape[1],
        transposed=False,
        indexed=rhs.index is not None,
        orders=0 if permutation is None else k_shards,
        out_dtype=out_dtype if rhs.tensor_scale is None else jnp.dtype("float32"),
        accumulate_float16=accumulate_float16,
        backend=options.backend,
    )
    out = quantized_matmul_p.bind(*equally_varying(*operands), problem=problem)
    out = jnp.moveaxis(out, stacked, [extra + i for i in stacked])
    if rhs.tensor_scale is not None:
        out = in_units(out, rhs.unit).astype(out_dtype)
    if n_shards > 1:
        out = padding.join(out, -1, n_shards, rhs.n)
    return out[..., 0, :] if vector else out


def _broadcast(rhs: QuantizedArray, lead: tuple[Any, ...]) -> QuantizedArray:
    """A view of `rhs` with its leading axes broadcast to `lead`."""
    if rhs.index is None:
        stack = rhs.shape[:-2]
        size = math.prod(stack)
        rhs = jax.tree.map(lambda leaf: leaf.reshape(size, *leaf.shape[len(stack) :]), rhs)
        rhs = rhs.select(jnp.arange(size, dtype=jnp.int32).reshape(stack))
    return rhs._with(index=jnp.broadcast_to(jnp.asarray(rhs.index), lead))
