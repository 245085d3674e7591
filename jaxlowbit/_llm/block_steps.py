"""The steps of all blocks of a decoder; with our CUDA kernels, consecutive decode steps are one
call."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._backends.cuda_calls import DecodeLayer, Projection
from .._composite import decode_block
from . import attention
from .block import Block
from .cache import Cache

Rotations = Sequence[tuple[Array, Array]]
"""Cosines and sines (`rope.rotation`) of blocks without and with a window."""


def run(
    blocks: Sequence[Block],
    parts: Array,
    add: Callable[[Array], Array],
    rotations: Rotations,
    positions: Array,
    cache: Cache,
    *,
    head: Projection | None = None,
    dtype: Any,
    implementations: Sequence[attention.Implementation],
    reach: int,
) -> tuple[Array, Array | None, Cache]:
    """The residual stream (batch, length, width) after all blocks, float32 products with a `head`,
    and the cache. The products are None unless the call of the last block can compute them.

    **Arguments:** as for `Block.step`, and

    - `parts`: embeddings, float32 (batch, length, width); `add(parts)` is the residual stream, in
      `dtype`. The call of the first block can add them, too.
    - `head`: the last norm and the weight.
    - `implementations`: for blocks without and with a window.
    """
    native = all(x == "native" for x in implementations)
    like = jax.ShapeDtypeStruct(parts.shape, dtype)
    counts = _counts(blocks, like) if native else [0] * len(blocks)
    first = None
    if counts[0] > 0 and blocks[0].attends_to_products:
        first = _supported(blocks[0].entry, like)
    if first is None:
        x = add(parts)
        products = blocks[0].project(x)
    else:  # the first call computes the products; only their shapes matter
        x = parts
        products = tuple(jnp.zeros((*x.shape[:-1], w.n), dtype) for w in first.weights)
    logits, done = None, 0
    for count in counts:
        left = blocks[done:]
        if count > 0:
            last = _supported(head, like) if count == len(left) else None
            x, products, cache = _decode(
                left, count, products, x, rotations, positions, cache, done, reach, first, last
            )
            logits = None if last is None else products[0]
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
        first = None
        done += max(count, 1)
    return x, logits, cache


def _counts(blocks: Sequence[Block], x: Any) -> list[int]:
    """The numbers of blocks of calls, as `together`."""
    counts, done = [], 0
    while done < len(blocks):
        counts.append(together(blocks[done:], x))
        done += max(counts[-1], 1)
    return counts


def _supported(products: Projection | None, x: Any) -> Projection | None:
    """Products, or None if a call of blocks cannot compute them for rows like x."""
    if products is None or decode_block.unsupported(x, products.weights) is not None:
        return None
    return products


def together(blocks: Sequence[Block], x: Any) -> int:
    """The number of blocks, from the first on, whose decode steps for rows like x are one call; 0
    if the first one needs several calls."""
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
    first: Projection | None,
    head: Projection | None,
) -> tuple[Array, tuple[Array, ...], Cache]:
    """`Block.step` of the first `count` blocks, which are `together`; `number`: of the first."""
    heads = blocks[0].heads(products, positions, native=True)
    layers = []
    for i, block in enumerate(blocks[:count]):
        onward = blocks[i + 1].entry if i + 1 < len(blocks) else head
        norm, following = (None, ()) if onward is None else onward
        own = (weight.get_value() for weight in (block.o, block.gate_up[0], block.down))
        rotation = rotations[block.local] if block.rotates else None
        operands = block.attention_operands(heads, rotation, positions, cache, number + i)
        options, weights = block.attention_options(reach), (*own, *following)
        norms = block.fused_norm, norm
        layer = DecodeLayer(operands, options, *norms, weights, block.routed, block.out_bias)
        layers.append(layer)
    if head is not None:
        layers[-1] = layers[-1]._replace(following_dtype=jnp.float32)
    config = blocks[0].config
    caches, y, results = decode_block.decode_layers(
        layers,
        x[:, 0],
        first=first,
        activation=config.activation,
        epsilon=config.norm_epsilon,
        devices=blocks[0].exchanging(x),
    )
    for i, arrays in enumerate(caches, number):
        cache = cache.replace(i, *arrays)
    return y[:, None], tuple(product[:, None] for product in results), cache
