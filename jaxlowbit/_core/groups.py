"""`Groups`: steps shared by quantizers, from a weight to its groups and to packed words."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from . import checks, layout, padding, permutations, scales
from .array import QuantizedArray
from .format import Format


@dataclasses.dataclass(frozen=True)
class Groups:
    """A weight, split into the groups that share a scale.

    A quantizer calls `Groups.of`, chooses a scale (and zero) per group and returns
    `pack(scale, zero)`. This class handles padding, shards, row order and tensor scales.

    - `values`: float32 (..., groups, size, n), the weight, divided by its tensor scale if the
      format has one. Rows that fill the last group repeat the row before.
    - `counted`: bool (groups, size, 1), False for rows of padding.
    - `format`: the target format.
    - `scale_dtype`: the dtype of scales and float zeros.

    ```python
    def narrow(weight, format, statistics, **options):
        groups = Groups.of(weight, format, **options)
        low, high = groups.extremes()
        return groups.pack(*groups.fit(0.9 * low, 0.9 * high))

    q = quantize(jnp.ones((256, 512)), INT4, quantizer=narrow)
    ```
    """

    values: Array
    counted: np.ndarray
    format: Format
    scale_dtype: Any
    _tensor_scale: Array | None
    _shape: tuple[int, ...]
    _shards: tuple[int, int]
    _permutation: Array | None

    @classmethod
    def of(
        cls,
        weight: Array,
        format: Format,
        *,
        scale_dtype: Any = None,
        shards: tuple[int, int] = (1, 1),
        permutation: Array | None = None,
    ) -> "Groups":
        """Splits a weight into groups.

        **Arguments:** as for `jaxlowbit.quantize`, which must have checked them.
        """
        scale_dtype = scale_dtype_of(format, scale_dtype, weight)
        values = padding.spread(weight, -1, shards[1], layout.ATOM, mode="edge")
        values = _cut(values, format, shards[0], permutation)
        tensor_scale = None
        if format.has_tensor_scale:
            tensor_scale = scales.of_tensor(values, format)
            units = tensor_scale if format.scales_channels else tensor_scale[..., None]
            values = scales.ratio(values, units[..., None, None, :])
        groups, size = values.shape[-3:-1]
        # In each part of k, the rows after the matrix's are padding.
        part, rows = weight.shape[-2] // shards[0], np.arange(groups * size)
        padded = _padded(weight.shape[-2], format, shards[0])
        counted = (rows < padded) & (rows % (padded // shards[0]) < part)
        counted = counted.reshape(groups, size, 1)
        options = tensor_scale, weight.shape, shards, permutation
        return cls(values, counted, format, scale_dtype, *options)

    def per_row(self, values: Array) -> Array:
        """Values per input feature, (k,) or (..., k), as float32 (..., groups, size, 1)."""
        values = jnp.broadcast_to(values, self._shape[:-1])
        return _cut(values[..., None], self.format, self._shards[0], self._permutation)

    def moments(self, moments: Array) -> Array:
        """Second moments (k, k) or (..., k, k) of input features, as float32 (..., rows, rows) in
        the order of the rows of the groups; 0 for rows of padding."""
        k = self._shape[-2]
        numbers = self.per_row(jnp.arange(k, dtype=jnp.float32)).astype(jnp.int32)
        numbers = numbers.reshape(*self._shape[:-2], -1)
        counted = jnp.asarray(self.counted.ravel(), jnp.float32)
        if moments.ndim == 2 and self._permutation is None:
            numbers = numbers.reshape(-1, numbers.shape[-1])[0]
        moments = jnp.broadcast_to(moments, (*numbers.shape[:-1], k, k)).astype(jnp.float32)
        moments = jnp.take_along_axis(moments, numbers[..., :, None], axis=-2)
        moments = jnp.take_along_axis(moments, numbers[..., None, :], axis=-1)
        return moments * _outer(counted, moments.ndim)

    def blocks(self, moments: Array) -> Array:
        """Second moments within each group, float32 (..., groups, size, size), as `moments`."""
        found = self.moments(moments)
        count, size, _ = self.counted.shape
        found = found.reshape(*found.shape[:-2], count, size, count, size)
        return jnp.moveaxis(jnp.diagonal(found, axis1=-4, axis2=-2), -1, -3)

    def extremes(self) -> tuple[Array, Array]:
        """The smallest and the largest value of each group, float32 (..., groups, n)."""
        return scales.extremes(self.values, self.format)

    def fit(self, low: Array, high: Array) -> tuple[Array, Array | None]:
        """The scale, and zero if the format has one, whose quantized values cover a range.

        **Arguments:** `low`, `high`: float32 (..., groups, n).

        **Returns:** arrays (..., groups, n), the scale in `scale_dtype` (8-bit scales in float32).
        """
        return scales.fit(low, high, self.format, self.scale_dtype)

    def in_steps(self, scale: Array, zero: Array | None) -> tuple[Array, Array]:
        """Divides `values` by their scale: exactly, and rounded to the numbers of the format."""
        return scales.in_steps(self.values, scale, zero, self.format)

    def represented(self, scale: Array, zero: Array | None) -> tuple[Array, Array | None]:
        """Scales and zeros from `fit`, rounded as `pack` stores them: scales in float32, zeros in
        their dtype (float32 for two levels)."""
        if self.format.two_levels:
            return scales.two_levels(scale, zero, self.format)[2:]
        return scale.astype(jnp.float32), zero

    def nearest(self, values: Array, scale: Array, zero: Array | None) -> Array:
        """Rounds values to the nearest numbers that scales and zeros represent, float32 (..., n).

        **Arguments:**

        - `values`: float32 (..., n), rows.
        - `scale`, `zero`: of the group of each row, (..., n), from `represented`.
        """
        _, steps = scales.in_steps(values[..., None, :], scale, zero, self.format)
        found = steps[..., 0, :] * scale
        if zero is None or self.format.zero != "float":
            return found
        return found + zero.astype(jnp.float32)

    def matrix(self, values: Array) -> Array:
        """Values (..., groups, size, n) as the matrix (..., k, n), times its tensor scale; without
        shards and a permutation."""
        *lead, groups, size, n = values.shape
        found = values.reshape(*lead, groups * size, n)[..., : self._shape[-2], :]
        if self._tensor_scale is None:
            return found
        channels = self.format.scales_channels
        unit = self._tensor_scale if channels else self._tensor_scale[..., None]
        return found * unit[..., None, :]

    def pack(
        self, scale: Array, zero: Array | None = None, values: Array | None = None
    ) -> QuantizedArray:
        """Rounds values to the nearest that the scales and zeros represent, and packs them.

        **Arguments:**

        - `scale`, `zero`: as `fit` returns them.
        - `values`: the values to round, such as weights that compensate errors of others; None for
          `self.values`.

        **Returns:** the quantized array.
        """
        format, (k, n) = self.format, self._shape[-2:]
        values = self.values if values is None else values
        stored, stored_zero = scales.stored(scale, format), zero
        if format.two_levels:
            stored, stored_zero, scale, zero = scales.two_levels(scale, zero, format)
        qvalue = scales.qvalue(values, scale, zero, format)
        *lead, groups, size, columns = qvalue.shape
        qvalue = qvalue.reshape(*lead, groups * size, columns)
        qvalue = qvalue[..., : _padded(k, format, self._shards[0]), :]
        tensor_scale = self._tensor_scale
        if tensor_scale is not None and format.scales_channels:
            tensor_scale = padding.join(tensor_scale, -1, self._shards[1], n)
        return QuantizedArray.from_packed_groups(
            qvalue,
            stored,
            stored_zero,
            format=format,
            k=k,
            n=n,
            shards=self._shards,
            permutation=self._permutation,
            tensor_scale=tensor_scale,
        )


def _outer(values: Array, ndim: int) -> Array:
    """The products of each two of some values (n,), (..., n, n) with `ndim` axes."""
    lead = (1,) * (ndim - 2)
    return (values[:, None] * values[None]).reshape(*lead, len(values), len(values))


def scale_dtype_of(format: Format, given: Any, weight: Array) -> Any:
    """The dtype that scales are rounded to.

    **Raises:** `ValueError` if a dtype is given but the format names one.
    """
    if given is not None and format.scale is not None:
        raise ValueError(
            f"quantize: scale_dtype is {checks.brief(given)}, but the format has {format.scale} "
            "scales; leave scale_dtype out, or scale out of the format."
        )
    if format.two_levels:
        return jnp.dtype("float32")  # rounded to two levels afterwards
    if format.scale is not None:
        return format.scale_dtype
    return checks.dtype("quantize", "scale_dtype", weight.dtype if given is None else given)


def _padded(k: int, format: Format, shards: int) -> int:
    """The rows of a matrix, including the padding of each shard."""
    return padding.spread_size(k, shards, format.shard_unit)


def _cut(values: Array, format: Format, shards: int, permutation: Array | None) -> Array:
    """Values (..., k, n) as float32 (..., groups, size, n), rows in the order of `permutation`."""
    if permutation is not None:
        values = permutations.permute(values, permutation, shards, axis=-2)
    unit = format.shard_unit
    values = padding.spread(values, -2, shards, unit, mode="edge")
    *lead, k, n = values.shape
    size = k if format.group_size == -1 else min(format.group_size, k)
    groups = -(-k // size)
    # Repeating the last row fills the last group without moving its extremes.
    pad = [(0, 0)] * len(lead) + [(0, groups * size - k), (0, 0)]
    grouped = jnp.pad(values.astype(jnp.float32), pad, mode="edge")
    return grouped.reshape(*lead, groups, size, n)
