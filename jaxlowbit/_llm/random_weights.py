"""Random weights, packed or floats: models of any size, for measurements and tests."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._core import layout, super_blocks
from .._core import scales as quantized_scales
from .._core.array import QuantizedArray
from .._core.dequantize import codes_of, of_codes
from .._core.format import Format
from . import memory
from .config import Config, is_matrix
from .low_rank import Weight
from .sampling import random_key
from .sharding import Division

_ONE = 7 << 3  # the bits of 1 as an e4m3 scale


def random_weights(
    config: Config,
    format: Format | None,
    *,
    seed: int = 0,
    dtype: Any = jnp.bfloat16,
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Weight]:
    """Weights for `Decoder`: matrices of random packed words, norms of ones, biases and sinks of
    zeros, routers of random floats. All but matrices are float32, as from files: a decode step
    would convert others in every layer.

    Scales are such that a product preserves the magnitude of its input. No float matrix is made
    unless `format` is None. With a mesh, each weight is placed on its devices before the next one
    is made.
    """
    shapes = config.shapes()
    formats = dict.fromkeys(shapes, format)
    division = None if mesh is None else Division.of("init", config, mesh, formats)
    memory.check_weights("init", shapes, formats, dtype, mesh)
    weights: dict[str, Weight] = {}
    key = random_key(seed)
    for i, (name, shape) in enumerate(shapes.items()):
        own = jax.random.fold_in(key, i)
        if is_matrix(name) and format is not None:
            weight = _matrices(own, shape, format, dtype)
        elif len(shape) > 1 and not name.endswith("_bias"):
            kind = dtype if is_matrix(name) else jnp.float32  # a router
            weight = jax.random.normal(own, shape, kind) * shape[-2] ** -0.5
        else:
            zeros = name.endswith(("_bias", "sinks"))
            weight = jnp.full(shape, 0.0 if zeros else 1.0 - config.norm_offset, jnp.float32)
        weights[name] = weight if division is None else division.place(name, weight)
    return weights


def _matrices(key: Array, shape: tuple[int, ...], format: Format, dtype: Any) -> QuantizedArray:
    """A matrix (k, n), or a stack (..., k, n)."""
    *lead, k, n = shape
    words, groups = super_blocks.stored_shapes(k, n, format)
    packed = jax.random.bits(key, (*lead, *words), jnp.uint32)
    scale = math.sqrt(12 / k) / 2**format.bits
    if format.codebook is not None:
        numbers = np.array(format.values)
        if format.float_dtype is not None:  # only small exponents, which are finite
            packed, numbers = packed & np.uint32(0xBFBFBFBF), numbers[np.arange(256) & 0x40 == 0]
        scale = 1 / math.sqrt(k * np.mean(numbers**2))
    scales, tensor_scale = codes_of(jnp.full(groups, scale, format.scale_dtype or dtype)), None
    if format.scale == "e8m0":
        scales = jnp.full(groups, round(math.log2(scale)) + 127, jnp.uint8)
    elif format.scale == "e4m3":
        scales, tensor_scale = jnp.full(groups, _ONE, jnp.uint8), jnp.float32(scale)
    elif format.scale == "int8":
        most = format.max_scale
        scales, tensor_scale = jnp.full(groups, most, jnp.uint8), jnp.full(n, scale / most)
    middle = {"none": None, "integer": format.offset, "float": -format.offset * scale}[format.zero]
    zero_dtype = jnp.uint8 if format.zero == "integer" else dtype
    zeros = None if middle is None else jnp.full(groups, middle, zero_dtype)
    if format.two_levels:
        scales, zeros = _two_levels(scale, middle, groups, format)

    def everywhere(array: Array) -> Array:
        return jnp.broadcast_to(array, (*lead, *array.shape))

    return QuantizedArray(
        packed=packed,
        scale=of_codes(everywhere(scales), format),
        zero=None if zeros is None else everywhere(zeros),
        index=None,
        version=jnp.full(tuple(lead), layout.VERSION, jnp.uint32),
        format=format,
        k=k,
        n=n,
        tensor_scale=None if tensor_scale is None else everywhere(tensor_scale),
    )


def _two_levels(
    scale: float, zero: float | None, shape: tuple[int, int, int], format: Format
) -> tuple[Array, Array | None]:
    """The bytes of scales, and of zeros or None, that are the same everywhere."""
    zeros = None if zero is None else jnp.full((1, 1), zero)
    found = quantized_scales.two_levels(jnp.full((1, 1), scale), zeros, format)

    def everywhere(block: Array) -> Array:  # the rows of a super-block
        return jnp.broadcast_to(jnp.tile(block, (shape[1] // block.shape[0], 1)), shape)

    return everywhere(found[0]), None if found[1] is None else everywhere(found[1])
