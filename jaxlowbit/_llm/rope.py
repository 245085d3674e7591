"""Rotary position embeddings: pairs of a head's elements turn by angles that grow with the
position."""

import jax.numpy as jnp
from jax import Array

from .config import Config


def rotation(config: Config, positions: Array, *, local: bool = False) -> tuple[Array, Array]:
    """Cosines and sines, float32 (..., 1, head_size / 2), of positions (...).

    `local` is for the layers with a sliding window, which may turn at other frequencies.
    """
    frequencies = config.rope_frequencies(local=local).reshape(*[1] * (positions.ndim + 1), -1)
    scaling = None if local and config.local_rope_base is not None else config.rope_scaling
    amplitude = 1.0 if scaling is None else scaling.amplitude
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rotate(x: Array, rotation: tuple[Array, Array], pairs: str) -> Array:
    """Rotates the pairs of x (..., heads, head_size), in float32, rounded to the dtype of x.

    A pair is two `"neighbours"`, 2i and 2i + 1, or the elements i of both `"halves"`.
    """
    cos, sin = rotation
    wide = x.astype(jnp.float32)
    if pairs == "halves":
        a, b = jnp.split(wide, 2, axis=-1)
        out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = wide[..., ::2], wide[..., 1::2]
        out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    return out.astype(x.dtype)
