"""Checks of integers that are already quantized, for `QuantizedArray.from_integers`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from . import checks, indexing, layout, padding, permutations, super_blocks
from .codebooks import CODEBOOKS
from .dequantize import codes_of, floats_of
from .dtypes import FLOATS
from .format import SCALES, SUPER_BLOCK, Format


class Groups(NamedTuple):
    """Arguments of `QuantizedArray.from_packed_groups`, including the padding of each shard."""

    qvalue: Array
    scale: Array
    zero: Array | None
    k: int
    n: int
    permutation: Array | None
    tensor_scale: Array | None


def checked(
    values: Any,
    scale: Any,
    zero: Any,
    *,
    format: Format,
    shards: tuple[int, int],
    permutation: Any,
    g_idx: Any,
    tensor_scale: Any,
    super_scale: Any,
) -> Groups:
    """Checks, pads and reorders the arguments of `QuantizedArray.from_integers`.

    **Raises:** as `QuantizedArray.from_integers`.
    """
    values = checks.integers("from_integers", "values", values, "integers (..., k, n)")
    scale = _group_scale(scale, format)
    if zero is not None:
        zero = checks.integers("from_integers", "zero", zero, "an array of the shape of scale")
    if format.codebook is not None:
        values = _counts(values, format)
    _check_values(values, zero, format)
    checks.shards("from_integers", values.shape, shards)
    _check_groups(values.shape, scale, zero, format, shards)
    if not format.two_levels:
        floats, _ = floats_of(scale, format)
        checks.finite("from_integers", "scale", floats, "they give no weight; repair them")
    *lead, k, n = values.shape
    parts, columns = shards
    tensor_scale = _tensor_scale(tensor_scale, tuple(lead), n, format)
    rows = -(-k // (parts * SUPER_BLOCK)) * parts
    super_floats = _super_scale(super_scale, (*lead, rows, n), format)
    if zero is not None:
        zero = _integer_or_float_zero(zero, values, scale, format)
    qvalue = _qvalue("values", values, format)
    permutation = _permutation(permutation, g_idx, qvalue.shape, format, parts)
    if permutation is not None:
        qvalue = permutations.permute(qvalue, permutation, shards=parts, axis=-2)

    def spread(array: Array, unit: int) -> Array:
        array = padding.spread(array, -2, parts, unit, mode="edge") if unit else array
        return padding.spread(array, -1, columns, layout.ATOM, mode="edge")

    unit, size = format.shard_unit, format.group_size
    scale, zero = (
        None if array is None else spread(array, 0 if size == -1 else unit // size)
        for array in (scale, zero)
    )
    if format.two_levels:
        own = [spread(array, unit // SUPER_BLOCK) for array in super_floats]
        scale = super_blocks.packed(scale, own[0], format)
        zero = None if zero is None else super_blocks.packed(zero, own[1], format)
    return Groups(spread(qvalue, unit), scale, zero, k, n, permutation, tensor_scale)


def _group_scale(scale: Any, format: Format) -> Any:
    """The scales of groups: floats, 8-bit scales as bits, or the integers of two-level scales."""
    if format.scale == "two_level":
        what = "integers (..., groups, n)"
        scale = checks.integers("from_integers", "scale", scale, what)
    else:
        scale = checks.array("from_integers", "scale", scale, "floats (..., groups, n)")
    if format.scale is not None:
        return _narrow("scale", scale, format)
    if scale.dtype not in FLOATS:
        raise ValueError(
            f"from_integers: scale is {scale.dtype}, but it must be float32, bfloat16 or float16; "
            "cast it."
        )
    return scale


def _check_values(values: Any, zero: Any, format: Format) -> None:
    """Raises if the values are no integer matrix, or lack the zero of the format."""
    if not jnp.issubdtype(values.dtype, jnp.integer) or values.ndim < 2:
        raise ValueError(
            f"from_integers: values has shape {values.shape} and dtype {values.dtype}, but it "
            "must be an integer matrix (..., k, n); use quantize for floats."
        )
    signed = jnp.issubdtype(values.dtype, jnp.signedinteger)
    if not signed and format.zero == "none" and format.codebook is None:
        raise ValueError(
            f"from_integers: values are unsigned ({values.dtype}) and the format has no zero; "
            'pass signed values, or a zero with format.zero="integer".'
        )
    if (zero is None) != (format.zero == "none"):
        raise ValueError(
            f"from_integers: format.zero is {format.zero!r}, but zero is "
            f"{'missing' if zero is None else 'given'}; make the two agree."
        )


def _check_groups(
    shape: tuple[int, ...], scale: Any, zero: Any, format: Format, shards: tuple[int, int]
) -> None:
    """Raises if scales or zeros have another shape than the groups of values of this shape."""
    *lead, k, n = shape
    size, (parts, _) = format.group_size, shards
    groups = 1 if size == -1 else -(-k // (parts * size)) * parts
    for name, array in (("scale", scale), ("zero", zero)):
        if array is not None and array.shape != (*lead, groups, n):
            raise ValueError(
                f"from_integers: {name} has shape {array.shape}, but values of shape "
                f"{shape} in groups of {size} need {(*lead, groups, n)}, with shards="
                f"{shards!r}."
            )


def _permutation(
    permutation: Any, g_idx: Any, shape: tuple[int, ...], format: Format, parts: int
) -> Array | None:
    """The order of the rows of a matrix of this shape; None if it is unchanged."""
    if g_idx is not None:
        if permutation is not None:
            raise ValueError(
                "from_integers: permutation and g_idx are both given, but g_idx determines the "
                "order of the rows; pass one of them."
            )
        size = format.group_size
        permutation = permutations.of_groups("from_integers", g_idx, shape, size, parts)
    if permutation is None:
        return None
    return permutations.checked("from_integers", permutation, shape, parts)


def of_blocks(values: Any, scale: Any, block_size: Any) -> tuple[Any, Any, Format]:
    """8-bit floats, a scale for each column of each block, and their format.

    **Raises:** as `QuantizedArray.from_blocks`.
    """
    values = checks.array("from_blocks", "values", values, "8-bit floats (..., k, n)")
    scale = checks.array("from_blocks", "scale", scale, "floats (..., k blocks, n blocks)")
    names = {book.dtype: name for name, book in CODEBOOKS.items() if book.dtype is not None}
    if values.dtype not in names or values.ndim < 2:
        raise ValueError(
            f"from_blocks: values is {checks.brief(values)}, but it must be float8_e4m3fn or "
            "float8_e5m2 (..., k, n); view the bits of a checkpoint as that."
        )
    if not isinstance(block_size, tuple | list) or len(block_size) != 2:
        raise TypeError(
            f"from_blocks: block_size is {checks.brief(block_size)}, but it must be two numbers, "
            "the rows and columns of a block, such as (128, 128)."
        )
    rule = "the rows and columns of a block, each from 1"
    rows, columns = (
        checks.integer("from_blocks", f"block_size[{i}]", size, rule)
        for i, size in enumerate(block_size)
    )
    *lead, k, n = values.shape
    expected = (*lead, -(-k // rows), -(-n // columns))
    if scale.shape != expected:
        raise ValueError(
            f"from_blocks: scale has shape {scale.shape}, but values of shape {values.shape} in "
            f"blocks of {rows} x {columns} have {expected}; transpose both where a checkpoint has "
            "(n, k)."
        )
    narrow = next((name for name, dtype in SCALES.items() if scale.dtype == dtype), None)
    if narrow in ("e4m3", "int8", "two_level") or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(
            f"from_blocks: scale is {scale.dtype}, but it must be float, or float8_e8m0fnu; "
            "cast it."
        )
    format = Format(8, rows, codebook=names[values.dtype]).replace(scale=narrow)
    codes = codes_of(scale)
    floats, _ = floats_of(codes, format)
    checks.finite("from_blocks", "scale", floats, "they give no weight; repair them")
    return values, jnp.repeat(codes, columns, axis=-1)[..., :n], format


def _narrow(name: str, scale: Any, format: Format) -> Array:
    """8-bit scales as bits, which can be padded; integers of two-level scales as int8."""
    if format.scale == "two_level":
        if not jnp.issubdtype(scale.dtype, jnp.integer):
            raise ValueError(
                f"from_integers: {name} is {scale.dtype}, but two-level scales are 8-bit "
                "integers, which the floats of super_scale multiply; pass both."
            )
        _check_range(name, scale, -super_blocks.MOST - 1, super_blocks.MOST)
        scale = indexing.saturated(scale)
        return jnp.clip(scale, -super_blocks.MOST - 1, super_blocks.MOST).astype(jnp.int8)
    if scale.dtype not in (format.scale_dtype, jnp.uint8):
        raise ValueError(
            f"from_integers: scale is {scale.dtype}, but the format has {format.scale} scales, "
            f"{format.scale_dtype} or their bits, uint8; cast it, or leave scale out of the format."
        )
    if format.scale != "int8":
        return codes_of(scale)
    if scale.size and not isinstance(scale, Tracer):
        with jax.ensure_compile_time_eval():  # they may be constants of a traced function
            least, most = int(scale.min()), int(scale.max())
        if least < 0 or most > format.max_scale:
            raise ValueError(
                f"from_integers: scale reaches from {least} to {most}, but integer scales of "
                f"{format.bits}-bit integers are from 0 to {format.max_scale}; use a larger "
                "tensor_scale."
            )
    return jnp.clip(scale, 0, format.max_scale).astype(jnp.uint8)


def _check_range(name: str, integers: Any, low: int, high: int) -> None:
    """Raises for integers of two-level scales that do not fit 8 bits. Does nothing while
    tracing."""
    if not integers.size or isinstance(integers, Tracer):
        return
    with jax.ensure_compile_time_eval():
        least, most = int(integers.min()), int(integers.max())
    if least < low or most > high:
        raise ValueError(
            f"from_integers: {name} reaches from {least} to {most}, but with two-level scales "
            f"it has integers from {low} to {high}; use a larger super_scale."
        )


def _super_scale(given: Any, shape: tuple[int, ...], format: Format) -> list[Array]:
    """The float16 factors of super-blocks for integer scales and zeros."""
    if (given is not None) != format.two_levels:
        raise ValueError(
            f"from_integers: format.scale is {format.scale!r}, but super_scale is "
            f"{'missing' if given is None else 'given'}; make the two agree."
        )
    if given is None:
        return []
    pair = format.zero != "none"
    if pair and not (isinstance(given, tuple | list) and len(given) == 2):
        raise TypeError(
            f"from_integers: super_scale is {checks.brief(given)}, but with zeros it is a pair, "
            "the floats that multiply scale and those that multiply zero; pass both."
        )
    found = []
    for i, floats in enumerate(given if pair else [given]):
        name = f"super_scale[{i}]" if pair else "super_scale"
        floats = checks.array("from_integers", name, floats, "floats (..., super-blocks, n)")
        if floats.shape != shape or not jnp.issubdtype(floats.dtype, jnp.floating):
            raise ValueError(
                f"from_integers: {name} is {checks.brief(floats)}, but it must be floats of shape "
                f"{shape}, one for each super-block of {SUPER_BLOCK} rows and each channel."
            )
        half = floats.astype(jnp.float16)
        reason = "they give no float16 weight; repair them, or use wider scales"
        checks.finite("from_integers", name, half, reason)
        _check_rounding(name, floats, half)
        found.append(half)
    return found


def _check_rounding(name: str, floats: Array, half: Array) -> None:
    """Raises for floats that float16 rounds to 0. Does nothing while tracing."""
    if isinstance(floats, Tracer):
        return
    with jax.ensure_compile_time_eval():
        count, first = checks.false_elements((half != 0) | (floats == 0))
        where = "" if first is None else f", the first at {first} ({float(floats[first]):.3g})"
    if count > 0:
        raise ValueError(
            f"from_integers: {name} has {count} values that float16 rounds to 0{where}; use wider "
            "scales."
        )


def _tensor_scale(given: Any, lead: tuple[int, ...], n: int, format: Format) -> Array | None:
    """The tensor scale of each matrix, or of each of its n channels, float32."""
    if (given is not None) != format.has_tensor_scale:
        raise ValueError(
            f"from_integers: format.scale is {format.scale!r}, but tensor_scale is "
            f"{'missing' if given is None else 'given'}; make the two agree."
        )
    if given is None:
        return None
    found = checks.array("from_integers", "tensor_scale", given, "floats (...)")
    shape = (*lead, n) if format.scales_channels else lead
    if found.shape not in ((), shape) or not jnp.issubdtype(found.dtype, jnp.floating):
        raise ValueError(
            f"from_integers: tensor_scale is {checks.brief(found)}, but it must be one float, or "
            f"floats of shape {shape}, one for each "
            f"{'channel' if format.scales_channels else 'matrix'}."
        )
    found = found.astype(jnp.float32)
    checks.finite("from_integers", "tensor_scale", found, "they give no weight; repair them")
    return jnp.broadcast_to(found, shape)


def _counts(values: Any, format: Format) -> Any:
    """Codebook indices as unsigned integers; each must select a finite number."""
    if format.float_dtype is not None and values.dtype == format.float_dtype:
        values = lax.bitcast_convert_type(jnp.asarray(values), jnp.uint8)
    if jnp.issubdtype(values.dtype, jnp.signedinteger):
        raise ValueError(
            f"from_integers: values are signed ({values.dtype}), but codebook indices are "
            "unsigned; pass unsigned integers."
        )
    if values.size and not isinstance(values, Tracer) and jnp.issubdtype(values.dtype, jnp.integer):
        table = np.isfinite(np.array(format.values))
        counts = np.minimum(np.asarray(values), len(table) - 1).astype(np.int64)
        if not (finite := table[counts]).all():
            first = tuple(map(int, np.argwhere(~finite)[0]))
            raise ValueError(
                f"from_integers: values has {int((~finite).sum())} that represent NaN or infinity, "
                f"the first at {first}; repair the weight first."
            )
    return values


def _integer_or_float_zero(zero: Any, values: Any, scale: Array, format: Format) -> Array:
    """The zero to store: integers in the convention of `values`, or floats for unsigned values."""
    unsigned = jnp.issubdtype(values.dtype, jnp.unsignedinteger)
    if format.scale == "two_level":
        if not unsigned:
            raise ValueError(
                f"from_integers: values are {values.dtype}, but with format.zero='float' they must "
                "be unsigned codes; convert them."
            )
        return _narrow("zero", zero, format)
    if format.zero == "float":
        if not unsigned or not jnp.issubdtype(zero.dtype, jnp.floating):
            raise ValueError(
                f"from_integers: values are {values.dtype} and zero is {zero.dtype}, but with "
                "format.zero='float' values must be unsigned codes and zero floats; convert them."
            )
        zero = jnp.asarray(zero)
        checks.finite("from_integers", "zero", zero, "they give no weight; repair them")
        zero = zero.astype(scale.dtype)
        name = f"zero, in the {scale.dtype} of scale,"
        checks.finite("from_integers", name, zero, "cast the scales to float32")
        return zero
    kind = jnp.unsignedinteger if unsigned else jnp.signedinteger
    if not jnp.issubdtype(zero.dtype, kind):
        raise ValueError(
            f"from_integers: zero is {zero.dtype} and values are {values.dtype}, but both must be "
            "signed or both unsigned; convert one of them."
        )
    return _qvalue("zero", zero, format)


def _qvalue(name: str, values: Any, format: Format) -> Array:
    """Integers as unsigned quantized values; concrete ones are checked, others clipped."""
    low = -format.offset if jnp.issubdtype(values.dtype, jnp.signedinteger) else 0
    high = low + 2**format.bits - 1
    if values.dtype.itemsize < 4:
        values = values.astype(jnp.int32)
    if values.size and not isinstance(values, Tracer):
        with jax.ensure_compile_time_eval():  # they may be constants of a traced function
            least, most = int(values.min()), int(values.max())
        if least < low or most > high:
            raise ValueError(
                f"from_integers: {name} reaches from {least} to {most}, but {format.bits} bits "
                f"represent {low} to {high}; use a wider format."
            )
    return _counted(indexing.saturated(values), low, high)


# A separate program outside of `jax.jit`, inlined inside.
@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _counted(values: Array, low: int, high: int) -> Array:
    """Integers clipped to a range, minus its lower end."""
    return (jnp.clip(values, low, high) - low).astype(jnp.uint8)
