"""The kernel for GPUs, through Pallas's Triton lowering, for builds without the compiled kernels.

JAX deprecates that lowering and warns about it. Joining the slots of an atom, and naming its axes,
gives the weights in matrix order; Triton then finds them in the registers that a tensor core
instruction reads, so none passes through shared memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._core import layout
from ..._core.format import Format
from ..._core.layout import ATOM
from . import slots

MODULE = "jax.experimental.pallas.triton"
# Bytes of lhs per input feature: 128 rows of 16 bits take 53 KB of the 99 KB that sm_86 has.
_MAX_BLOCK_BYTES = 256
_PROGRAMS = 512  # about four per multiprocessor
_MIN_ATOMS = 8  # along k, per program
_WARPS, _STAGES = 4, 3


def product(lhs: Array, packed: Array, groups: list[Array], format: Format) -> Array:
    """Products (batch, m, k) x (batch, k, n) in float32, with padding of m and n.

    k is divided into split-K slices, each a partial sum of one program.
    """
    from jax.experimental import pallas as pl  # slow to import and rarely needed
    from jax.experimental.pallas import triton

    batch, m, k = lhs.shape
    n_blocks, k_blocks, num_words = packed.shape[1:]
    block_m = _block_m(m, lhs.dtype)
    m_blocks = -(-m // block_m)
    atoms = _atoms(batch * m_blocks * n_blocks, k_blocks)
    parts = -(-k_blocks // atoms)
    lhs = jnp.pad(lhs, [(0, 0), (0, m_blocks * block_m - m), (0, k_blocks * ATOM - k)])
    packed = packed.reshape(batch, n_blocks, k_blocks, 32, num_words // 32)
    groups = [x.reshape(batch, n_blocks, -1, 32, 2) for x in groups]
    steps = layout.steps_by_slot(format.bits)

    def strip(b: Any, i: Any, j: Any, t: Any) -> tuple[Any, ...]:
        return b, j, 0, 0, 0

    out = pl.pallas_call(
        functools.partial(_kernel, format=format, atoms=atoms, k_blocks=k_blocks),
        grid=(batch, m_blocks, n_blocks, parts),
        in_specs=[
            pl.BlockSpec(steps.shape, lambda b, i, j, t: (0, 0, 0)),
            pl.BlockSpec((None, block_m, lhs.shape[-1]), lambda b, i, j, t: (b, i, 0)),
            *(pl.BlockSpec((None, None, *x.shape[-3:]), strip) for x in (packed, *groups)),
        ],
        out_specs=pl.BlockSpec((None, None, ATOM, block_m), lambda b, i, j, t: (b, t, j, i)),
        out_shape=jax.ShapeDtypeStruct(
            (batch, parts, n_blocks * ATOM, m_blocks * block_m),
            jnp.float32,
            manual_axis_type=jax.typeof(lhs).mat,
        ),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
    )(steps, lhs, packed, *groups)
    return jnp.swapaxes(out.sum(1), 1, 2)


def _kernel(
    steps: Any, lhs: Any, packed: Any, *rest: Any, format: Format, atoms: int, k_blocks: int
) -> None:
    """Computes the partial sums (64, block_m) of one split-K slice of a strip of channels."""
    from jax.experimental import pallas as pl

    *groups, out = rest
    first = atoms * pl.program_id(3)

    def load(values: Any, group: Any, half: int) -> Array:
        return values[group, :, half : half + 1].astype(jnp.float32)

    def add_atom(k_block: Any, accumulators: Array) -> Array:
        words = packed[k_block]
        weights = slots.dequantize(words, steps, groups, load, k_block, format)
        weights = [weight.astype(lhs.dtype) for weight in weights]
        return accumulators + lax.dot_general(
            layout.from_slots(weights, format.bits),
            lhs[:, pl.ds(ATOM * k_block, ATOM)],
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    last = jnp.minimum(first + atoms, k_blocks)
    out[...] = lax.fori_loop(first, last, add_atom, jnp.zeros(out.shape, out.dtype))


def _block_m(m: int, dtype: jnp.dtype) -> int:
    """Rows of lhs per program: a power of two, at least 16."""
    return min(_MAX_BLOCK_BYTES // dtype.itemsize, max(16, 1 << (m - 1).bit_length()))


def _atoms(programs: int, k_blocks: int) -> int:
    """The number of atoms along k per program, chosen to get enough programs."""
    return max(_MIN_ATOMS, -(-k_blocks // max(1, _PROGRAMS // programs)))
