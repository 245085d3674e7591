"""Quantization of floats to a `QuantizedArray` and back, in plain jnp."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from . import checks, explicit, layout, padding, permutations, scales, super_blocks
from .array import QuantizedArray
from .dtypes import FLOATS
from .format import Format, as_format
from .sharding import partition_spec


def quantize(
    weight: Any,
    format: Format | str,
    *,
    method: Literal["absmax", "mse"] | None = None,
    scale_dtype: Any = None,
    shards: tuple[int, int] = (1, 1),
    permutation: Any = None,
) -> QuantizedArray:
    """Rounds a float matrix to the nearest values a format can hold.

    `"absmax"` fits each group's scale (and zero) to its extreme values, so that every element is
    off by at most half a scale: the round-to-nearest baseline of the quantization literature.
    `"mse"` clips: of the full range and 63 shrunken ones it keeps, for each group, the one of least
    squared error, never worse than `"absmax"`. The search over shrunken ranges is that of the `mse`
    option of GPTQ's reference code (Frantar et al., 2023, which sums powers of 2.4); AWQ (Lin et
    al., 2024) judges the same ranges by the output of the layer.

    A group of zeros is dequantized to zeros: if its codebook has no 0, its scale is 0. Power-of-two
    scales have no 0; such a group gets the smallest one.

    **Arguments:**

    - `weight`: float32, bfloat16 or float16 (..., k, n), k the input features.
    - `format`: what to round to: a `Format`, or its name, such as `"int4"`, which is `INT4`,
      `"int8"`, `"int3-g64"`, `"int4-channel"`, `"uint4"`, `"nf4"` or `"e4m3"`.
    - `method`: how scales are chosen; None for `"mse"` below 4 bits, where extremes waste most of
      the few values, and `"absmax"` from 4 bits on.
    - `scale_dtype`: float32, bfloat16 or float16; None for the dtype of `weight`, and for 8-bit
      scales, whose dtype the format names.
    - `shards`: the number of equal parts (of k, of n) into which devices will cut the matrix. Each
      part is padded on its own to whole atoms (64) and groups, and groups start anew in each. Parts
      of n that are a multiple of 64, and of k that are one of 64 and of the group size, need no
      padding.
    - `permutation`: None, or integers (..., k) or (k,): the order in which rows are stored and form
      groups, such as that of falling activations (the `act-order` option of the same code). With
      shards of k, an order of each part, counted from its start.

    **Returns:** a `QuantizedArray` of the same shape, and on a mesh with Explicit axes of the same
    sharding.

    **Raises:** `TypeError` for what is no format; `ValueError` for a wrong rank or dtype, an
    unknown method, shards that do not divide the matrix, a sharding on Explicit axes that
    `partition_spec` refuses, and, outside `jax.jit`, for NaN or infinite weights, for scales beyond
    the range of `scale_dtype` (too large anywhere, or too small in most groups of a matrix of
    float32 or bfloat16) and for a permutation that is none.

    ```python
    q = quantize(jnp.ones((256, 512)), INT4)
    y = jnp.ones((8, 256)) @ q
    ```
    """
    format = as_format("quantize", format)
    if method is None:
        method = "mse" if format.bits < 4 else "absmax"
    weight = checks.array("quantize", "weight", weight, "floats (..., k, n)")
    scale_dtype = _scale_dtype(scale_dtype, format, weight)
    _check(weight, format, method, scale_dtype)
    shards = checks.shard_counts("quantize", shards)
    checks.shards("quantize", weight.shape, shards)
    if permutation is not None:
        permutation = permutations.checked("quantize", permutation, weight.shape, shards[0])
    run = functools.partial(
        _quantize, format=format, method=method, scale_dtype=scale_dtype, shards=shards
    )
    mesh = explicit.mesh_of(weight)
    if mesh is not None:
        run = explicit.automatic(run, mesh, _specs(run, weight, permutation, mesh))
    array = run(weight, permutation)
    _check_scale(array, weight, scale_dtype)
    return array


def _scale_dtype(given: Any, format: Format, weight: Array) -> Any:
    """The dtype in which scales are rounded."""
    if given is not None and format.scale is not None:
        raise ValueError(
            f"quantize: scale_dtype is {checks.brief(given)}, but the format has {format.scale} "
            "scales; leave scale_dtype out, or scale out of the format."
        )
    if format.scale == "super":
        return jnp.dtype("float32")  # of what is rounded to two levels afterwards
    if format.scale is not None:
        return format.scale_dtype
    return checks.dtype("quantize", "scale_dtype", weight.dtype if given is None else given)


# One program: run operation by operation, it would hold several float32 copies of the weight.
@functools.partial(jax.jit, static_argnames=("format", "method", "scale_dtype", "shards"))
def _quantize(
    weight: Array,
    permutation: Array | None,
    format: Format,
    method: str,
    scale_dtype: Any,
    shards: tuple[int, int],
) -> QuantizedArray:
    shape = weight.shape
    if permutation is not None:
        weight = permutations.permute(weight, permutation, shards[0], axis=-2)
    unit = padding.shard_unit(format.scale_span)
    weight = padding.spread(weight, -2, shards[0], unit, mode="edge")
    weight = padding.spread(weight, -1, shards[1], layout.ATOM, mode="edge")
    *lead, k, n = weight.shape
    size = k if format.group_size == -1 else min(format.group_size, k)
    groups = -(-k // size)
    # Repeating the last row fills the last group without moving its extremes.
    pad = [(0, 0)] * len(lead) + [(0, groups * size - k), (0, 0)]
    grouped = jnp.pad(weight.astype(jnp.float32), pad, mode="edge")
    grouped = grouped.reshape(*lead, groups, size, n)
    tensor_scale = None
    if format.has_tensor_scale:
        tensor_scale = scales.of_tensor(grouped, format)
        units = tensor_scale if format.scales_channels else tensor_scale[..., None]
        grouped = scales.ratio(grouped, units[..., None, None, :])
    if method == "absmax":
        scale, zero = scales.extremes(grouped, format, scale_dtype)
    else:
        rows = np.arange(groups * size)
        # Of each part of k, the rows after the matrix's own are padding.
        counted = (rows < k) & (rows % (k // shards[0]) < shape[-2] // shards[0])
        scale, zero = scales.least_squares(grouped, counted, format, scale_dtype)
    stored, stored_zero = scales.stored(scale, format), zero
    if format.scale == "super":
        stored, stored_zero, scale, zero = scales.two_levels(scale, zero, format)
    qvalue = scales.qvalue(grouped, scale, zero, format)
    qvalue = qvalue.reshape(*lead, groups * size, n)[..., :k, :]
    if tensor_scale is not None and format.scales_channels:
        tensor_scale = padding.join(tensor_scale, -1, shards[1], shape[-1])
    return QuantizedArray.from_packed_groups(
        qvalue,
        stored,
        stored_zero,
        format=format,
        k=shape[-2],
        n=shape[-1],
        shards=shards,
        permutation=permutation,
        tensor_scale=tensor_scale,
    )


def _specs(
    run: Callable[..., QuantizedArray], weight: Array, permutation: Array | None, mesh: Any
) -> QuantizedArray:
    """The sharding of the words of a weight whose type has one."""
    *lead, k, n = explicit.entries(weight)
    array = jax.eval_shape(run, jax.ShapeDtypeStruct(weight.shape, weight.dtype), permutation)
    return partition_spec(array, mesh, k=k, n=n, lead=lead)


def dequantize(array: QuantizedArray, dtype: Any = None) -> Array:
    """Returns `array.dequantize(dtype)`: the floats (..., k, n) that a quantized array stands for.

    **Arguments:** `dtype`: the dtype of the result, of floats; None for that of the scales.

    **Raises:** `TypeError` for what is no quantized array or dtype, `ValueError` for integers.
    """
    checks.quantized("dequantize", "array", array, QuantizedArray)
    if dtype is not None:
        dtype = checks.float_dtype("dequantize", "dtype", dtype)
    return array.dequantize(dtype)


def _check(weight: Array, format: Format, method: str, scale_dtype: Any) -> None:
    if weight.ndim < 2 or 0 in weight.shape[-2:]:
        raise ValueError(
            f"quantize: weight has shape {weight.shape}, but a matrix (..., k, n) with k and n "
            "from 1 is needed; reshape it."
        )
    wide = {} if format.scale is not None else {"scale_dtype": scale_dtype}
    for name, dtype in ({"weight": weight.dtype} | wide).items():
        if dtype not in FLOATS:
            raise ValueError(
                f"quantize: {name} is {dtype}, but it is float32, bfloat16 or float16; cast it, or "
                "use QuantizedArray.from_integers for integers."
            )
    checks.choice("quantize", "method", method, ("absmax", "mse"))
    if format.bits == 1 and format.zero == "none" and format.codebook is None:
        raise ValueError(
            "quantize: a 1-bit code without a zero holds only -scale and 0; use zero='float', "
            "which holds two free values per group, or a codebook such as (-1, 1)."
        )
    checks.finite("quantize", "weight", weight, "no scale covers them. Clean the weight first")


def _check_scale(array: QuantizedArray, weight: Array, scale_dtype: Any) -> None:
    if isinstance(array.scale, Tracer):
        return
    found = array.scale
    if array.format.scale == "super":
        scale_dtype = jnp.dtype("float16")
        _, found = super_blocks.unpacked(array.scale, array.format)
    # JAX would compile this for each shape, but finds scales that other processes hold.
    xp: Any = np if found.is_fully_addressable else jnp
    scale = xp.asarray(found).astype(np.float32)
    finite = xp.isfinite(scale).all()
    if array.format.scale == "super" and array.zero is not None:
        _, floats = super_blocks.unpacked(array.zero, array.format)
        finite &= xp.isfinite(xp.asarray(floats).astype(np.float32)).all()
    if not finite:
        raise ValueError(
            f"quantize: weights up to {_largest(weight):g} span a range beyond that of "
            f"{scale_dtype} scales; {_wider(array.format, 'smaller weights')}."
        )
    if weight.dtype == jnp.float16 and array.format.scale is None:
        return  # its values are multiples of the least scale
    least = scales.least(scale_dtype)
    least_ones, others = (xp.sum(x, axis=(-3, -2, -1)) for x in (scale == least, scale > least))
    lost = np.asarray(least_ones > others)
    if lost.any() and array.tensor_scale is not None:
        raise ValueError(
            f"quantize: the largest weight, {_largest(weight[lost]):g}, is so far from the others "
            f"that most of its groups need scales below {least:g}, the least of {scale_dtype}, "
            "beside its tensor scale; use a format of more range, such as 'mxfp4', or clip it."
        )
    if array.tensor_scale is not None:
        scale_dtype = jnp.dtype("float32")
        least = scales.least(scale_dtype)
        lost = np.asarray(array.tensor_scale == least)
        if array.format.scales_channels:
            lost = lost.mean(-1) > 0.5
    if lost.any():
        way = "scale the weights up"
        if scale_dtype == jnp.float16:
            way = _wider(array.format, way)
        raise ValueError(
            f"quantize: weights up to {_largest(weight[lost]):g} need scales below {least:g}, the "
            f"least of {scale_dtype}, in most groups of a matrix; {way}."
        )


def _wider(format: Format, otherwise: str) -> str:
    """The ways out of float16 scales, or of other scales of too small a range."""
    if format.scale == "super":
        return f"leave scale='super' out of the format, or {otherwise.removeprefix('use ')}"
    return f"use scale_dtype=jnp.float32, or {otherwise}"


def _largest(weight: Array) -> float:
    return float(jnp.abs(weight).max())
