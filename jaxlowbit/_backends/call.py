"""What custom calls have in common: targets, the operands of a weight, attributes, workspace."""

import dataclasses
import math
from collections.abc import Sequence
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
from .problem import Problem

MATMUL_TARGET = "jaxlowbit_quantized_matmul"
FUSED_TARGET = "jaxlowbit_quantized_matmul_fused"
ACTIVATIONS_TARGET = "jaxlowbit_quantized_activations"
ROUNDED_TARGET = "jaxlowbit_rounded_activations"
MATMULS_TARGET = "jaxlowbit_quantized_matmuls"
MLP_TARGET = "jaxlowbit_quantized_mlp"
BLOCK_TARGET = "jaxlowbit_quantized_block"
ROUNDED_BLOCK_TARGET = "jaxlowbit_rounded_block"
ATTEND_TARGET = "jaxlowbit_attend"  # of CUDA
ATTEND_QUERIES_TARGET = "jaxlowbit_attend_queries"  # of the CPU
DECODE_BLOCK_TARGET = "jaxlowbit_decode_block"
NORMALIZED_TARGET = "jaxlowbit_normalized"
TIMES_TARGET = "jaxlowbit_times"

EXPORT_CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(target)
    for target in (
        *(MATMUL_TARGET, FUSED_TARGET, MATMULS_TARGET, MLP_TARGET, BLOCK_TARGET, ATTEND_TARGET),
        *(ATTEND_QUERIES_TARGET, DECODE_BLOCK_TARGET, NORMALIZED_TARGET, ACTIVATIONS_TARGET),
        *(ROUNDED_TARGET, ROUNDED_BLOCK_TARGET),
    )
)
"""The `disabled_checks` with which `jax.export.export` accepts the custom calls.

JAX asks for them by name, since it vouches for its own calls alone. These carry their version, and
refuse a program of another one where it runs.

```python
jax.export.export(jax.jit(lambda x, q: x @ q), disabled_checks=EXPORT_CHECKS)(x, q)
```
"""

# In the order of ElementType and of ZeroKind (`cuda/types.h`).
_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn", "int8", "uint8")
_DTYPES += ("int32",)
_ZEROS = ("none", "integer", "float")


INTERLEAVED = 16
"""Columns of 8-bit activations that are interleaved."""


def padded_columns(k: int) -> int:
    """The columns of 8-bit activations, which zeros follow, as a call reads them."""
    return -(-k // INTERLEAVED) * INTERLEAVED


def call_operands(weight: QuantizedArray, dtype: jnp.dtype) -> tuple[Array, ...]:
    """The operands of a weight with its tensor scale, for `attributes_with_units`."""
    scale, zero = as_read(weight.scale, weight.zero, weight.format, dtype)
    packed, scale, zero, index = weight_operands(
        weight.packed, scale, zero, weight.index, weight.format
    )
    if weight.tensor_scale is not None:
        zero = _units(weight.tensor_scale, weight.format)
    return packed, scale, zero, index


def _units(tensor_scale: Array, format: Format) -> Array:
    """The tensor scales of a stack, float32 (weights,) or (weights, n).

    They stand in the place of zeros, which no format with tensor scales has.
    """
    channels = tensor_scale.shape[-1:] if format.scales_channels else ()
    return tensor_scale.reshape(-1, *channels)


def as_read(
    scale: Array, zero: Array | None, format: Format, lhs: jnp.dtype
) -> tuple[Array, Array | None]:
    """Scales and float zeros in the dtype in which kernels read them, exactly."""
    dtype = read_dtype(scale.dtype, format, lhs)
    if format.scale is not None or scale.dtype == dtype:
        return scale, zero
    if zero is not None and format.zero == "float":
        zero = zero.astype(dtype)
    return scale.astype(dtype), zero


def read_dtype(scale: jnp.dtype, format: Format, lhs: jnp.dtype) -> jnp.dtype:
    """The dtype in which kernels read scales: 8 bits, that of lhs, or else float32."""
    if format.scale_dtype is not None:
        return format.scale_dtype
    return lhs if scale == lhs else jnp.dtype(jnp.float32)


def weight_operands(
    packed: Array, scale: Array, zero: Array | None, index: Array | None, format: Format
) -> tuple[Array, ...]:
    """The operands of a custom call that follow lhs; 8-bit scales may be their bits."""
    num_weights = math.prod(packed.shape[:-3])
    scale = of_codes(scale, format)
    zero_dtype = jnp.uint8 if format.zero != "float" else scale.dtype
    return (
        packed.reshape(num_weights, *packed.shape[-3:]),
        scale.reshape(num_weights, *scale.shape[-3:]),
        jnp.zeros(0, zero_dtype) if zero is None else zero.reshape(num_weights, *zero.shape[-3:]),
        jnp.zeros(0, jnp.int32) if index is None else index.reshape(-1),
    )


def format_attributes(format: Format, prefix: str = "") -> dict[str, np.int64]:
    # Larger groups mean the same: no matrix has more rows.
    sizes = {"bits": format.bits, "group_size": min(format.group_size, 2**62)}
    return {prefix + name: np.int64(size) for name, size in sizes.items()}


def codebook_attributes(format: Format) -> dict[str, np.ndarray]:
    """The numbers of the codebook of all weights, which calls for integers do not have."""
    return {"codebook": np.array(format.values, np.float32)} if format.values else {}


def codebooks_attributes(formats: Sequence[Format]) -> dict[str, np.ndarray]:
    """The numbers of the codebooks of several weights; none if all are integers."""
    numbers = [np.array(format.values, np.float32) for format in formats]
    sizes = np.array([len(own) for own in numbers], np.int64)
    return {"codebook": np.concatenate(numbers), "codebook_sizes": sizes} if sizes.any() else {}


def product_attributes(problem: Problem, *, scale_sums: bool) -> dict[str, Any]:
    """The attributes of the custom call for one product."""
    return attributes(
        problem.format,
        **format_attributes(problem.format),
        **codebook_attributes(problem.format),
        transposed=problem.transposed,
        scale_sums=scale_sums,
        half_sums=problem.half_sums,
    )


@dataclasses.dataclass(frozen=True)
class Launch:
    """One product of a call, as far as its kernel depends on it."""

    format: Format
    batch: Any
    m: Any
    n: int
    k: int
    lhs: Any
    scale: Any
    out: Any
    permuted_parts: int = 0
    transposed: bool = False
    scale_sums: bool = False
    half_sums: bool = False
    gated: bool = False

    @property
    def may_lack_tile(self) -> bool:
        """Whether its tile may be one that the build lacks (`cuda/kernels/sm90/instances.h`)."""
        plain = self.format.bits == 4 and self.format.zero == "none" and self.lhs == jnp.bfloat16
        return not plain and isinstance(self.m, int) and self.m > 16

    def numbers(self) -> list[Any]:
        """The numbers that `xla_ffi/cuda_instantiate.cc` reads."""
        group_size = int(format_attributes(self.format)["group_size"])
        dtypes = [_DTYPES.index(str(jnp.dtype(x))) for x in (self.lhs, self.scale, self.out)]
        return [
            *(self.batch, self.m, self.n, self.k, self.format.bits, group_size, *dtypes),
            *(_ZEROS.index(self.format.zero), self.permuted_parts),
            *(self.transposed, self.scale_sums, self.half_sums, self.gated),
        ]


def launches(*products: Launch) -> dict[str, np.ndarray]:
    """The attribute by which kernels are compiled as soon as a program is; none if none must be.

    Some GPUs have kernels of the build for float32 scales and float zeros, Hopper has not, and not
    for all tiles of many rows. No build has those for codebooks and 8-bit scales.
    """
    numbers = [number for product in products for number in product.numbers()]
    compiled = [
        product.format.bits in ffi.COMPILED_BITS
        or product.format.codebook is not None
        or product.format.zero == "float"
        or product.scale != product.lhs
        or product.may_lack_tile
        for product in products
    ]
    if not any(compiled) or not all(isinstance(number, int) for number in numbers):
        return {}  # sizes may be symbolic
    return {"products": np.array(numbers, np.int64)}


def formats_attributes(weights: Sequence[QuantizedArray]) -> dict[str, np.ndarray]:
    """The attributes of a call that say the formats of several weights."""
    formats = [format_attributes(weight.format) for weight in weights]
    found: dict[str, np.ndarray] = {
        name: np.array([format[name] for format in formats]) for name in ("bits", "group_size")
    }
    return found | codebooks_attributes([weight.format for weight in weights])


def attributes(*formats: Format, **attributes: Any) -> dict[str, Any]:
    """The attributes of a call, with the versions that another version of the library refuses.

    `formats`: those of its weights.
    """
    versions = {"version": _call_version(formats), "layout_version": layout.VERSION}
    return {name: np.int64(version) for name, version in versions.items()} | attributes


def attributes_with_units(*formats: Format, **others: Any) -> dict[str, Any]:
    """`attributes` of a call that has the tensor scales of its weights, if there are any."""
    found = attributes(*formats, **others)
    if any(format.has_tensor_scale for format in formats):
        found["version"] = np.int64(ffi.UNIT_CALL_VERSION)
    return found


def _call_version(formats: Sequence[Format]) -> int:
    """The lowest version that says what a call needs, so that earlier releases run others."""
    if any(format.scale == "super" for format in formats):
        return ffi.SUPER_SCALE_CALL_VERSION
    if any(format.scale is not None for format in formats):
        return ffi.NARROW_SCALE_CALL_VERSION
    if any(format.codebook is not None for format in formats):
        return ffi.CODEBOOK_CALL_VERSION
    return ffi.CALL_VERSION


def workspace(
    sums: int, results: Sequence[jax.ShapeDtypeStruct], operands: Sequence[Array]
) -> jax.ShapeDtypeStruct:
    """The workspace of a call: partial sums, and copies of buffers that kernels cannot use.

    Slices that XLA fuses into a call begin at any element, and a result may lie over an operand.
    Such buffers are copied by way of the workspace (`cuda/placement.h`).
    """
    buffers = (x for x in (*results, *operands) if x.dtype != jnp.uint32)  # weights stay in place
    sizes = [sums, *(_placed_bytes(x.shape, x.dtype) for x in buffers)]
    limit = ffi.MAX_WORKSPACE_BYTES
    bound = min(limit, sum(sizes)) if all(isinstance(size, int) for size in sizes) else limit
    return jax.ShapeDtypeStruct((bound,), jnp.uint8)


def apart(*arrays: Array) -> Sequence[Array]:
    """Gives activations and results of a call buffers of their own.

    XLA fuses slices of operands and updates with results into a call, but never across a barrier.
    Without it, slices in a loop begin elsewhere each time, so that the handler launches other
    kernels, and a captured graph cannot be updated to a different number of them.
    """
    return [lax.optimization_barrier(array) for array in arrays]


def _placed_bytes(shape: Sequence[int], dtype: Any) -> int:
    unit = ffi.PLACE_ALIGNMENT
    return -(-math.prod(shape) * jnp.dtype(dtype).itemsize // unit) * unit


def workspace_bytes(batch: int, m: int, columns: int) -> int:
    """Bytes for the float32 partial sums of every split the selection may choose.

    The bound needs no device, and m may be symbolic, so that exported programs carry it.
    """
    if not all(isinstance(size, int) for size in (batch, m)):
        return ffi.MAX_WORKSPACE_BYTES
    return ffi.most_sums_bytes(batch * m, columns)


NO_NARROW_SCALES = "its kernels read scales of 16 or 32 bits, the format has 8-bit ones"
NO_CODEBOOK = "its kernels read integers, the format has a codebook"


def unsupported_lhs(dtype: Any) -> str:
    """The reason not to take lhs of another dtype than those that kernels read."""
    return f"its kernels take lhs of {one_of(FLOATS)}, this one is {dtype}"


def one_of(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"
