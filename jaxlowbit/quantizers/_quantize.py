"""Quantization of floats to a `QuantizedArray`, in plain jnp."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from .._core import checks, explicit, permutations, scales, super_blocks
from .._core.array import QuantizedArray
from .._core.dtypes import FLOATS
from .._core.format import Format, as_format
from .._core.groups import scale_dtype_of
from ._registry import Quantizer, find
from ._statistics import Statistics, checked


def quantize(
    weight: Any,
    format: Format | str,
    *,
    quantizer: str | Quantizer | None = None,
    statistics: Statistics | None = None,
    scale_dtype: Any = None,
    shards: tuple[int, int] = (1, 1),
    permutation: Any = None,
) -> QuantizedArray:
    """Rounds a float matrix to values that a format can represent.

    The quantizer `"absmax"` fits each group's scale (and zero) to its extreme values and rounds to
    nearest. `"mse"` clips: each group gets the range with the smallest squared error, never worse
    than `"absmax"`. `docs/quantizers.md` compares them and shows how to write another.

    A group of zeros is dequantized to zeros: if its codebook has no 0, its scale is 0. Power-of-two
    scales have no 0; such a group gets the smallest one.

    **Arguments:**

    - `weight`: float32, bfloat16 or float16 (..., k, n), k the input features.
    - `format`: a `Format`, or its name, such as `"int4"`, which is `INT4`, `"int8"`, `"int3-g64"`,
      `"int4-channel"`, `"uint4"`, `"nf4"` or `"e4m3"`.
    - `quantizer`: its name, or a function `(weight, format, statistics, **options)` that JAX can
      trace and that returns a `QuantizedArray`; `options` are `scale_dtype`, `shards` and
      `permutation`, if they are given. None for `"mse"` below 4 bits, where extremes waste most of
      the few values, and `"absmax"` from 4 bits on.
    - `statistics`: a `jaxlowbit.quantizers.Statistics` of the inputs of the matrix, for quantizers
      that read one, or None.
    - `scale_dtype`: float32, bfloat16 or float16; None for the dtype of `weight`. Formats with
      8-bit scales determine the dtype and require None.
    - `shards`: the number of equal parts (of k, of n) for the devices of a mesh. Each part is
      padded to whole atoms (64) and groups, and groups start anew in each. Parts need no padding if
      their n is a multiple of 64, and their k a multiple of 64 and of the group size.
    - `permutation`: None, or integers (..., k) or (k,): the order of rows for storage and groups,
      for example by falling activations (the `act-order` option of GPTQ's reference code). With
      shards of k, one order per part, counted from its start.

    **Returns:** a `QuantizedArray` of the same shape, and on a mesh with Explicit axes of the same
    sharding.

    **Raises:** `TypeError` for an argument of another type; `ValueError` for a wrong rank or dtype,
    for a quantizer that is unknown or lacks the format, for shards that do not divide the matrix,
    for a sharding on Explicit axes if `QuantizedArray.partition_spec` raises, and, outside
    `jax.jit`, for NaN or infinite weights or statistics, for scales beyond the range of
    `scale_dtype` (too large anywhere, or too small in most groups of a matrix of float32 or
    bfloat16) and for integers that are no permutation.

    ```python
    q = quantize(jnp.ones((256, 512)), INT4)
    y = jnp.ones((8, 256)) @ q
    ```
    """
    format = as_format("quantize", format)
    weight = checks.array("quantize", "weight", weight, "floats (..., k, n)")
    _check(weight, format, scale_dtype)
    scale_dtype = None if scale_dtype is None else jnp.dtype(scale_dtype)
    shards = checks.shard_counts("quantize", shards)
    checks.shards("quantize", weight.shape, shards)
    if permutation is not None:
        permutation = permutations.checked("quantize", permutation, weight.shape, shards[0])
    statistics = checked("quantize", statistics, weight.shape)
    function = find("quantize", quantizer, format, _options(scale_dtype, shards, permutation))
    checks.finite("quantize", "weight", weight, "no scale covers them; clean the weight first")
    run = functools.partial(
        _quantize, quantizer=function, format=format, scale_dtype=scale_dtype, shards=shards
    )
    mesh = explicit.mesh_of(weight)
    if mesh is not None:
        specs = _specs(run, weight, permutation, statistics, mesh)
        run = explicit.automatic(run, mesh, specs)
    array = run(weight, permutation, statistics)
    check_scale(array, weight)
    return array


# One program: run operation by operation, it would need several float32 copies of the weight.
@functools.partial(jax.jit, static_argnames=("quantizer", "format", "scale_dtype", "shards"))
def _quantize(
    weight: Array,
    permutation: Array | None,
    statistics: Statistics | None,
    quantizer: Quantizer,
    format: Format,
    scale_dtype: Any,
    shards: tuple[int, int],
) -> QuantizedArray:
    options = _options(scale_dtype, shards, permutation)
    array = quantizer(weight, format, statistics, **options)
    _check_result(array, weight, format, shards)
    return array


def _options(scale_dtype: Any, shards: tuple[int, int], permutation: Any) -> dict[str, Any]:
    """The keyword arguments that the caller of `quantize` has set, for the quantizer."""
    options: dict[str, Any] = {} if scale_dtype is None else {"scale_dtype": scale_dtype}
    if shards != (1, 1):
        options["shards"] = shards
    return options if permutation is None else options | {"permutation": permutation}


def _check_result(array: Any, weight: Array, format: Format, shards: tuple[int, int]) -> None:
    checks.quantized("quantize", "the result of the quantizer", array, QuantizedArray)
    wanted = weight.shape, format, shards
    found = array.shape, array.format, array.shards
    for name, ours, theirs in zip(("shape", "format", "shards"), wanted, found, strict=True):
        if ours != theirs:
            raise ValueError(
                f"quantize: the quantizer returns a matrix with {name}={theirs}, but {ours} was "
                "requested; pass format and options to Groups.of or jaxlowbit.quantize."
            )


def _specs(
    run: Callable[..., QuantizedArray],
    weight: Array,
    permutation: Array | None,
    statistics: Statistics | None,
    mesh: Any,
) -> QuantizedArray:
    """The sharding of the words of a weight with a sharding in its type."""
    *lead, k, n = explicit.entries(weight)
    like = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
    array = jax.eval_shape(run, like, permutation, statistics)
    return array.partition_spec(mesh, k=k, n=n, lead=lead)


def _check(weight: Array, format: Format, scale_dtype: Any) -> None:
    if weight.ndim < 2 or 0 in weight.shape[-2:]:
        raise ValueError(
            f"quantize: weight has shape {weight.shape}, but a matrix (..., k, n) with k and n "
            "from 1 is needed; reshape it."
        )
    found = scale_dtype_of(format, scale_dtype, weight)
    wide = {} if format.scale is not None else {"scale_dtype": found}
    for name, dtype in ({"weight": weight.dtype} | wide).items():
        if dtype not in FLOATS:
            raise ValueError(
                f"quantize: {name} is {dtype}, but it must be float32, bfloat16 or float16; cast "
                "it, or use QuantizedArray.from_integers for integers."
            )


def check_scale(array: QuantizedArray, weight: Array) -> None:
    """Raises `ValueError` for a quantized weight whose scales are infinite, or mostly too small."""
    if isinstance(array.scale, Tracer):
        return
    found = array.scale
    if array.format.two_levels:
        _, found = super_blocks.unpacked(array.scale, array.format)
    scale_dtype = found.dtype
    # JAX would compile this for each shape, but NumPy cannot read scales on other processes.
    xp: Any = np if found.is_fully_addressable else jnp
    scale = xp.asarray(found).astype(np.float32)
    finite = xp.isfinite(scale).all()
    if array.format.two_levels and array.zero is not None:
        _, floats = super_blocks.unpacked(array.zero, array.format)
        finite &= xp.isfinite(xp.asarray(floats).astype(np.float32)).all()
    if not finite:
        raise ValueError(
            f"quantize: weights up to {_largest(weight):g} span a range larger than that of "
            f"{scale_dtype} scales; {_wider(array.format, 'smaller weights')}."
        )
    if weight.dtype == jnp.float16 and array.format.scale is None:
        return  # its values are multiples of the smallest scale
    least = scales.least(scale_dtype)
    least_ones, others = (xp.sum(x, axis=(-3, -2, -1)) for x in (scale == least, scale > least))
    lost = xp.asarray(least_ones > others)
    if lost.any() and array.tensor_scale is not None:
        raise ValueError(
            f"quantize: the largest weight, {_largest(weight, lost):g}, is so far from the others "
            f"that most of its groups need scales below {least:g}, the minimum of {scale_dtype}, "
            "with its tensor scale; use a format of more range, such as 'mxfp4', or clip it."
        )
    if array.tensor_scale is not None:
        scale_dtype = jnp.dtype("float32")
        least = scales.least(scale_dtype)
        lost = xp.asarray(array.tensor_scale == least)
        if array.format.scales_channels:
            lost = lost.mean(-1) > 0.5
    if lost.any():
        way = "scale the weights up"
        if scale_dtype == jnp.float16:
            way = _wider(array.format, way)
        raise ValueError(
            f"quantize: weights up to {_largest(weight, lost):g} need scales below {least:g}, the "
            f"minimum of {scale_dtype}, in most groups of a matrix; {way}."
        )


def _wider(format: Format, otherwise: str) -> str:
    """The ways out of float16 scales, or of other scales of too small a range."""
    if format.two_levels:
        return f"leave scale='two_level' out of the format, or {otherwise.removeprefix('use ')}"
    return f"use scale_dtype=jnp.float32, or {otherwise}"


def _largest(weight: Array, chosen: Any = None) -> float:
    """The largest magnitude, of the chosen matrices if this process has them."""
    own = weight[chosen] if chosen is not None and weight.is_fully_addressable else weight
    return float(jnp.abs(own).max())
