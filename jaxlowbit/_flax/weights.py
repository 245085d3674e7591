"""Weights of layers: `quantize_weight`, checks before it, and kernels made of stored arrays."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from .._core.array import LEAVES, QuantizedArray
from .._core.columns import take_columns
from .._core.format import Format
from ..quantizers import Statistics
from ..quantizers._quantize import quantize
from ..quantizers._registry import check
from .equation import Equation

Path = tuple[str, ...]
Shards = tuple[int, int]
Sizes = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes of the contracted axes of a kernel, and of its features."""

ARRAYS = tuple(name for name in LEAVES if name != "index")
"""The arrays of a weight that a layer holds, each in a separate variable."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Packing:
    """How a weight is packed and multiplied by; a pytree without leaves, so part of `jit`'s key.

    - `sizes`: the sizes of the weight, if they are known.
    - `equation`: for an `EinsumLayer`, its equation, and the shape of the weight in it.
    - `lhs_qtype`: the dtype of quantized inputs in products, or None.
    - `raw`: for a parameter that code reads itself, its path in `params` and its equation.
    """

    format: Format
    shards: Shards = (1, 1)
    sizes: Sizes | None = None
    equation: tuple[str, tuple[int, ...]] | None = None
    lhs_qtype: Any = None
    raw: tuple[Path, Equation] | None = None


_quantizer: ContextVar[Any] = ContextVar("quantizer", default=None)
_statistics: ContextVar[Any] = ContextVar("statistics", default=None)
EXPECTED = "expected"
"""In place of statistics before a calibration: weights are checked, and quantized later."""


@contextlib.contextmanager
def quantizing_by(caller: str, quantizer: Any, statistics: Any = None) -> Iterator[None]:
    """Sets the quantizer of `quantize_weight`, and statistics or `EXPECTED`, within a context.

    `quantize_model` replaces layers by their constructors, which take the arguments of Flax.

    **Raises:** as `jaxlowbit.quantize` does for a value that is no quantizer.
    """
    check(caller, quantizer)
    token, other = _quantizer.set(quantizer), _statistics.set(statistics)
    try:
        yield
    finally:
        _quantizer.reset(token)
        _statistics.reset(other)


def quantize_weight(
    weight: Any,
    format: Format,
    matrix: Callable[[Any], Any] = lambda weight: weight,
    shards: Shards = (1, 1),
) -> QuantizedArray:
    """Returns `quantize(matrix(weight), format)`; abstract if the weight is.

    Every layer and every `quantize_model` quantizes its weights here.
    """

    abstract = isinstance(weight, jax.ShapeDtypeStruct)
    quantizer, statistics = _quantizer.get(), _statistics.get()
    if statistics == EXPECTED:
        k = jax.eval_shape(matrix, weight).shape[-2]
        shapes = ((k, k), jnp.float32), ((k,), jnp.float32), ((), jnp.int32)
        arrays: Any = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        statistics = Statistics(*arrays)
        if not abstract:  # for the errors of its values
            quantizer, statistics = "absmax", None

    def run(weight: Any, statistics: Any) -> QuantizedArray:
        options = {"quantizer": quantizer, "statistics": statistics}
        return quantize(matrix(weight), format, shards=shards, **options)

    return jax.eval_shape(run, weight, statistics) if abstract else run(weight, statistics)


def stand_in(kernel: QuantizedArray, dtype: Any = None) -> Array:
    """A scalar of the dtype of a float kernel, promoted in its place.

    `dtype` is the dtype of the float kernel, if known: 8-bit scales do not have it.
    """
    known = kernel.format.scale is not None and dtype is not None
    return jnp.zeros((), dtype if known else kernel.dtype)


def abstract(array: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding of an array."""
    sharding = None if isinstance(array, Tracer) else getattr(array, "sharding", None)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def check_values(
    weight: Any,
    format: Format,
    matrix: Callable[[Any], Any] = lambda weight: weight,
    shards: Shards = (1, 1),
) -> None:
    """Raises where `quantize` does because of the values of a weight.

    One pass over the values mostly shows that `quantize` takes them. Only if it does not, the
    weight is quantized, for its error.
    """
    concrete = isinstance(weight, Array | np.ndarray) and not isinstance(weight, Tracer)
    if not concrete:
        return
    surely = has_scales(weight)
    if format.scales_channels or format.scale == "two_level":
        surely = False  # the pass does not look at each channel or super-block
    elif format.has_tensor_scale:
        surely &= has_even_groups(matrix(weight))
    if not surely:
        quantize_weight(weight, format, matrix, shards)


@jax.jit
def has_scales(weight: Array) -> Array:
    """Whether scales of its dtype surely represent a weight; False for NaN and infinity."""
    limits = jnp.finfo(weight.dtype)
    span = jnp.max(weight).astype(jnp.float32) - jnp.min(weight).astype(jnp.float32)
    # The largest quantized value of any format times the smallest scale.
    least = 2**8 * float(limits.tiny)
    size = jnp.abs(weight).astype(jnp.float32)
    # Common weights in float16 lie below that, and are multiples of its smallest scale.
    large = weight.dtype == jnp.float16 or jnp.all((size == 0) | (size >= least))
    return (span <= float(limits.max)) & large


@jax.jit
def has_even_groups(weight: Array) -> Array:
    """Whether most groups of each matrix (..., k, n) surely have a scale besides a tensor scale.

    They do if most values are large enough, since a group has one of those at least as often.
    """
    size = jnp.abs(weight).astype(jnp.float32)
    largest = size.max((-2, -1), keepdims=True)
    most = jnp.mean(size >= largest * 2.0**-16, (-2, -1)) > 0.5
    return jnp.all(most) & jnp.all((largest == 0) | (largest >= 2.0**-112))


def kernel_from(
    arrays: Mapping[str, Any],
    format: Format,
    matrix_shape: tuple[int, int],
    shards: Shards = (1, 1),
) -> QuantizedArray:
    """The weight of these arrays; inside `jax.shard_map`, the part on this device."""
    k, n = map(int, matrix_shape)  # fields of a Linen module may be integers of NumPy
    if jax.sharding.get_abstract_mesh().manual_axes:
        leaves = tuple(arrays.get(name) for name in LEAVES)
        return QuantizedArray.tree_unflatten((format, k, n, shards), leaves)
    known: Any = {name: arrays.get(name) for name in LEAVES}
    return QuantizedArray(**known, format=format, k=k, n=n, shards=shards)


def lookup(table: QuantizedArray, tokens: Array, dtype: Any) -> Array:
    """The embeddings (..., features) of `tokens` in a packed table (features, vocabulary)."""
    if table.n == 1:  # as in Flax, every token gets the only embedding
        tokens = jnp.zeros_like(tokens)
    return take_columns(table, tokens, dtype)
