"""Codes of checkpoints: bit fields of words, as uint8."""

import numpy as np

# (width, shift) of the bits in each plane. In GPTQModel's planar order, 32 values have the words of
# the lowest plane first.
_PLANES = {
    2: ((2, 0),),
    3: ((2, 0), (1, 2)),
    4: ((4, 0),),
    5: ((4, 0), (1, 4)),
    6: ((4, 0), (2, 4)),
    7: ((4, 0), (2, 4), (1, 6)),
    8: ((8, 0),),
}


def fields(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` values of a little-endian bit stream along the last axis.

    Values of 3, 5, 6 and 7 bits may straddle words.

    **Arguments:** `words`: integers (..., words) of any width; 32-bit if values straddle words.

    **Returns:** uint8 (..., count).
    """
    words = np.ascontiguousarray(words)
    if 8 % bits == 0:
        data = words.view(np.uint8)
        if bits == 8:
            return data[..., :count]
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        found = data[..., None] >> shifts & np.uint8(2**bits - 1)
        return found.reshape(*data.shape[:-1], -1)[..., :count]
    words = words.view(np.uint32)
    *lead, size = words.shape
    blocks = -(-count // 32)
    if size < blocks * bits:
        words = np.concatenate([words, np.zeros((*lead, blocks * bits - size), np.uint32)], axis=-1)
    words = words[..., : blocks * bits].reshape(*lead, blocks, bits)
    found = np.empty((*lead, blocks, 32), np.uint8)
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        value = words[..., word] >> np.uint32(shift)
        if shift + bits > 32:
            value = value | words[..., word + 1] << np.uint32(32 - shift)
        found[..., i] = value & np.uint32(2**bits - 1)
    return found.reshape(*lead, -1)[..., :count]


def planar_fields(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Values in the planar order of GPTQModel's `gptq_p`; otherwise like `fields`."""
    words = np.ascontiguousarray(words).view(np.uint32)
    *lead, size = words.shape
    words = words.reshape(*lead, size // bits, bits)
    found = np.zeros((*lead, size // bits, 32), np.uint8)
    first = 0
    for width, shift in _PLANES[bits]:
        plane = fields(words[..., first : first + width], width, 32)
        found |= plane << np.uint8(shift)
        first += width
    return found.reshape(*lead, -1)[..., :count]


def word_count(bits: int, count: int) -> int:
    """The number of 32-bit words for `count` values."""
    return -(-count * bits // 32)


def nibbles(data: np.ndarray) -> np.ndarray:
    """Two values of each byte along the last axis, the low one first."""
    found = np.stack([data & np.uint8(15), data >> np.uint8(4)], axis=-1)
    return found.reshape(*data.shape[:-1], -1)
