"""The cache of keys and values: a fixed number of slots with their positions.

Sequences of a batch share slots. A slot may be empty for some sequences, such as in the padding of
a shorter prompt: its position is then -1, and no query sees it. One comparison of positions
therefore masks later tokens, padding, and tokens before a sliding window.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._core.activations import VALUES, reach, rounded_tokens
from .config import Config

_SMALLEST = 256


class Cache(NamedTuple):
    """Keys and values of every layer, (batch, slots, kv_heads, head_size) each; layers with and
    without a window may differ in the last two sizes.

    `positions` of the slots are int32 (batch, slots), -1 for an empty slot; `used` is the number of
    slots that were written, int32 ().

    Keys and values of 8 bits have a scale per slot and head, float32 (batch, slots, kv_heads):
    `key_scales` and `value_scales`, else empty. `quantize_activations` defines them.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    positions: Array
    used: Array
    key_scales: tuple[Array, ...] = ()
    value_scales: tuple[Array, ...] = ()

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
        new = [key, value]
        if self.key_scales:
            rows = [rounded_tokens(x, reach(x), self.keys[layer].dtype) for x in new]
            new = [*(x.values for x in rows), *(x.scale[..., 0] for x in rows)]
        return self.replace(
            layer,
            *(
                lax.dynamic_update_slice_in_dim(stored, x, start, axis=1)
                for stored, x in zip(self.arrays(layer), new, strict=True)
            ),
        )

    def arrays(self, layer: int) -> tuple[Array, ...]:
        """The keys and values of a layer, and in 8 bits their scales."""
        return tuple(stored[layer] for stored in self._layers if stored)

    @property
    def _layers(self) -> tuple[tuple[Array, ...], ...]:
        return self.keys, self.values, self.key_scales, self.value_scales

    def replace(self, layer: int, *arrays: Array) -> "Cache":
        """Replaces the `arrays` of a layer."""
        names = ("keys", "values", "key_scales", "value_scales")[: len(arrays)]
        layers = zip(names, self._layers, arrays, strict=False)
        return self._replace(
            **{name: (*old[:layer], new, *old[layer + 1 :]) for name, old, new in layers}
        )

    def read(self, layer: int, slots: int, dtype: Any) -> tuple[Array, Array, Array]:
        """Keys and values of a layer in the dtype of activations, and the positions of the slots.

        Contains at least the first `slots` slots, and in 8 bits no others.
        """
        if not self.key_scales:
            return self.keys[layer], self.values[layer], self.positions
        keys, values, *scales = (stored[:, :slots] for stored in self.arrays(layer))
        keys, values = (
            (x.astype(jnp.float32) * scale[..., None]).astype(dtype)
            for x, scale in zip((keys, values), scales, strict=True)
        )
        return keys, values, self.positions[:, :slots]

    def cut(self, length: Array) -> "Cache":
        """Truncates the cache to its first `length` slots, int32 ()."""
        slots = jnp.arange(self.slots, dtype=jnp.int32)
        return self._replace(positions=jnp.where(slots < length, self.positions, -1), used=length)

    def copied_to(self, larger: "Cache") -> "Cache":
        """Copies this cache to an empty cache with more slots."""

        def filled(new: Array, old: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(new, old, 0, axis=1)

        arrays = jax.tree.map(filled, larger._replace(used=None), self._replace(used=None))
        return arrays._replace(used=self.used)

    def repeated(self, times: int) -> "Cache":
        """Repeats each sequence, one after the other."""
        arrays = self._replace(used=None)
        arrays = jax.tree.map(lambda array: jnp.repeat(array, times, axis=0), arrays)
        return arrays._replace(used=self.used)


def cache_specs(config: Config, axis: str, dtype: Any) -> Cache:
    """The sharding of a cache of a dtype over a mesh axis: along its heads."""
    heads: Any = (jax.P(None, None, axis, None),) * config.layers
    scales: Any = (jax.P(None, None, axis),) * config.layers if dtype in VALUES else ()
    whole: Any = jax.P()
    return Cache(heads, heads, whole, whole, scales, scales)


def make_cache(
    config: Config,
    batch: int,
    slots: int,
    dtype: Any,
    mesh: jax.sharding.Mesh | None = None,
    *,
    layers: Sequence[int] | None = None,
) -> Cache:
    """An empty cache, on the devices of a mesh with one axis if there is one.

    `dtype`: of activations, or int8 or float8_e4m3fn. `layers`: the numbers of the layers that it
    has, without a mesh; None for all.
    """
    numbers = range(config.layers) if layers is None else layers
    sizes = [config.head_sizes(local=config.is_local(i)) for i in numbers]
    shapes = [(batch, slots, *size) for size in sizes]

    specs = cache_specs(config, "" if mesh is None else mesh.axis_names[0], dtype)
    device = (lambda spec: None) if mesh is None else (lambda spec: jax.NamedSharding(mesh, spec))

    def arrays(specs: tuple[Any, ...]) -> tuple[Array, ...]:
        pairs = zip(shapes, specs, strict=False)
        return tuple(jnp.zeros(shape, dtype, device=device(spec)) for shape, spec in pairs)

    def scales(specs: tuple[Any, ...]) -> tuple[Array, ...]:
        pairs = zip(shapes, specs, strict=False)
        return tuple(jnp.zeros(shape[:3], jnp.float32, device=device(x)) for shape, x in pairs)

    positions = jnp.full((batch, slots), -1, jnp.int32, device=device(specs.positions))
    used = jnp.zeros((), jnp.int32, device=device(specs.used))
    pairs = arrays(specs.keys), arrays(specs.values)
    return Cache(*pairs, positions, used, scales(specs.key_scales), scales(specs.value_scales))


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
