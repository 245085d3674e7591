"""Rotary position embeddings: pairs of elements of a head rotate by angles proportional to the
position."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from .config import Config


def rotation(
    config: Config, positions: Array, *, local: bool = False, long: bool = False
) -> tuple[Array, Array]:
    """Cosines and sines, float32 (..., 1, rotated_size / 2), of positions (...).

    `local`: for layers with a sliding window, which may have other frequencies. `long`: by the long
    factors of longrope.
    """
    frequencies = config.rope_frequencies(local=local, long=long)
    frequencies = frequencies.reshape(*[1] * (positions.ndim + 1), -1)
    scaling = None if local and config.local_rope_base is not None else config.rope_scaling
    amplitude = 1.0 if scaling is None else scaling.amplitude
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def identity(positions: Array, head_size: int) -> tuple[Array, Array]:
    """Cosines and sines as from `rotation` that do not change heads."""
    cos = jnp.ones((*positions.shape, 1, head_size // 2), jnp.float32)
    return cos, jnp.zeros_like(cos)


def temperature(config: Config, positions: Array) -> Array | None:
    """The factor of queries, float32 (..., 1, 1), at positions (...); None without one."""
    if config.attention_temperature is None:
        return None
    factor, length = config.attention_temperature
    grown = 1 + factor * jnp.log1p((positions // length).astype(jnp.float32))
    return grown[..., None, None]


def order(rows: int, head_size: int) -> np.ndarray:
    """The permutation of llama.cpp's converter, for the rows of queries and keys: from pairs
    `(i, i + head_size / 2)` to pairs `(2 i, 2 i + 1)`."""
    return np.arange(rows).reshape(-1, 2, head_size // 2).swapaxes(1, 2).reshape(-1)


def rotate(x: Array, rotation: tuple[Array, Array], pairs: str) -> Array:
    """Rotates the pairs of x (..., heads, head_size), in float32, rounded to the dtype of x.

    A pair is two `"neighbours"`, 2i and 2i + 1, or element i of both `"halves"`, among the elements
    that have cosines in `rotation`; the others do not change.
    """
    cos, sin = rotation
    if (size := 2 * cos.shape[-1]) < x.shape[-1]:
        turned = rotate(x[..., :size], rotation, pairs)
        return jnp.concatenate([turned, x[..., size:]], axis=-1)
    wide = x.astype(jnp.float32)
    if pairs == "halves":
        a, b = jnp.split(wide, 2, axis=-1)
        out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = wide[..., ::2], wide[..., 1::2]
        out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    return out.astype(x.dtype)
