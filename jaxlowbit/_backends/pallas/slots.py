"""Dequantization of an atom, slot by slot, for both kernels.

Shifting all words of an atom by one slot, as (32, words / 32), gives 32 channels for some of its
rows, without permuting a word.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ..._core.format import Format
from ..._core.layout import ATOM


def dequantize(
    words: Array,
    steps: Any,
    groups: Sequence[Any],
    load: Callable[[Any, Any, int], Array],
    k_block: Any,
    format: Format,
) -> list[Array]:
    """The float32 weights of each slot.

    `load(values, group, half)` reads one value per channel of a slot, (32, 1), from an array in
    `groups`: scales or zeros, with groups as the first axis. `steps`: see `layout.steps_by_slot`.
    """
    size = format.group_size
    if groups[0].shape[0] == 1:
        at = [0]
    elif size % ATOM == 0:
        at = [lax.div(ATOM * k_block, size)]
    else:  # the groups that contain the atom's steps of 16 rows
        at = [lax.div(ATOM * k_block + 16 * step, size) for step in range(4)]
    loaded = [[[load(x, group, half) for group in at] for x in groups] for half in (0, 1)]

    def weights(slot: int) -> Array:
        codes = (words >> (slot * format.bits)) & (2**format.bits - 1)
        codes = codes.astype(jnp.int32).astype(jnp.float32)
        scale, *zero = (_select(steps, slot // 2, values) for values in loaded[slot % 2])
        if format.zero == "none":
            return (codes - format.offset) * scale
        if format.zero == "integer":
            return (codes - zero[0]) * scale
        return codes * scale + zero[0]

    return [weights(slot) for slot in range(32 // format.bits)]


def _select(steps: Any, pair: int, values: Sequence[Array]) -> Array:
    """For each row of a pair of slots, selects the value of its step, or the only one."""
    chosen = values[0]
    for step in range(1, len(values)):
        chosen = jnp.where(steps[pair] == step, values[step], chosen)
    return chosen
