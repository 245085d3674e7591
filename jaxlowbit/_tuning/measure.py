"""Measures every candidate kernel of each product."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._backends import selection, times
from .._backends.selection import DeviceFacts, Product
from .._core import super_blocks
from .table import Entry
from .weights import Weight

# A measurement reads distinct weights of three times the largest cache, the 126 MB of a B200.
_COLD_BYTES = 400_000_000
_MOST_COPIES = 512
# The default choice stays unless another is faster by this fraction, the variation between two
# runs.
_LEAST_GAIN = 0.02


def measure(
    weights: Sequence[Weight], tokens: Sequence[int], dtype: str, device: DeviceFacts
) -> Iterator[Entry]:
    """Yields the best choice for each weight and M, as soon as it is known."""
    for weight in weights:
        # Scales of another dtype than lhs are widened, as by `_backends/cuda.py`.
        scale = dtype if weight.scale == dtype else "float32"
        copies = _copies(weight, 1)
        stack = _random_stack(jax.random.key(0), weight._replace(scale=scale), copies)
        for m in tokens:
            lhs = jax.random.normal(jax.random.key(m), (m, weight.k), jnp.dtype(dtype))
            product = Product(m, weight.n, weight.k, weight.format, dtype, scale)
            choices = selection.candidates(product, device)
            calls = min(copies, _copies(weight, m))
            times = np.asarray(
                _times(lhs, *stack, product=product, calls=calls, choices=tuple(choices))
            )
            best = int(times.argmin())
            if times[best] > (1 - _LEAST_GAIN) * times[0]:
                best = 0
            yield Entry(product, choices[best], float(times[best]), choices[0], float(times[0]))


_times = jax.jit(times.times, static_argnames=("product", "calls", "choices"))


def _copies(weight: Weight, m: int) -> int:
    """The number of distinct weights that evicts the first from the cache."""
    activations = 2 * m * (weight.n + weight.k)
    size = weight.n * weight.k * weight.format.bits // 8 + activations
    return max(2, min(-(-_COLD_BYTES // size), _MOST_COPIES))


class _Stack(NamedTuple):
    packed: Array
    scale: Array
    zero: Array | None


@functools.partial(jax.jit, static_argnames=("weight", "copies"))
def _random_stack(key: Any, weight: Weight, copies: int) -> _Stack:
    """Random quantized values, and scales that give the weights a variance of about 1/k."""
    format = weight.format
    keys = jax.random.split(key, 3)
    words, groups = super_blocks.stored_shapes(weight.k, weight.n, format)
    packed = jax.random.bits(keys[0], (copies, *words), jnp.uint32)
    groups = (copies, *groups)
    scale = jax.random.uniform(keys[1], groups, jnp.float32, 0.5, 1.5)
    scale = (scale / (format.offset * weight.k**0.5)).astype(weight.scale)
    zero = None
    if format.zero == "integer":
        zero = jax.random.randint(keys[2], groups, 0, 2 * format.offset, jnp.uint8)
    elif format.zero == "float":
        zero = -format.offset * scale
    return _Stack(packed, scale, zero)
