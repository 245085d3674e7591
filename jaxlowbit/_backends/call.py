"""Custom calls: targets, operands of weights, and the builder of a call's products and steps.

A call is a sequence of steps over numbered buffers (`xla_ffi/call.h`). The compiled library lists
the fields of products and steps; this file does not depend on their order.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._core import layout
from .._core.activations import EXACT, VALUES
from .._core.array import QuantizedArray
from .._core.dequantize import of_codes
from .._core.dtypes import FLOATS
from .._core.format import Format
from .extension import ffi

SEQUENCE_TARGET = "jaxlowbit_sequence"
ATTEND_TARGET = "jaxlowbit_attend"  # CPU only; on CUDA attention is a step
TIMES_TARGET = "jaxlowbit_times"

DISABLED_EXPORT_CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(target)
    for target in (SEQUENCE_TARGET, ATTEND_TARGET)
)
"""The `disabled_checks` that make `jax.export.export` accept the custom calls.

JAX guarantees compatibility only for its own calls and requires others to be allowed by name. A
program exported by another version of the library raises when it runs.

```python
jax.export.export(jax.jit(lambda x, q: x @ q), disabled_checks=DISABLED_EXPORT_CHECKS)(x, q)
```
"""

VERSIONS = {"schema": np.int64(ffi.SCHEMA), "layout_version": np.int64(layout.VERSION)}
"""Versions that the library must have to run a call. These are attributes of every call, as is
`caller`, the name of the function for errors."""

INTERLEAVED = 16
"""Number of columns of 8-bit activations that are interleaved."""


def padded_columns(k: int) -> int:
    """The columns of 8-bit activations in a call: k, then zeros up to a multiple of 16."""
    return -(-k // INTERLEAVED) * INTERLEAVED


@dataclasses.dataclass(frozen=True)
class Stored:
    """The arrays of a weight, or of a stack, in the form that calls read.

    - `packed`: uint32 (weights, n_blocks, k_blocks, words).
    - `scale`, `zero`: (weights, n_blocks, scale_rows, 64); `zero` may be None.
    - `unit`: float32 (weights,), (weights, n) or (weights, n_blocks, 64), or None.
    - `index`: int32 (batch,), or None.
    """

    format: Format
    packed: Array
    scale: Array
    zero: Array | None
    unit: Array | None
    index: Array | None


def stored(
    packed: Array,
    scale: Array,
    zero: Array | None,
    index: Array | None,
    format: Format,
    lhs: Any = None,
) -> Stored:
    """The arrays of a stack with leading axes flattened; 8-bit scales may be given as bits.

    `lhs`: the dtype of lhs, or None to keep the dtype of scales. Kernels read scales (and float
    zeros) of 8 bits, of the dtype of lhs, or float32; others are converted to float32 exactly.
    """
    if format.scale is not None:
        scale = of_codes(scale, format)
    elif lhs is not None and scale.dtype != lhs:
        scale = scale.astype(jnp.float32)
        if zero is not None and format.zero == "float":
            zero = zero.astype(jnp.float32)
    index = None if index is None else index.reshape(-1)
    count = math.prod(packed.shape[:-3])
    packed = packed.reshape(count, *packed.shape[-3:])
    scale = scale.reshape(count, *scale.shape[-3:])
    zero = None if zero is None else zero.reshape(count, *zero.shape[-3:])
    return Stored(format, packed, scale, zero, None, index)


def stored_weight(weight: QuantizedArray, dtype: jnp.dtype) -> Stored:
    """A weight with its tensor scale as `unit`, for lhs of a dtype."""
    leaves = weight.packed, weight.scale, weight.zero, weight.index
    arrays = stored(*leaves, weight.format, dtype)
    if weight.tensor_scale is None:
        return arrays
    channels = weight.tensor_scale.shape[-1:] if weight.format.scales_channels else ()
    return dataclasses.replace(arrays, unit=weight.tensor_scale.reshape(-1, *channels))


def record(format: Format, lhs: Any, scale: Any, **fields: Any) -> list[int]:
    """Encodes a product (`cuda/product.def`), by default one row times an atom.

    - `lhs`: the dtype of lhs.
    - `scale`: the dtype of scales of 16 or 32 bits.
    - `fields`: further fields and places (groups above 2^62 are equivalent).
    """
    own = {
        "m": 1,
        "n": layout.ATOM,
        "k": layout.ATOM,
        "bits": format.bits,
        "group_size": min(format.group_size, 2**62),
        "codebook": "none" if format.codebook is None else ffi.codebook(format.values),
        "zero": format.zero,
        "lhs": str(lhs),
        "scale": format.scale if format.two_levels else str(format.scale_dtype or scale),
        "out": str(EXACT if lhs in VALUES else lhs),
    }
    return ffi.product(**own | fields)


@dataclasses.dataclass
class Call:
    """A custom call under construction; `caller` is the name of the function for errors.

    A place identifies a buffer: `operand` and `result` return places, products and steps take them.
    `at` contains the array, or the shape and dtype, at each place.
    """

    caller: str
    at: dict[int, Any] = dataclasses.field(default_factory=dict)
    _operands: list[Array] = dataclasses.field(default_factory=list)
    _results: list[jax.ShapeDtypeStruct] = dataclasses.field(default_factory=list)
    _products: list[list[int]] = dataclasses.field(default_factory=list)
    _codebooks: list[np.ndarray] = dataclasses.field(default_factory=list)
    _steps: list[list[int]] = dataclasses.field(default_factory=list)
    _sums: int = 0  # bytes of the partial sums of one product
    _used: set[int] = dataclasses.field(default_factory=set)  # places of products and steps

    def operand(self, array: Array) -> int:
        self._operands.append(array)
        self.at[len(self._operands)] = array
        return len(self._operands)

    def result(self, shape: Sequence[Any], dtype: Any) -> int:
        self._results.append(jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)))
        self.at[-len(self._results)] = self._results[-1]
        return -len(self._results)

    def add_product(
        self,
        weight: Stored,
        lhs: int,
        out: int,
        *,
        transposed: bool = False,
        gated: bool = False,
        addends: Mapping[str, int] | None = None,
        lhs_scale: int = 0,
        permutation: tuple[int, int] | None = None,
        **fields: Any,
    ) -> int:
        """Appends a product for a step to multiply, and returns its number.

        - `lhs`, `out`: places of (batch, m, columns).
        - `addends`: places of `bias` and `residual`.
        - `permutation`: the places of the order of the stored rows, s32 (parts, k / parts), and of
          the gathered lhs.
        - `fields`: further fields of `cuda/product.def`.
        """
        format = weight.format
        (batch, m, columns), columns_out = self.at[lhs].shape, self.at[out].shape[-1]
        n, k = (columns, columns_out) if transposed else (columns_out, columns)
        given = {"zero": weight.zero, "unit": weight.unit, "index": weight.index}
        places = {"lhs": lhs, "out": out, "lhs_scale": lhs_scale, **(addends or {})}
        places |= {"packed": self.operand(weight.packed), "scale": self.operand(weight.scale)}
        places |= {name: self.operand(x) for name, x in given.items() if x is not None}
        if permutation is not None:
            places["permutation"], places["gathered"] = permutation
            fields["permuted_parts"] = self.at[permutation[0]].shape[0]
        if weight.unit is not None:
            fields["units"] = math.prod(weight.unit.shape[1:])
        for name, place in (addends or {}).items():
            fields[name] = str(self.at[place].dtype)
        if format.codebook is not None:
            self._codebooks.append(np.array(format.values, np.float32))
        sizes = {"batch": batch, "m": m, "num_weights": weight.packed.shape[0]}  # may be symbolic
        product = record(
            *(format, self.at[lhs].dtype, weight.scale.dtype),
            **{name: size if isinstance(size, int) else -1 for name, size in sizes.items()},
            n=n,
            k=k,
            out=str(self.at[out].dtype),
            transposed=transposed,
            gated=gated,
            **fields,
            **{f"{name}_at": place for name, place in places.items()},
        )
        self._products.append(product)
        self._sums = max(self._sums, ffi.partial_sums_bytes(product))
        self._used |= {place for name, place in places.items() if name != "gathered"}
        return len(self._products) - 1

    def step(self, kind: str, **fields: Any) -> None:
        """Appends a step (`xla_ffi/call.def`)."""
        self._steps.append(ffi.step(kind=kind, **fields))
        numbers = ("first", "count", "to", "normalized")
        self._used |= {place for name, place in fields.items() if name not in numbers}

    def multiply(self, *products: int) -> None:
        """Appends a step that multiplies consecutive products."""
        step = ffi.step(kind="multiply", first=products[0], count=len(products))
        self._steps.append(step)

    def run(
        self,
        target: str = SEQUENCE_TARGET,
        *,
        sums: int = 0,
        workspace: bool = True,
        aliases: dict[int, int] | None = None,
        custom_call: Any = None,
        **attributes: Any,
    ) -> list[Array]:
        """The results of the call, without its workspace.

        The workspace is for partial sums, and for copies of buffers that kernels cannot use
        directly: slices that XLA fuses into a call may be unaligned, and a result may overlap an
        operand (`cuda/plan.h`). Packed weights are not copied.

        - `sums`: bytes of partial sums, if another step needs more than the products.
        - `aliases`: operands that results overwrite, as in `jax.ffi.ffi_call`.
        - `custom_call`: a replacement of `jax.ffi.ffi_call`.
        - `attributes`: further attributes of the call.
        """
        results = [*self._results]
        if workspace:
            limit, unit = ffi.MAX_WORKSPACE_BYTES, ffi.PLACE_ALIGNMENT
            used = [x for place in self._used - {0} if (x := self.at[place]).dtype != jnp.uint32]
            copies = (-(-math.prod(x.shape) * x.dtype.itemsize // unit) * unit for x in used)
            sizes = [max(sums, self._sums), *copies]
            known = all(isinstance(size, int) for size in sizes)
            size = min(limit, sum(sizes)) if known else limit
            results.append(jax.ShapeDtypeStruct((size,), jnp.uint8))
        lists = {"products": self._products, "steps": self._steps}
        attributes |= {name: np.array(x, np.int64).reshape(-1) for name, x in lists.items() if x}
        if self._codebooks:
            attributes["numbers"] = np.concatenate(self._codebooks)
        custom_call = custom_call or jax.ffi.ffi_call
        call = custom_call(target, results, input_output_aliases=aliases)
        outs = call(*self._operands, caller=self.caller, **VERSIONS, **attributes)
        return [*outs[: len(self._results)]]

    def place_of(self, operand: Array) -> int:
        return next(place for place, array in self.at.items() if array is operand)


def apart(*arrays: Array) -> Sequence[Array]:
    """Gives activations and results of a call separate buffers.

    XLA fuses slices of operands and updates with results into a call, but never across a barrier.
    Without it, slices in a loop begin at another alignment each time, so that the handler launches
    other kernels, and a captured graph cannot be updated to a different number of kernels.
    """
    return [lax.optimization_barrier(array) for array in arrays]


NO_NARROW_SCALES = "its kernels read scales of 16 or 32 bits, the format has 8-bit ones"
NO_CODEBOOK = "its kernels read integers, the format has a codebook"


def unsupported_lhs(dtype: Any) -> str:
    """The error for an lhs with a dtype that kernels do not support."""
    return f"its kernels take lhs of {one_of(FLOATS)}, this one is {dtype}"


def one_of(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"
