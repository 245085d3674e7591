"""The steps of all blocks of a decoder; with our CUDA kernels, consecutive decode steps are one
call."""

from collections.abc import Sequence

from jax import Array

from .._backends.cuda_calls import DecodeLayer
from .._composite import decode_block
from . import attention
from .block import Block
from .cache import Cache

Rotations = Sequence[tuple[Array, Array]]
"""Cosines and sines (`rope.rotation`) of blocks without and with a window."""


def run(
    blocks: Sequence[Block],
    x: Array,
    rotations: Rotations,
    positions: Array,
    cache: Cache,
    *,
    implementations: Sequence[attention.Implementation],
    reach: int,
) -> tuple[Array, Cache]:
    """The residual stream (batch, length, width) after all blocks, and the cache.

    Arguments: as for `Block.step`; `implementations` for blocks without and with a window.
    """
    native = all(x == "native" for x in implementations)
    products, done = blocks[0].project(x), 0
    while done < len(blocks):
        left = blocks[done:]
        count = together(left, x) if native else 0
        if count > 0:
            x, products, cache = _decode(
                left, count, products, x, rotations, positions, cache, done, reach
            )
        else:
            x, products, cache = left[0].step(
                products,
                x,
                left[1] if len(left) > 1 else None,
                rotations[left[0].local] if left[0].rotates else None,
                positions,
                cache,
                done,
                implementation=implementations[left[0].local],
                reach=reach,
            )
        done += max(count, 1)
    return x, cache


def together(blocks: Sequence[Block], x: Array) -> int:
    """The number of blocks, from the first on, whose decode steps are one call; 0 if the first one
    needs several calls."""
    first = blocks[0]
    for i, block in enumerate(blocks):
        following = blocks[i + 1] if i + 1 < len(blocks) else None
        alike = (block.kv_heads, block.head_size) == (first.kv_heads, first.head_size)
        joins = i == 0 or (alike and block.attends_to_products)
        if not joins or not block.one_call(x, following):
            return i
    return len(blocks)


def _decode(
    blocks: Sequence[Block],
    count: int,
    products: Sequence[Array],
    x: Array,
    rotations: Rotations,
    positions: Array,
    cache: Cache,
    number: int,
    reach: int,
) -> tuple[Array, tuple[Array, ...], Cache]:
    """`Block.step` of the first `count` blocks, which are `together`; `number`: of the first."""
    heads = blocks[0].heads(products, positions, native=True)
    layers = []
    for i, block in enumerate(blocks[:count]):
        onward = block.onward(blocks[i + 1] if i + 1 < len(blocks) else None)
        norm, following = (None, ()) if onward is None else onward
        own = (weight.get_value() for weight in (block.o, block.gate_up[0], block.down))
        rotation = rotations[block.local] if block.rotates else None
        operands = block.attention_operands(heads, rotation, positions, cache, number + i)
        options, weights = block.attention_options(reach), (*own, *following)
        norms = block.fused_norm, norm
        layers.append(DecodeLayer(operands, options, *norms, weights, block.routed, block.out_bias))
    config = blocks[0].config
    caches, y, results = decode_block.decode_layers(
        layers,
        x[:, 0],
        activation=config.activation,
        epsilon=config.norm_epsilon,
        devices=blocks[0].exchanging(x),
    )
    for i, arrays in enumerate(caches, number):
        cache = cache.replace(i, *arrays)
    return y[:, None], tuple(product[:, None] for product in results), cache
