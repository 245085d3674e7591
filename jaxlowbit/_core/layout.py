"""Packed layout, version 1: the bit order in memory, which no other Python file depends on.

A (k, n) matrix is cut into 64 x 64 atoms. Inside an atom, values have the register order of a
tensor core instruction (`mma` m16n8k16, `wgmma` m64k16 with the weight as register operand):

    n = 16 w + 8 h + g        w: warp 0-3, h: 0-1, g: 0-7
    k = 16 s + 8 v + 2 t + e  s: step 0-3, v: 0-1, t: 0-3, e: 0-1

Lane 4 g + t of warp w holds 32 values, one for each (s, v, h, e), in one 32-bit word per bit.
`docs/layout.md` draws it; `cuda/device/layout.cuh` implements it on the device.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

VERSION = 1
ATOM = 64
WORDS_PER_BIT = ATOM * ATOM // 32
"""Words of an atom for each bit of a quantized value."""

# The binary and larger digits of a position in an atom, most significant first. S and s are the two
# digits of the step s above.
_N_AXES, _N_SIZES = "whg", (4, 2, 8)
_K_AXES, _K_SIZES = "Ssvte", (2, 2, 2, 4, 2)
_MATRIX = "K" + _K_AXES + "N" + _N_AXES


class _Plane(NamedTuple):
    """Bits `shift` to `shift + bits` of every quantized value, and their position in a lane.

    A lane's words form one sequence of 32 slots of `bits` bits, lowest bits first. `slots` names
    the binary digits of the slot number, highest first, with S for the high digit of s.
    """

    bits: int
    shift: int
    slots: str

    @property
    def mask(self) -> Array:
        return jnp.uint32((1 << self.bits) - 1)

    def slot_shifts(self, ndim: int) -> Array:
        """Position of each slot in its word, along the last of `ndim` axes."""
        return jnp.arange(0, 32, self.bits, dtype=jnp.uint32).reshape((1,) * (ndim - 1) + (-1,))


# Widths that are not a power of two are split into planes, so that a plane's values never straddle
# words and merge with one instruction per register (docs/layout.md has the sequences).
_PLANES = {
    1: (_Plane(1, 0, "eSsvh"),),
    2: (_Plane(2, 0, "Sesvh"),),
    3: (_Plane(2, 0, "Sevhs"), _Plane(1, 2, "evhSs")),
    4: (_Plane(4, 0, "Ssevh"),),
    5: (_Plane(4, 0, "Ssehv"), _Plane(1, 4, "ehSsv")),
    6: (_Plane(4, 0, "Ssehv"), _Plane(2, 4, "Sehsv")),
    7: (_Plane(4, 0, "Ssehv"), _Plane(2, 4, "Sehsv"), _Plane(1, 6, "ehSsv")),
    8: (_Plane(8, 0, "Ssveh"),),
}


def blocks(size: int) -> int:
    """Atoms needed to cover `size` rows or columns."""
    return -(-size // ATOM)


def pack(qvalue: Array, bits: int) -> Array:
    """Packs quantized values, uint8 (..., k, n), into uint32 (..., n_blocks, k_blocks, words).

    k and n are padded to 64 with zeros.
    """
    *lead, k, n = qvalue.shape
    pad = [(0, 0)] * len(lead) + [(0, blocks(k) * ATOM - k), (0, blocks(n) * ATOM - n)]
    qvalue = jnp.pad(qvalue, pad).reshape(*lead, blocks(k), *_K_SIZES, blocks(n), *_N_SIZES)
    planes = []
    for plane in _PLANES[bits]:
        slots = _transpose(qvalue, _MATRIX, "NKwgt" + plane.slots)
        slots = slots.reshape(
            *lead, blocks(n), blocks(k), WORDS_PER_BIT * plane.bits, 32 // plane.bits
        )
        values = (slots.astype(jnp.uint32) >> plane.shift) & plane.mask
        planes.append(jnp.sum(values << plane.slot_shifts(values.ndim), axis=-1, dtype=jnp.uint32))
    return jnp.concatenate(planes, axis=-1)


def unpack(packed: Array, bits: int) -> Array:
    """The inverse of `pack`, padding included: uint8 (..., k_padded, n_padded)."""
    *lead, n_blocks, k_blocks, _ = packed.shape
    qvalue = jnp.zeros((), jnp.uint8)
    start = 0
    for plane in _PLANES[bits]:
        words = packed[..., start : start + WORDS_PER_BIT * plane.bits]
        start += words.shape[-1]
        slots = (words[..., None] >> plane.slot_shifts(words.ndim + 1)) & plane.mask
        slots = slots.astype(jnp.uint8).reshape(*lead, n_blocks, k_blocks, 4, 8, 4, *(2,) * 5)
        values = _transpose(slots, "NKwgt" + plane.slots, _MATRIX)
        qvalue = qvalue | (values << plane.shift)
    return qvalue.reshape(*lead, k_blocks * ATOM, n_blocks * ATOM)


def unpack_columns(packed: Array, bits: int, columns: Array) -> Array:
    """Quantized values (k_padded, columns) of some columns, reading one more column for each.

    A column is half of the values of four lanes, whose words are consecutive in every atom and
    plane; the other half is the column eight before or after. Columns are not checked.
    """
    block, w, h, g = _position(columns)
    k_blocks = packed.shape[-2]
    qvalue = jnp.zeros((), jnp.uint8)
    start = 0
    for plane in _PLANES[bits]:
        size = 4 * plane.bits
        words = _slices(packed, block, start + (8 * w + g) * size, size)
        start += WORDS_PER_BIT * plane.bits
        words = words.reshape(-1, k_blocks, 4, plane.bits, 1)
        slots = (words >> plane.slot_shifts(words.ndim)) & plane.mask
        slots = slots.astype(jnp.uint8).reshape(-1, k_blocks, 4, *(2,) * 5)
        values = _transpose(slots, "NKt" + plane.slots, "K" + _K_AXES + "Nh")
        qvalue = qvalue | (values << plane.shift)
    qvalue = jnp.where(h == 0, qvalue[..., 0], qvalue[..., 1])
    return qvalue.reshape(k_blocks * ATOM, -1)


def pack_groups(values: Array) -> Array:
    """Orders one value per group and channel (..., groups, n) as (..., n_blocks, groups, 64).

    Inside the 64, rows g and g + 8 of a warp are adjacent, so that a lane reads both at once. n is
    padded with zeros.
    """
    *lead, groups, n = values.shape
    values = jnp.pad(values, [(0, 0)] * (len(lead) + 1) + [(0, blocks(n) * ATOM - n)])
    values = values.reshape(*lead, groups, blocks(n), *_N_SIZES)
    return _transpose(values, "GN" + _N_AXES, "NGwgh").reshape(*lead, blocks(n), groups, ATOM)


def unpack_groups(values: Array) -> Array:
    """The inverse of `pack_groups`, without removing the padding: (..., groups, n_padded)."""
    *lead, n_blocks, groups, _ = values.shape
    values = values.reshape(*lead, n_blocks, groups, 4, 8, 2)
    return _transpose(values, "NGwgh", "GN" + _N_AXES).reshape(*lead, groups, n_blocks * ATOM)


def unpack_group_columns(values: Array, columns: Array) -> Array:
    """The values (groups, columns) of some columns of one matrix, reading only these."""
    block, w, h, g = _position(columns)
    return _slices(values, block, 16 * w + 2 * g + h, 1)[..., 0].T


def rows_by_slot(values: Any, bits: int) -> Any:
    """Reorders values per row (..., k) of whole atoms to the order of rows in shifted words.

    `bits` is 1, 2, 4 or 8. The words of an atom, viewed as (32, words / 32), have channels along
    the first axis and rows along the second. Slot i has the channels with h = i % 2. The result
    concatenates the rows of slots i, i + 2, ...: (..., k_blocks, 64).
    """
    (plane,) = _PLANES[bits]
    # Digits of the word. The other digits number the slot in it, h last.
    digits = bits.bit_length() - 1
    word, slot = plane.slots[:digits], plane.slots[digits:-1]
    values = values.reshape(*values.shape[:-1], -1, *_K_SIZES)
    values = _transpose(values, "K" + _K_AXES, "K" + slot + "t" + word)
    return values.reshape(*values.shape[: -len(_K_AXES)], ATOM)


def steps_by_slot(bits: int) -> np.ndarray:
    """The step (0 to 3) of the rows of each pair of slots, (pairs, 1, words / 32)."""
    steps = rows_by_slot(np.arange(ATOM, dtype=np.int32) // 16, bits)
    return steps.reshape(16 // bits, 1, 4 * bits)


def from_slots(slots: list[Array], bits: int) -> Array:
    """The atom (n, k) in logical order from all its slots, (32, words / 32) each.

    Pairs are stacked along a new last axis, which permutes nothing.
    """
    (plane,) = _PLANES[bits]
    digits = bits.bit_length() - 1
    while len(slots) > 1:
        slots = [jnp.stack(pair, axis=-1) for pair in zip(slots[::2], slots[1::2], strict=True)]
    atom = slots[0].reshape(4, 8, 4, *[2] * len(plane.slots))
    stacked = "wgt" + plane.slots[:digits] + plane.slots[digits:][::-1]
    return _transpose(atom, stacked, _N_AXES + _K_AXES).reshape(ATOM, ATOM)


def channels_by_slot(values: Array) -> Array:
    """Reorders channels (..., 64) from `pack_groups` to the order in even slots, then odd slots."""
    axes = values.reshape(*values.shape[:-1], 4, 8, 2)
    return _transpose(axes, "wgh", "hwg").reshape(values.shape)


def channels_from_slots(values: Array) -> Array:
    """Reorders channels (..., 64) from `channels_by_slot` to logical order."""
    axes = values.reshape(*values.shape[:-1], 2, 4, 8)
    return _transpose(axes, "hwg", "whg").reshape(values.shape)


def _position(columns: Array) -> tuple[Array, Array, Array, Array]:
    """The block of each column, and the digits w, h and g of its position there."""
    return columns // ATOM, columns % ATOM // 16, columns % 16 // 8, columns % 8


def _slices(array: Array, block: Array, start: Array, size: int) -> Array:
    """`array[block, :, start : start + size]` for arrays of blocks and starts."""
    shape = (1, array.shape[1], size)
    zero = jnp.zeros_like(block)
    slices = jax.vmap(lambda *starts: lax.dynamic_slice(array, starts, shape))(block, zero, start)
    return slices[:, 0]


def _transpose(array: Array, source: str, target: str) -> Array:
    """Transposes the last axes, named by the letters of `source`, into the order of `target`."""
    lead = array.ndim - len(source)
    return array.transpose(*range(lead), *(lead + source.index(axis) for axis in target))
