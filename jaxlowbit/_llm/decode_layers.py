"""All blocks but the last of a decode step in one call, if they are alike."""

import itertools
from collections.abc import Sequence

from jax import Array

from .._composite import decode_block
from .block import Block
from .cache import Cache

Rotations = Sequence[tuple[Array, Array]]
"""Of blocks without and with a window."""


def decode_layers(
    blocks: Sequence[Block],
    products: Sequence[Array],
    x: Array,
    rotations: Rotations,
    positions: Array,
    cache: Cache,
    reach: int,
) -> tuple[Array, tuple[Array, ...], Cache] | None:
    """`Block.step` of all blocks but the last, in one call of our kernels.

    Arguments and results are those of `Block.step`; None if the blocks need several calls.
    """
    first, count = blocks[0], len(blocks) - 1
    if count < 2 or not all(
        _is_like(first, block) and block.one_call(x, after)
        for block, after in itertools.pairwise(blocks)
    ):
        return None
    rotation = rotations[first.local] if first.rotates else None
    heads = first.heads(products)
    attentions = [
        block.attention_operands(heads, rotation, positions, cache, i)
        for i, block in enumerate(blocks[:count])
    ]
    norms, weights = [], []
    for block, after in itertools.pairwise(blocks):
        onward = block.onward(after)
        assert onward is not None  # Block.one_call
        norm, matrices = onward
        own = block.o, block.gate_up[0], block.down
        norms.append((block.fused_norm, norm))
        weights.append([*(weight.get_value() for weight in own), *matrices])
    division, config = first.division, first.config
    found = decode_block.decode_blocks(
        attentions,
        x[:, 0],
        norms,
        weights,
        attending=first.attention_options(reach),
        activation=config.activation,
        epsilon=config.norm_epsilon,
        devices=() if division is None else division.exchanging(x.shape[0]),
    )
    if found is None:
        return None
    caches, y, following = found
    for i, (keys, values) in enumerate(caches):
        cache = cache.replace(i, keys, values)
    return y[:, None], tuple(product[:, None] for product in following), cache


def _is_like(first: Block, block: Block) -> bool:
    """Whether attention of a block reads its products as they are, and differs from that of the
    first in operands only."""
    plain = not block.biases and block.q_all_norm is None and block.k_all_norm is None
    plain &= block.config.attention_temperature is None
    return plain and (block.local, block.rotates) == (first.local, first.rotates)
