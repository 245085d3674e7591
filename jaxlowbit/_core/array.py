"""`QuantizedArray`: the pytree that represents a quantized matrix."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from . import (
    arraylike,
    checks,
    indexing,
    integers,
    layout,
    padding,
    permutations,
    qarray,
    scales,
    sharding,
    super_blocks,
    versions,
)
from .dequantize import codes_of, dequantize, in_units, of_codes, per_row, take
from .dtypes import FLOATS
from .format import Format, as_format

LEAVES = ("packed", "scale", "zero", "index", "permutation", "version", "tensor_scale")
_KEYS = tuple(map(jax.tree_util.GetAttrKey, LEAVES))


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedArray:
    """A (..., k, n) matrix with 1 to 8 bits per element, packed in the order that kernels read.

    Made by `quantize` or `QuantizedArray.from_integers`; `dequantize()` defines the floats. A
    pytree: the arrays below are leaves, the other fields are static. Leading axes (layers, experts)
    are the leading axes of every leaf, so `jax.vmap` and `jax.lax.scan` map over them.

    `x @ q` multiplies. `np.asarray(q)`, `jnp.asarray(q)` and `q == other` use the floats of
    `dequantize()`; other operators and functions of `jax.numpy` raise.

    Invariants, with n_blocks = ceil(n / 64), k_blocks = ceil(k / 64):

    - `packed`: uint32 (..., n_blocks, k_blocks, 128 * bits), `docs/layout.md`.
    - `scale`: float32, bfloat16 or float16, or the dtype of 8-bit scales, (..., n_blocks, groups,
      64), with groups for the padded k; finite in the padding. Integer scales, int8, are from 0 to
      `format.max_scale`. Two-level scales have, instead of groups, rows of bytes: the integers of
      the groups and the floats of each super-block (`docs/layout.md`).
    - `zero`: None, uint8 (`zero="integer"`) or the dtype of scale (`zero="float"`), same shape.
    - `index`: None, or int32: this array is a view of a stack (see `select`).
    - `permutation`: None, or int32 (..., k): stored row r is row `permutation[r]` of the matrix, so
      `lhs @ array` is `lhs[..., permutation]` times the stored rows. With shards of k, positions
      count from the start of their shard.
    - `version`: uint32 (...), the layout version, so that a library with another bit order does
      not read the words.
    - `tensor_scale`: None, or float32 (...), the factor of each matrix (`scale="e4m3"`), or (...,
      n), of each channel (`scale="int8"`).
    - `shards`: the number of equal parts of k and n that are padded separately (see `quantize`);
      with several, k and n above include the padding.

    Inside `jax.shard_map`, an array represents the part with the words of this device: `k`, `n` and
    `shards` describe that part, and `whole` describes the whole matrix.

    **Raises:** `ValueError` if shapes, dtypes or the version do not agree, and for an invalid
    permutation.
    """

    packed: Array
    scale: Array
    zero: Array | None
    index: Array | None
    version: Array
    format: Format
    k: int
    n: int
    shards: tuple[int, int] = (1, 1)
    whole: tuple[int, int, tuple[int, int]] | None = None
    permutation: Array | None = None
    tensor_scale: Array | None = None

    # `_matmul/api.py` sets this to `quantized_matmul`, so this module does not depend on products.
    _multiply: ClassVar[Callable[[Any, "QuantizedArray"], Array]]

    def __post_init__(self) -> None:
        for name in ("packed", "scale", "version"):
            checks.shaped("QuantizedArray", name, getattr(self, name))
        if not isinstance(self.format, Format):
            as_format("QuantizedArray", None)
        versions.check(self.version)  # first, since words of another version may have other shapes
        stack = self.packed.shape[:-3]
        words, groups = super_blocks.stored_shapes(*self.padded_shape, self.format)
        groups = (*stack, *groups)
        zero_dtype = {"none": None, "integer": jnp.dtype("uint8"), "float": self.scale.dtype}
        _check("packed", self.packed, (*stack, *words), jnp.dtype("uint32"))
        narrow = self.format.scale_dtype
        if narrow is None and self.scale.dtype not in FLOATS:
            raise ValueError(
                f"QuantizedArray: scale has dtype {self.scale.dtype}, but it must be float32, "
                "bfloat16 or float16; cast it."
            )
        _check("scale", self.scale, groups, narrow or self.scale.dtype)
        if (self.tensor_scale is not None) != self.format.has_tensor_scale:
            raise ValueError(
                f"QuantizedArray: format.scale is {self.format.scale!r}, but the tensor scale is "
                f"{'missing' if self.tensor_scale is None else 'given'}; make the two agree."
            )
        if self.tensor_scale is not None:
            channels = (self.n,) if self.format.scales_channels else ()
            _check("tensor_scale", self.tensor_scale, (*stack, *channels), jnp.dtype("float32"))
        if (self.zero is None) != (self.format.zero == "none"):
            raise ValueError(
                f"QuantizedArray: format.zero is {self.format.zero!r}, but the zero array is "
                f"{'missing' if self.zero is None else 'given'}; make the two agree."
            )
        if self.zero is not None:
            _check("zero", self.zero, groups, zero_dtype[self.format.zero])
        if self.index is not None:
            _check("index", self.index, self.index.shape, jnp.dtype("int32"))
            if len(stack) != 1:
                raise ValueError(
                    f"QuantizedArray: an index selects along one stacked axis, but there are "
                    f"{len(stack)} (shape {stack}); reshape the stack to one axis."
                )
        _check("version", self.version, stack, jnp.dtype("uint32"))
        if self.permutation is not None:
            _check("permutation", self.permutation, (*stack, self.k), jnp.dtype("int32"))
            self.check_permutation()

    def check_words(self) -> None:
        """Raises unless products can read the words.

        **Raises:** `ValueError`, with the value found, for another layout version (hidden while
        tracing), for words or 8-bit scales that were cast with floats, and for words that are not a
        whole shard of the matrix, since `shard_map` may cut them anywhere.
        """
        narrow = getattr(self.format, "scale_dtype", None)
        found = getattr(self.scale, "dtype", narrow)
        if narrow is not None and found != narrow:
            raise arraylike.cast_scale(found, self.format)
        for name, leaf in (("packed", self.packed), ("version", self.version)):
            found = getattr(leaf, "dtype", np.dtype("uint32"))
            if jnp.issubdtype(found, jnp.floating):
                raise arraylike.cast_words(name, found)
        if not isinstance(self.version, Tracer):
            versions.check(self.version)
        size, unit = self.format.group_size, self.format.shard_unit
        words, groups = super_blocks.stored_shapes(*self.padded_shape, self.format)
        if (self.packed.shape[-3:], self.scale.shape[-3:]) != (words, groups):
            raise ValueError(
                f"QuantizedArray: packed {self.packed.shape} and scale {self.scale.shape} are no "
                f"whole part of a ({self.k}, {self.n}) matrix in groups of {size}; shard k in "
                f"multiples of {unit} and n of {layout.ATOM}, or quantize with shards=(shards of "
                "k, shards of n)."
            )
        if self.permutation is None or self.whole is None:
            return
        k, _, (shards, _) = self.whole
        if self.permutation.shape[-1] != self.k or k // self.k * self.shards[0] != shards:
            raise ValueError(
                f"QuantizedArray: the rows are permuted within {shards} parts of k={k}, but a part "
                f"here has {self.k} of them, so its activations are on other devices; "
                f"quantize with shards=({k // self.k}, shards of n), which permutes each part."
            )

    def check_permutation(self) -> None:
        """Raises if the permutation is not a permutation of the rows. Does nothing while tracing.

        **Raises:** `ValueError` with the first value that is out of range or repeated.
        """
        if self.permutation is not None:
            permutations.check_values("QuantizedArray", self.permutation, self.shards[0])

    @property
    def padded_shape(self) -> tuple[int, int]:
        """k and n with the padding of each shard; without padding if there is only one."""
        unit = self.format.shard_unit
        return (
            padding.spread_size(self.k, self.shards[0], unit),
            padding.spread_size(self.n, self.shards[1], layout.ATOM),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, (..., k, n)."""
        lead = self.packed.shape[:-3] if self.index is None else self.index.shape
        return (*lead, self.k, self.n)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """The default dtype of `dequantize()`: the scales' dtype, bfloat16 for 8-bit scales."""
        return self.scale.dtype if self.format.scale is None else jnp.dtype("bfloat16")

    @property
    def unit(self) -> Array | None:
        """The tensor scale, broadcastable to padded matrices, or None: (..., 1, 1), or
        (..., 1, n) with one per channel."""
        unit = self.tensor_scale
        if unit is None:
            return None
        if self.index is not None:
            unit = unit[indexing.positions(self.index, unit.shape[0])]
        if not self.format.scales_channels:
            return unit[..., None, None]
        return padding.spread(unit, -1, self.shards[1], layout.ATOM)[..., None, :]

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the leaves; for a view, of the whole stack."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def dequantize(self, dtype: Any = None) -> Array:
        """Returns the matrix (..., k, n) as floats, computed in float32 and rounded once.

        **Arguments:** `dtype`: the float dtype of the result; None for the dtype of the scales.

        **Raises:** `TypeError` if `dtype` is not a dtype, `ValueError` for integers.
        """
        if dtype is not None:
            dtype = checks.float_dtype("QuantizedArray.dequantize", "dtype", dtype)
        self.check_words()
        packed, scale, zero = take(self.packed, codes_of(self.scale), self.zero, self.index)
        k, n = self.padded_shape
        weight = dequantize(packed, scale, zero, format=self.format, k=k, n=n)
        weight = in_units(weight, self.unit)
        weight = padding.join(weight, -2, self.shards[0], self.k)
        weight = padding.join(weight, -1, self.shards[1], self.n)
        if self.permutation is not None:
            permutation = permutations.selected(self.permutation, self.index)
            weight = permutations.restore(weight, permutation, self.shards[0], axis=-2)
        return weight.astype(dtype or self.dtype)

    def __getitem__(self, key: Any) -> "QuantizedArray":
        """Indexes leading axes, as for an array; copies. See `select` for a view."""
        if self.index is not None:
            raise ValueError(
                "QuantizedArray: this is a view made by select and cannot be indexed again; "
                "index the stack."
            )
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > self.ndim - 2 or any(k is None or k is Ellipsis for k in keys):
            raise ValueError(
                f"QuantizedArray: index {key!r} goes beyond the leading axes "
                f"{self.shape[:-2]} of shape {self.shape}; name those only, or use dequantize()."
            )
        self.check_words()
        try:
            return jax.tree.map(lambda leaf: leaf[key], self)
        except (TypeError, IndexError, ValueError, OverflowError):
            raise TypeError(
                f"QuantizedArray: index {checks.brief(key)} does not fit the leading axes "
                f"{self.shape[:-2]} of shape {self.shape}; use integers, slices or arrays of "
                "integers, as for an array."
            ) from None

    def __iter__(self) -> Iterator["QuantizedArray"]:
        if self.ndim == 2:
            raise TypeError(
                f"QuantizedArray: a matrix of shape {self.shape} has no leading axis to iterate "
                "over; use dequantize() for its rows."
            )
        return (self[i] for i in range(self.shape[0]))

    def select(self, index: Any) -> "QuantizedArray":
        """A view of a stack (L, k, n) that kernels index on the device, without copying words.

        `stack.select(i)` equals `stack[i]`, shape (k, n), and `i` may be traced (a loop counter);
        an integer array of shape S selects a weight per element, shape (*S, k, n). As in
        `jax.lax.dynamic_index_in_dim`, negative indices count from the end, and indices out of
        range are clamped.

        **Raises:** `ValueError` if this is not a stack with one leading axis, if it is empty, or if
        `index` is not an integer array.
        """
        what = "an integer, or an array of them"
        index = checks.integers("QuantizedArray.select", "index", index, what)
        if not jnp.issubdtype(index.dtype, jnp.integer):
            raise ValueError(
                f"QuantizedArray.select: index has dtype {index.dtype}, but a position in the "
                "stack is an integer."
            )
        if self.index is not None or self.packed.ndim != 4:
            raise ValueError(
                f"QuantizedArray.select: shape {self.shape} is not a stack (L, k, n) with one "
                "leading axis; reshape the stack or index the other axes first."
            )
        self.check_words()
        if self.packed.shape[0] == 0 and index.size:
            raise ValueError(
                f"QuantizedArray.select: the stack of shape {self.shape} is empty, so there "
                "is nothing to select; index a stack of one matrix or more."
            )
        return self._with(index=indexing.saturated(index))

    def partition_spec(
        self, mesh: Any, *, k: Any = None, n: Any = None, lead: Any = ()
    ) -> "QuantizedArray":
        """The `jax.P` of each leaf, for a matrix sharded as `jax.P(*lead, k, n)` on `mesh`.

        A part must have whole atoms of 64 x 64, or be padded by `quantize(..., shards=...)`. Scales
        and zeros are sharded like their words. If a part of k ends inside a group, every device has
        all groups; if a permutation crosses parts of k, every device has all of it. The array may
        also be the result of `jax.eval_shape`.

        **Arguments:**

        - `mesh`: a `jax.sharding.Mesh` or `AbstractMesh`.
        - `k`, `n`: a mesh axis, a tuple of them, or None.
        - `lead`: one such entry for each leading axis, or fewer.

        **Returns:** a tree like the array, for `in_specs` of `jax.shard_map` and, converted to
        `NamedSharding`s, for `jax.device_put` and `jax.jit`.

        **Raises:** `TypeError` if `mesh` is not a mesh; `ValueError` for parts of k or n that cut
        an atom, for axes that the mesh does not have or that occur twice, and for a view made by
        `select`.

        ```python
        specs = q.partition_spec(mesh, n="model")
        q = jax.device_put(q, jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs))
        ```
        """
        return sharding.partition_spec(self, mesh, k=k, n=n, lead=lead)

    def __rmatmul__(self, lhs: Any) -> Array:
        return self._multiply(lhs, self)

    def __matmul__(self, rhs: Any) -> Array:
        raise arraylike.refused(self, "q @ x", "is the right operand of a product")

    def __eq__(self, other: Any) -> Any:
        """Compares the floats of `dequantize()`, element by element, as arrays do."""
        return arraylike.compared(self, other, operator.eq)

    def __ne__(self, other: Any) -> Any:
        return arraylike.compared(self, other, operator.ne)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return arraylike.words(self)

    def __str__(self) -> str:  # quoted in JAX's errors
        return f"{self!r}: x @ q multiplies by it, q.dequantize() gives its floats"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The floats of `dequantize()` on the host, for `np.asarray` and `jnp.asarray`."""
        return arraylike.on_host(self, dtype, copy)

    def __jax_array__(self) -> "QuantizedArray":
        # JAX calls this before each operator; a result that is not an array selects `__rmatmul__`.
        return self

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if ufunc is np.matmul and method == "__call__" and inputs[1] is self and not kwargs:
            return self.__rmatmul__(inputs[0])
        raise arraylike.refused(self, f"np.{ufunc.__name__}")

    __add__ = __radd__ = __sub__ = __rsub__ = arraylike.no_operator("+ or -")
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = arraylike.no_operator("* or /")
    __neg__ = __pow__ = __abs__ = arraylike.no_operator("- or ** or abs")
    __lt__ = __le__ = __gt__ = __ge__ = arraylike.no_operator("< or >")
    __float__ = __int__ = arraylike.no_operator("a conversion to a number")

    def __getattr__(self, name: str) -> Any:
        raise arraylike.missing(self, name)

    @classmethod
    def from_packed_groups(
        cls,
        qvalue: Array,
        scale: Array,
        zero: Array | None,
        *,
        format: Format,
        k: int | None = None,
        n: int | None = None,
        shards: tuple[int, int] = (1, 1),
        permutation: Array | None = None,
        tensor_scale: Array | None = None,
    ) -> "QuantizedArray":
        """Packs quantized values (..., k, n) with scale and zero (..., groups, n), unchecked.

        With shards, these include the padding of each shard (`padding.spread`), unlike the `k` and
        `n` arguments. Padded rows along k get the quantized value nearest to 0, regardless of
        `qvalue`.
        """
        *lead, rows, columns = qvalue.shape
        k, n = rows if k is None else k, columns if n is None else n
        packed, scale, zero = _packed(qvalue, scale, zero, format=format, k=k, shards=shards[0])
        array = cls(
            packed=packed,
            scale=scale,
            zero=zero,
            index=None,
            version=jnp.full(tuple(lead), layout.VERSION, jnp.uint32),
            format=format,
            k=k,
            n=n,
            shards=shards,
            tensor_scale=tensor_scale,
        )
        return array._with(permutation=permutation)

    @classmethod
    def from_integers(
        cls,
        values: Any,
        scale: Any,
        zero: Any = None,
        *,
        format: Format | str,
        shards: tuple[int, int] = (1, 1),
        permutation: Any = None,
        g_idx: Any = None,
        tensor_scale: Any = None,
        super_scale: Any = None,
    ) -> "QuantizedArray":
        """Packs integers that are already quantized (`jnp.int4`, `uint4`, `int8`, ...).

        **Arguments:**

        - `values`: integers (..., k, n). Signed ones are two's complement, `weight = value * scale`
          without a zero; unsigned ones need a zero, or a codebook that they index. For the codebook
          of an 8-bit float, floats of its dtype.
        - `scale`: finite floats (..., ceil(k / group_size), n), or (..., 1, n) for `group_size=-1`;
          8-bit scales in the format's dtype or as bits, uint8; with `format.scale="int8"`
          integers from 0 to `format.max_scale`, with `"two_level"` from -128 to 127, clipped to
          this range inside `jax.jit`.
        - `zero`: None, integers in the same convention as `values` (`format.zero="integer"`) or
          floats to add (`"float"`, with unsigned values), with `format.scale="two_level"` integers
          from -128 to 127; the shape of `scale`.
        - `format`: the format, or its name; its width must fit every value, and a codebook must
          have a finite number for each.
        - `shards`: as for `quantize`; scale and zero then have the groups of each part of k, one
          part after the other.
        - `permutation`: None, or integers (..., k) or (k,), the storage order of the rows of
          `values`. Groups are consecutive in that order.
        - `g_idx`: None, or concrete integers (..., k) or (k,): the group of each row, as GPTQ's
          checkpoints with `desc_act` (`act-order`) store it. Determines the permutation: the rows
          of a group are stored consecutively, in their order in `values`; no permutation if they
          are consecutive in `values`. With shards, the rows of a part of k have its groups.
        - `tensor_scale`: None, or, with `format.scale="e4m3"`, finite floats (...), the factor of
          each matrix; with `"int8"` (..., n), the factor of each channel; or one number for all.
        - `super_scale`: None, or, with `format.scale="two_level"`, finite floats
          (..., ceil(k / 256), n), stored in float16, which multiply the integers of `scale`; with
          float zeros a pair: the second array multiplies the integers of `zero`. With shards, they
          have the super-blocks of each shard of k in turn.

        **Raises:** `ValueError` for wrong shapes or dtypes, for an invalid permutation, for a group
        in `g_idx` that does not have `format.group_size` rows (the last group: the rest),
        and, outside `jax.jit`, for values that do not fit the width (clipped inside) and for scales
        and float zeros that are not finite, before or after rounding to the dtype of the scales;
        `TypeError` for a traced `g_idx`.

        ```python
        q = jnp.array([[-8, 7]], jnp.int4)
        QuantizedArray.from_integers(q, jnp.ones((1, 2)), format=Format(bits=4))
        ```
        """
        format = as_format("from_integers", format)
        shards = checks.shard_counts("from_integers", shards)
        groups = integers.checked(
            values,
            scale,
            zero,
            format=format,
            shards=shards,
            permutation=permutation,
            g_idx=g_idx,
            tensor_scale=tensor_scale,
            super_scale=super_scale,
        )
        return cls.from_packed_groups(**groups._asdict(), format=format, shards=shards)

    @classmethod
    def from_blocks(
        cls,
        values: Any,
        scale: Any,
        *,
        block_size: tuple[int, int] = (128, 128),
        shards: tuple[int, int] = (1, 1),
        permutation: Any = None,
    ) -> "QuantizedArray":
        """Packs 8-bit floats with one scale per block of rows and columns.

        This is the format of DeepSeek-V3 checkpoints and of transformers' `FineGrainedFP8Config`;
        their weights are (n, k), so transpose values and scales. Each column of a block gets its
        scale, in groups of the block's rows: the weights are unchanged, and scales take 4 bytes per
        128 weights.

        **Arguments:**

        - `values`: float8_e4m3fn or float8_e5m2 (..., k, n).
        - `scale`: finite floats, or float8_e8m0fnu, (..., ceil(k / rows), ceil(n / columns)),
          `weight_scale_inv` in checkpoints: a weight is its value times this.
        - `block_size`: rows and columns of a block; rows must be a multiple of 16.
        - `shards`, `permutation`: as for `from_integers`.

        **Raises:** `TypeError` for arguments that are not arrays or sizes, `ValueError` for other
        dtypes and shapes, and the errors of `from_integers`.

        ```python
        weight, scale = jnp.ones((256, 384), jnp.float8_e4m3fn), jnp.ones((2, 3))  # (n, k)
        QuantizedArray.from_blocks(weight.T, scale.T)
        ```
        """
        with checks.within("from_blocks"):
            values, scale, format = integers.of_blocks(values, scale, block_size)
            options: Any = {"format": format, "shards": shards, "permutation": permutation}
            return cls.from_integers(values, scale, **options)

    @classmethod
    def from_qarray(cls, array: Any) -> "QuantizedArray":
        """Packs a `qwix.QArray` (..., k, n) of integers, exactly.

        **Arguments:** `array`: integers of up to 8 bits with scales, and perhaps zero points, in
        tiles along k whose size is a multiple of 16, or one tile for all of k.

        **Raises:** `TypeError` if `array` is not a QArray, `ValueError` for another qtype or
        tiling.

        ```python
        QuantizedArray.from_qarray(qwix.quantize(w, jnp.int4, channelwise_axes=[1]))
        ```
        """
        values, scale, zero, format = qarray.integers_of(array)
        return cls.from_integers(values, scale, zero, format=format)

    def to_qarray(self) -> Any:
        """Returns the same matrix as a `qwix.QArray` of signed integers, one per element.

        **Raises:** `ImportError` without qwix, `ValueError` for a float zero, for groups that do
        not divide k, and for groups of permuted rows.
        """
        return qarray.to_qarray(self)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        leaves, static = self.tree_flatten()
        return [*zip(_KEYS, leaves, strict=True)], static

    def tree_flatten(self) -> tuple[Any, Any]:
        leaves = tuple(getattr(self, name) for name in LEAVES)
        return leaves, (self.format, *(self.whole or (self.k, self.n, self.shards)))

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> "QuantizedArray":
        # Transformations unflatten with placeholders as leaves, so do not check here.
        format, k, n, shards = static
        fields = dict(zip(LEAVES, leaves, strict=True))
        fields |= {"format": format, "whole": (k, n, shards)}
        shape = getattr(leaves[0], "shape", None)
        if isinstance(shape, tuple) and len(shape) >= 3:
            unit = format.shard_unit
            k, k_shards = padding.part(k, shards[0], unit, shape[-2])
            n, n_shards = padding.part(n, shards[1], layout.ATOM, shape[-3])
            shards = (k_shards, n_shards)
        self = object.__new__(cls)
        vars(self).update(fields, k=k, n=n, shards=shards)
        return self

    def _with(self, **changes: Any) -> "QuantizedArray":
        """`dataclasses.replace` without checks, for fields that are checked or need none."""
        changed = object.__new__(type(self))
        vars(changed).update(vars(self) | changes)
        return changed


# A separate program outside of `jax.jit`, inlined inside.
@functools.partial(jax.jit, static_argnames=("format", "k", "shards"), inline=True)
def _packed(
    qvalue: Array, scale: Array, zero: Array | None, *, format: Format, k: int, shards: int
) -> tuple[Array, Array, Array | None]:
    """Returns words, scales and zeros in the layout of `QuantizedArray`."""
    rows = qvalue.shape[-2]
    _, (_, groups, _) = super_blocks.stored_shapes(rows, 1, format)
    scale = _pad(codes_of(scale), groups, "edge")
    zero = None if zero is None else _pad(zero, groups, "edge")
    rows = layout.blocks(rows) * layout.ATOM
    if rows > k:
        fill = scales.zero_qvalue(*super_blocks.expanded(scale, zero, format, rows))
        fill = per_row(fill, rows, format)
        padded = np.arange(rows) % (rows // shards) >= k // shards
        qvalue = jnp.where(padded[:, None], fill, _pad(qvalue, rows, "constant"))
    return (
        layout.pack(qvalue, format.bits),
        of_codes(layout.pack_groups(scale), format),
        None if zero is None else layout.pack_groups(zero),
    )


def _pad(values: Array, rows: int, mode: str) -> Array:
    """Pads values (..., r, n) to a number of rows."""
    pad = [(0, 0)] * (values.ndim - 2) + [(0, rows - values.shape[-2]), (0, 0)]
    return jnp.pad(values, pad, mode=mode)


def _check(name: str, array: Array, shape: tuple[int, ...], dtype: Any) -> None:
    if tuple(array.shape) != shape or array.dtype != dtype:
        raise ValueError(
            f"QuantizedArray: {name} is {array.dtype}{tuple(array.shape)}, but the other fields "
            f"ask for {dtype}{shape}; make it with quantize or from_integers."
        )
