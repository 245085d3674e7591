"""The cache of keys and values: a fixed number of slots with their positions.

Sequences of a batch share slots. A slot may be empty for some sequences, such as in the padding of
a shorter prompt: its position is then -1, and no query sees it. One comparison of positions
therefore masks later tokens, padding, and tokens before a sliding window.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .config import Config

_SMALLEST = 256


class Cache(NamedTuple):
    """Keys and values of every layer, (batch, slots, kv_heads, head_size) each.

    `positions` of the slots are int32 (batch, slots), -1 for an empty slot; `used` is the number of
    slots that were written, int32 ().
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    positions: Array
    used: Array

    @property
    def slots(self) -> int:
        return self.positions.shape[1]

    def advance(self, positions: Array) -> "Cache":
        """Assigns the next slots to tokens at positions (batch, tokens); the last slots, if fewer
        are left."""
        placed = lax.dynamic_update_slice_in_dim(self.positions, positions, self.used, axis=1)
        used = jnp.minimum(self.used + positions.shape[1], self.slots)
        return self._replace(positions=placed, used=used)

    def write(self, layer: int, key: Array, value: Array) -> "Cache":
        """Writes keys and values (batch, tokens, kv_heads, head_size) of a layer to the slots that
        `advance` assigned last."""
        start = self.used - key.shape[1]
        keys = lax.dynamic_update_slice_in_dim(self.keys[layer], key, start, axis=1)
        values = lax.dynamic_update_slice_in_dim(self.values[layer], value, start, axis=1)
        return self.replace(layer, keys, values)

    def replace(self, layer: int, keys: Array, values: Array) -> "Cache":
        """Replaces the keys and values (batch, slots, kv_heads, head_size) of a layer."""

        def replaced(stored: tuple[Array, ...], new: Array) -> tuple[Array, ...]:
            return (*stored[:layer], new, *stored[layer + 1 :])

        return self._replace(keys=replaced(self.keys, keys), values=replaced(self.values, values))

    def cut(self, length: Array) -> "Cache":
        """Truncates the cache to its first `length` slots, int32 ()."""
        slots = jnp.arange(self.slots, dtype=jnp.int32)
        return self._replace(positions=jnp.where(slots < length, self.positions, -1), used=length)

    def copied_to(self, larger: "Cache") -> "Cache":
        """Copies this cache to an empty cache with more slots."""

        def filled(new: Array, old: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(new, old, 0, axis=1)

        arrays = jax.tree.map(filled, larger[:3], self[:3])
        return Cache(*arrays, used=self.used)

    def repeated(self, times: int) -> "Cache":
        """Repeats each sequence, one after the other."""
        arrays = jax.tree.map(lambda array: jnp.repeat(array, times, axis=0), self[:3])
        return Cache(*arrays, used=self.used)


def cache_specs(config: Config, axis: str) -> Cache:
    """The sharding of a cache over a mesh axis: along its heads."""
    heads: Any = (jax.P(None, None, axis, None),) * config.layers
    whole: Any = jax.P()
    return Cache(heads, heads, whole, whole)


def make_cache(
    config: Config, batch: int, slots: int, dtype: Any, mesh: jax.sharding.Mesh | None = None
) -> Cache:
    """An empty cache, on the devices of a mesh with one axis if there is one."""
    shape = (batch, slots, config.kv_heads, config.head_size)

    specs = cache_specs(config, "" if mesh is None else mesh.axis_names[0])
    device = (lambda spec: None) if mesh is None else (lambda spec: jax.NamedSharding(mesh, spec))

    def layers(specs: tuple[Any, ...]) -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, dtype, device=device(spec)) for spec in specs)

    positions = jnp.full((batch, slots), -1, jnp.int32, device=device(specs.positions))
    used = jnp.zeros((), jnp.int32, device=device(specs.used))
    return Cache(layers(specs.keys), layers(specs.values), positions, used)


def nbytes(config: Config, batch: int, slots: int, dtype: Any) -> int:
    """The size of a cache in bytes, without allocating it."""
    shapes = jax.eval_shape(lambda: make_cache(config, batch, slots, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def bucket(needed: int, context: int) -> int:
    """The number of slots for `needed` ones, so that prompts of similar lengths share a program.

    They are a power of two or the context. Padding takes some more: then a multiple of 512.
    """
    if needed > context:
        return -(-needed // 512) * 512
    return min(max(_SMALLEST, 1 << (needed - 1).bit_length()), context)
