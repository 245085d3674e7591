"""Weights of layers: `quantize_weight`, checks before it, and kernels made of stored arrays."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from .._core import explicit
from .._core.array import LEAVES, QuantizedArray
from .._core.format import Format
from ..quantizers import Statistics
from ..quantizers._quantize import quantize
from ..quantizers._registry import check, factors_of, stack_factors
from .equation import Equation

Path = tuple[str, ...]
Shards = tuple[int, int]
Sizes = tuple[tuple[int, ...], tuple[int, ...]]
"""The contracted sizes of a kernel, and the sizes of its features."""

ARRAYS = tuple(name for name in LEAVES if name != "index")
"""The arrays of a layer's weight, each in a separate variable."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Packing:
    """How a weight is packed and multiplied; a pytree without leaves, so part of `jit`'s cache key.

    - `sizes`: the sizes of the weight, if they are known.
    - `equation`: for an `EinsumLayer`, its equation, and the shape of the weight in it.
    - `lhs_qtype`: the dtype of quantized inputs in products, or None.
    - `raw`: for a raw parameter, its path in `params` and its equation.
    - `factor`: whether the weight has an `lhs_factor`.
    """

    format: Format
    shards: Shards = (1, 1)
    sizes: Sizes | None = None
    equation: tuple[str, tuple[int, ...]] | None = None
    lhs_qtype: Any = None
    raw: tuple[Path, Equation] | None = None
    factor: bool = False


_quantizer: ContextVar[Any] = ContextVar("quantizer", default=None)
_statistics: ContextVar[Any] = ContextVar("statistics", default=None)
EXPECTED = "expected"
"""Used instead of statistics before a calibration: weights are checked now and quantized later."""


class Scaled(NamedTuple):
    """A weight that is quantized already, and its factors, in the place of a quantizer."""

    kernel: QuantizedArray
    factor: Array | None


@contextlib.contextmanager
def quantizing_by(caller: str, quantizer: Any, statistics: Any = None) -> Iterator[None]:
    """Sets the quantizer of `quantize_weight`, and statistics or `EXPECTED`, within a context.

    A context variable, because `quantize_model` calls constructors, whose arguments are Flax's.

    **Raises:** as `jaxlowbit.quantize` does for an invalid quantizer.
    """
    if not isinstance(quantizer, Scaled):
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
) -> Scaled:
    """Returns `quantize(matrix(weight), format)`, and the factors (..., k) that divide its inputs
    if the quantizer scales features; abstract if the weight is.

    All layers and all `quantize_model`s quantize their weights here.
    """

    abstract = isinstance(weight, jax.ShapeDtypeStruct)
    quantizer, statistics = _quantizer.get(), _statistics.get()
    if isinstance(quantizer, Scaled):
        return quantizer
    if statistics == EXPECTED:
        *lead, k, _ = jax.eval_shape(matrix, weight).shape
        shapes = ((*lead, k, k), jnp.float32), ((*lead, k), jnp.float32), (lead, jnp.int32)
        arrays: Any = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        statistics = Statistics(*arrays)
        if not abstract:  # raises for invalid values
            quantizer, statistics = "absmax", None

    def run(weight: Any, statistics: Any) -> tuple[QuantizedArray, Array | None]:
        values, factors = matrix(weight), factors_of(quantizer)
        options: dict[str, Any] = {"quantizer": quantizer, "shards": shards}
        if factors is None or statistics is None:
            return quantize(values, format, statistics=statistics, **options), None
        compute: Any = functools.partial(stack_factors, factors=factors, formats=(format,))
        if (mesh := explicit.mesh_of(values)) is not None:
            compute = explicit.automatic(compute, mesh, jax.P())
        factor = compute((values,), statistics)
        if format.scale is None:
            options["scale_dtype"] = values.dtype
        values = values.astype(jnp.float32) * factor[..., None]
        statistics = statistics.divided(factor)
        return quantize(values, format, statistics=statistics, **options), factor

    found: Any = jax.eval_shape(run, weight, statistics) if abstract else run(weight, statistics)
    return Scaled(*found)


def stand_in(kernel: QuantizedArray, dtype: Any = None) -> Array:
    """A scalar with the dtype of a float kernel, for type promotion without that kernel.

    `dtype`: the dtype of the float kernel, if known; 8-bit scales do not determine it.
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
    """Raises if `quantize` would raise because of the values of a weight.

    One pass over the values usually proves that `quantize` accepts them. Otherwise the weight is
    quantized, which raises the error.
    """
    concrete = isinstance(weight, Array | np.ndarray) and not isinstance(weight, Tracer)
    if not concrete:
        return
    surely = has_scales(weight)
    if format.scales_channels or format.two_levels:
        surely = False  # the pass does not check each channel or super-block
    elif format.has_tensor_scale:
        surely &= has_even_groups(matrix(weight))
    if not surely:
        quantize_weight(weight, format, matrix, shards)


@jax.jit
def has_scales(weight: Array) -> Array:
    """Whether scales of the weight's dtype certainly represent it; False for NaN and infinity."""
    limits = jnp.finfo(weight.dtype)
    span = jnp.max(weight).astype(jnp.float32) - jnp.min(weight).astype(jnp.float32)
    # The largest code of any format times the smallest scale.
    least = 2**8 * float(limits.tiny)
    size = jnp.abs(weight).astype(jnp.float32)
    # Typical float16 weights are below that, and are multiples of float16's smallest scale.
    large = weight.dtype == jnp.float16 or jnp.all((size == 0) | (size >= least))
    return (span <= float(limits.max)) & large


@jax.jit
def has_even_groups(weight: Array) -> Array:
    """Whether most groups of each matrix (..., k, n) certainly get a scale above 0, with a tensor
    scale.

    True if most values are large enough: then at least as many groups contain such a value.
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
    """Builds the weight from its arrays; inside `jax.shard_map`, the shard of this device."""
    k, n = map(int, matrix_shape)  # fields of a Linen module may be NumPy integers
    if jax.sharding.get_abstract_mesh().manual_axes:
        leaves = tuple(arrays.get(name) for name in LEAVES)
        return QuantizedArray.tree_unflatten((format, k, n, shards), leaves)
    known: Any = {name: arrays.get(name) for name in LEAVES}
    return QuantizedArray(**known, format=format, k=k, n=n, shards=shards)
