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
    packed: Array, scale: Array, zero: Array | None, index: Array | None, format: Format
) -> Stored:
    """The arrays of a stack with leading axes flattened; 8-bit scales may be given as bits."""
    index = None if index is None else index.reshape(-1)
    count = math.prod(packed.shape[:-3])
    packed = packed.reshape(count, *packed.shape[-3:])
    scale = of_codes(scale, format)
    scale = scale.reshape(count, *scale.shape[-3:])
    zero = None if zero is None else zero.reshape(count, *zero.shape[-3:])
    return Stored(format, packed, scale, zero, None, index)


def stored_weight(weight: QuantizedArray, dtype: jnp.dtype) -> Stored:
    """A weight with its tensor scale as `unit`, for lhs of a dtype."""
    scale, zero = as_read(weight.scale, weight.zero, weight.format, dtype)
    arrays = stored(weight.packed, scale, zero, weight.index, weight.format)
    if weight.tensor_scale is None:
        return arrays
    channels = weight.tensor_scale.shape[-1:] if weight.format.scales_channels else ()
    return dataclasses.replace(arrays, unit=weight.tensor_scale.reshape(-1, *channels))


def as_read(
    scale: Array, zero: Array | None, format: Format, lhs: jnp.dtype
) -> tuple[Array, Array | None]:
    """Scales and float zeros, converted exactly to the dtype that kernels read: 8 bits, the dtype
    of lhs, or float32."""
    if format.scale is not None or scale.dtype == lhs:
        return scale, zero
    if zero is not None and format.zero == "float":
        zero = zero.astype(jnp.float32)
    return scale.astype(jnp.float32), zero


class Call:
    """A custom call under construction.

    A place identifies a buffer: `operand` and `result` return places, products and steps take them.
    """

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._operands: list[Array] = []
        self._results: list[jax.ShapeDtypeStruct] = []
        self._products: list[list[int]] = []
        self._codebooks: list[np.ndarray] = []
        self._steps: list[list[int]] = []
        self._sums = 0  # bytes of the partial sums of one product
        self._used: set[int] = set()  # places of products and steps

    def operand(self, array: Array) -> int:
        self._operands.append(array)
        return len(self._operands)

    def result(self, shape: Sequence[Any], dtype: Any) -> int:
        self._results.append(jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)))
        return -len(self._results)

    def at(self, place: int) -> Any:
        """The array, or the shape and dtype, at a place."""
        return self._operands[place - 1] if place > 0 else self._results[-place - 1]

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
        (batch, m, columns), columns_out = self.at(lhs).shape, self.at(out).shape[-1]
        n, k = (columns, columns_out) if transposed else (columns_out, columns)
        given = {"zero": weight.zero, "unit": weight.unit, "index": weight.index}
        places = {"lhs": lhs, "out": out, "lhs_scale": lhs_scale, **(addends or {})}
        places |= {"packed": self.operand(weight.packed), "scale": self.operand(weight.scale)}
        places |= {name: self.operand(x) for name, x in given.items() if x is not None}
        if permutation is not None:
            places["permutation"], places["gathered"] = permutation
            fields["permuted_parts"] = self.at(permutation[0]).shape[0]
        if weight.unit is not None:
            fields["units"] = math.prod(weight.unit.shape[1:])
        for name, place in (addends or {}).items():
            fields[name] = str(self.at(place).dtype)
        if format.values:
            self._codebooks.append(np.array(format.values, np.float32))
        sizes = {"batch": batch, "m": m, "num_weights": weight.packed.shape[0]}  # may be symbolic
        record = ffi.product(
            **{name: size if isinstance(size, int) else -1 for name, size in sizes.items()},
            n=n,
            k=k,
            lhs=str(self.at(lhs).dtype),
            scale=str(weight.scale.dtype),
            out=str(self.at(out).dtype),
            transposed=transposed,
            gated=gated,
            **format_fields(format),
            **fields,
            **{f"{name}_at": place for name, place in places.items()},
        )
        self._products.append(record)
        rows = batch * (2 if gated else 1)
        self._sums = max(self._sums, workspace_bytes(rows, m, columns_out))
        self._used |= {place for name, place in places.items() if name != "gathered"}
        return len(self._products) - 1

    def step(self, kind: str, **fields: Any) -> None:
        """Appends a step (`xla_ffi/call.def`)."""
        self._steps.append(ffi.step(kind=kind, **fields))
        names = ("x", "addend", "scales", "total", "out", "out_scale")
        self._used |= {fields.get(name, 0) for name in names}

    def multiply(self, *products: int) -> None:
        """Appends a step that multiplies consecutive products."""
        self.step("multiply", first=products[0], count=len(products))

    def run(
        self,
        target: str = SEQUENCE_TARGET,
        *,
        sums: int = 0,
        workspace: bool = True,
        aliases: dict[int, int] | None = None,
        **attributes: Any,
    ) -> list[Array]:
        """The results of the call, without its workspace.

        - `sums`: bytes of partial sums, if another step needs more than the products.
        - `aliases`: operands that results overwrite, as in `jax.ffi.ffi_call`.
        - `attributes`: further attributes of the call.
        """
        results = [*self._results]
        if workspace:
            results.append(jax.ShapeDtypeStruct((self._workspace(sums),), jnp.uint8))
        lists = {"products": self._products, "steps": self._steps}
        attributes |= {name: np.array(x, np.int64).reshape(-1) for name, x in lists.items() if x}
        if self._codebooks:
            attributes["numbers"] = np.concatenate(self._codebooks)
        call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
        outs = call(*self._operands, **versions(self._caller), **attributes)
        return [*outs[: len(self._results)]]

    def _workspace(self, sums: int) -> int:
        """Bytes for partial sums, and for copies of buffers that kernels cannot use directly.

        Slices that XLA fuses into a call may be unaligned, and a result may overlap an operand: the
        handler copies such buffers through the workspace (`cuda/placement.h`). Packed weights are
        not copied.
        """
        limit, unit = ffi.MAX_WORKSPACE_BYTES, ffi.PLACE_ALIGNMENT
        sizes = [max(sums, self._sums)]
        for place in self._used - {0}:
            x = self.at(place)
            if x.dtype != jnp.uint32:
                sizes.append(-(-math.prod(x.shape) * x.dtype.itemsize // unit) * unit)
        return min(limit, sum(sizes)) if all(isinstance(size, int) for size in sizes) else limit


def format_fields(format: Format) -> dict[str, Any]:
    """The fields of a product that its format determines (groups above 2^62 are equivalent)."""
    return {
        "bits": format.bits,
        "group_size": min(format.group_size, 2**62),
        "codebook": ffi.codebook(format.values),
        "zero": format.zero,
    }


def versions(caller: str) -> dict[str, Any]:
    """Attributes of every call: the function that errors name, and the versions that the library
    must have to run it."""
    numbers = {"schema": np.int64(ffi.SCHEMA), "layout_version": np.int64(layout.VERSION)}
    return {"caller": caller, **numbers}


def apart(*arrays: Array) -> Sequence[Array]:
    """Gives activations and results of a call separate buffers.

    XLA fuses slices of operands and updates with results into a call, but never across a barrier.
    Without it, slices in a loop begin at another alignment each time, so that the handler launches
    other kernels, and a captured graph cannot be updated to a different number of kernels.
    """
    return [lax.optimization_barrier(array) for array in arrays]


def workspace_bytes(batch: Any, m: Any, columns: int) -> int:
    """Bytes for the float32 partial sums of every split that the selection may choose.

    The bound does not depend on a device, and m may be symbolic, so exported programs contain it.
    """
    if not all(isinstance(size, int) for size in (batch, m)):
        return ffi.MAX_WORKSPACE_BYTES
    return ffi.max_partial_sums_bytes(batch * m, columns)


NO_NARROW_SCALES = "its kernels read scales of 16 or 32 bits, the format has 8-bit ones"
NO_CODEBOOK = "its kernels read integers, the format has a codebook"


def unsupported_lhs(dtype: Any) -> str:
    """The error for an lhs with a dtype that kernels do not support."""
    return f"its kernels take lhs of {one_of(FLOATS)}, this one is {dtype}"


def one_of(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"
