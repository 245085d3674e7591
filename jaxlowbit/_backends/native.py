"""The compiled module: custom calls for CUDA and one for the CPU.

The only file that knows `_ffi`, target names and the order of a custom call's operands.
"""

import functools
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .. import _layout
from .._array import QuantizedArray
from .._formats import Format

try:
    from .. import _ffi
except ImportError as error:
    raise ImportError(
        "jaxlowbit: the compiled module jaxlowbit._ffi is missing, so this is a source tree. "
        "Install the package (pip install .) and import it from another folder."
    ) from error

_TARGET = "jaxlowbit_quantized_matmul"
_FUSED_TARGET = "jaxlowbit_quantized_matmul_fused"
_MATMULS_TARGET = "jaxlowbit_quantized_matmuls"
_MLP_TARGET = "jaxlowbit_quantized_mlp"
_BLOCK_TARGET = "jaxlowbit_quantized_block"
_TIMES_TARGET = "jaxlowbit_times"
_CUDA_BITS = (4, 8)
_MOST_CUDA_SIZE = 2**30  # of k and n
_LHS = ("float32", "bfloat16", "float16")


def build_info() -> dict:
    """What was compiled: see `python -m jaxlowbit.info`."""
    return _ffi.build_info()


@functools.cache
def runtime_ffi_version() -> tuple[int, int]:
    """The custom-call API version of the installed jaxlib, read from the headers it ships."""
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    found = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header.read_text())
    return int(found[0]), int(found[1])


@functools.cache
def unavailable(platform: str) -> str | None:
    """Why no custom call runs on `platform` ("cpu" or "cuda") with this build, or None."""
    built, runtime = tuple(build_info()["ffi_api"]), runtime_ffi_version()
    if built[0] != runtime[0] or built > runtime:
        return (
            f"the installed jaxlib speaks custom-call API {runtime[0]}.{runtime[1]} and this build "
            f"needs {built[0]}.{built[1]}; install jax 0.10 or newer"
        )
    if platform == "cuda" and not build_info()["cuda"]:
        return "this build has no CUDA kernels; reinstall where nvcc is found"
    return None


def register() -> None:
    """Registers the custom calls; initialises no backend.

    A registration that XLA refuses would break the whole backend, hence the check before it.
    """
    reason = unavailable("cpu")
    if reason is not None:
        warnings.warn(
            f"jaxlowbit: {reason}. Until then products run through the slower definition.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    for platform, targets in _ffi.targets().items():
        for target, handlers in targets.items():
            jax.ffi.register_ffi_target(target, handlers, platform=platform)


def unsupported(
    platform: str,
    lhs: jnp.dtype,
    format: Format,
    *,
    sizes: Sequence[int] = (),
    transposed: bool = False,
) -> str | None:
    """Why the custom call of `platform` cannot compute this problem, or None.

    `sizes`: k and n, where they are known.
    """
    return unavailable(platform) or uncovered(
        platform, lhs, format, sizes=sizes, transposed=transposed
    )


def uncovered(
    platform: str,
    lhs: jnp.dtype,
    format: Format,
    *,
    sizes: Sequence[int] = (),
    transposed: bool = False,
) -> str | None:
    """Why the kernels for `platform`, in a build that has them, lack this problem, or None."""
    if platform not in ("cpu", "cuda"):
        return "there is no custom call for this platform"
    if platform == "cuda" and max(sizes, default=0) > _MOST_CUDA_SIZE:
        return f"its kernels take k and n up to 2^30, this matrix has {max(sizes)}"
    if platform == "cuda" and format.bits not in _CUDA_BITS:
        return f"its kernels read {_one_of(_CUDA_BITS)} bits, the format has {format.bits}"
    if str(lhs) not in _LHS:
        return f"its kernels take lhs of {_one_of(_LHS)}, this one is {lhs}"
    if transposed and platform == "cpu":
        return "it has no kernel for the transposed product"
    if platform == "cuda" and lhs == jnp.float32 and (transposed or format.zero == "float"):
        return "with float32 lhs its kernels take no float zero and no transposed product"
    return None


def gathers(platform: str, lhs: jnp.dtype, permutation: Array | None, *, transposed: bool) -> bool:
    """Whether the custom call itself gathers lhs by this permutation: on CUDA, by a matrix's."""
    matrix = permutation is not None and permutation.ndim == 1
    return matrix and platform == "cuda" and lhs != jnp.float32 and not transposed


def matmul(
    lhs: Array,
    packed: Array,
    scale: Array,
    zero: Array | None,
    index: Array | None,
    permutation: Array | None,
    *,
    format: Format,
    columns: int,
    transposed: bool,
    orders: int,
    out_dtype: jnp.dtype,
    half_sums: bool,
    platform: str,
) -> Array:
    """`definition.matmul` as one custom call.

    A permutation, of so many `orders`, is None or one for which `gathers` is true.

    Tensor cores multiply no float32: for CUDA, float32 activations are split into bfloat16 parts,
    which the kernel multiplies as more rows, exactly, and whose results are added.
    """
    lead = packed.shape[:-3] if index is None else index.shape
    rows = lhs.shape[len(lead) : -1]
    batch, m = math.prod(lead), math.prod(rows)
    parts, factor = 1, None
    if platform == "cuda":
        if lhs.dtype == jnp.float32:
            lhs, factor = _in_range(lhs)
            lhs, parts = _in_parts(lhs, len(lead)), _PARTS
        if scale.dtype != lhs.dtype or parts > 1:
            scale, zero = _widened(scale, zero, format)
    lhs = lhs.reshape(batch, parts * m, lhs.shape[-1])
    if platform == "cuda":
        (lhs,) = _apart(lhs)
    operands = [lhs, *_weight_operands(packed, scale, zero, index, format)]
    results = [jax.ShapeDtypeStruct((batch, parts * m, columns), out_dtype)]
    if platform == "cuda":
        ordered = permutation is None
        operands.append(jnp.zeros(0, jnp.int32) if ordered else permutation.reshape(orders, -1))
        results.append(_workspace(_workspace_bytes(batch, parts * m, columns), results, operands))
        results.append(jax.ShapeDtypeStruct((0,) if ordered else lhs.shape, lhs.dtype))
    out, *_ = jax.ffi.ffi_call(_TARGET, results)(
        *operands,
        **_attributes(
            **_format_attributes(format),
            transposed=transposed,
            scale_sums=parts > 1,
            half_sums=half_sums,
        ),
    )
    if platform == "cuda":
        (out,) = _apart(out)
    if factor is not None:
        out = out.reshape(batch, parts, m, columns)[:, ::-1].sum(1)  # the smallest first
        out *= factor.reshape(batch, m, 1)
    return out.reshape(*lead, *rows, columns)


def matmuls(
    lhs: Array, weights: Sequence[QuantizedArray], *, out_dtype: jnp.dtype, half_sums: bool
) -> tuple[Array, ...]:
    """`lhs @ weight` (..., n) for matrices of one format, as one custom call of CUDA."""
    rows, m = lhs.shape[:-1], math.prod(lhs.shape[:-1])
    results = [jax.ShapeDtypeStruct((1, m, weight.n), out_dtype) for weight in weights]
    operands = [*_apart(lhs.reshape(1, m, lhs.shape[-1]))]
    operands += [operand for weight in weights for operand in _call_operands(weight, lhs.dtype)]
    sums = max(_workspace_bytes(1, m, weight.n) for weight in weights)
    _, *outs = jax.ffi.ffi_call(_MATMULS_TARGET, [_workspace(sums, results, operands), *results])(
        *operands,
        **_attributes(**_format_attributes(weights[0].format), half_sums=half_sums),
    )
    return tuple(out.reshape(*rows, out.shape[-1]) for out in _apart(*outs))


def fused(
    lhs: Array,
    rhs: QuantizedArray,
    bias: Array | None,
    residual: Array | None,
    *,
    rows: tuple[int, ...],
    activation: str | None,
    gated: bool = False,
    out_dtype: jnp.dtype,
    half_sums: bool,
) -> Array:
    """A product with its epilogue, (batch, m, n), as one custom call of CUDA.

    lhs is (*stack, *rows, k); a gated rhs is two matrices, of which lhs has one batch.
    """
    m, weights = math.prod(rows), math.prod(rhs.shape[:-2])
    batch = 1 if gated else weights

    def addend(array: Array | None, shape: tuple[int, ...]) -> Array:
        if array is None:
            return jnp.zeros(0, lhs.dtype)
        return array.astype(lhs.dtype if array.dtype == lhs.dtype else jnp.float32).reshape(shape)

    operands = [
        *_apart(lhs.reshape(batch, m, rhs.k)),
        *_call_operands(rhs, lhs.dtype),
        addend(bias, (weights, rhs.n)),
        addend(residual, (batch, m, rhs.n)),
    ]
    if residual is not None:
        operands[-1:] = _apart(operands[-1])
    result = jax.ShapeDtypeStruct((batch, m, rhs.n), out_dtype)
    workspace = _workspace(_workspace_bytes(weights, m, rhs.n), [result], operands)
    out, _ = jax.ffi.ffi_call(_FUSED_TARGET, [result, workspace])(
        *operands,
        **_attributes(
            **_format_attributes(rhs.format),
            activation=activation or "none",
            gated=gated,
            half_sums=half_sums,
        ),
    )
    return _apart(out)[0]


def mlp(
    lhs: Array,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    *,
    activation: str,
    out_dtype: jnp.dtype,
    half_sums: bool,
) -> Array:
    """`(activation(lhs @ gate) * (lhs @ up)) @ down`, (..., n), as one custom call of CUDA."""
    rows, m = lhs.shape[:-1], math.prod(lhs.shape[:-1])
    operands = [
        *_apart(lhs.reshape(1, m, lhs.shape[-1])),
        *_call_operands(gate_up, lhs.dtype),
        *_call_operands(down, lhs.dtype),
    ]
    result = jax.ShapeDtypeStruct((1, m, down.n), out_dtype)
    hidden = jax.ShapeDtypeStruct((1, m, gate_up.n), lhs.dtype)
    sums = max(_workspace_bytes(2, m, gate_up.n), _workspace_bytes(1, m, down.n))
    workspace = _workspace(sums, [result], operands)
    out, *_ = jax.ffi.ffi_call(_MLP_TARGET, [result, hidden, workspace])(
        *operands,
        **_attributes(
            **_format_attributes(gate_up.format),
            **_format_attributes(down.format, "down_"),
            activation=activation,
            half_sums=half_sums,
        ),
    )
    return _apart(out)[0].reshape(*rows, down.n)


def block(
    attended: Array,
    residual: Array,
    norm: Array,
    following_norm: Array | None,
    weights: Sequence[QuantizedArray],
    *,
    activation: str,
    epsilon: float,
) -> tuple[Array, ...]:
    """`_calls.quantized_block` as one custom call of CUDA: the new residual, then what follows.

    `weights` are those of out, gate_up and down, then the following ones.
    """
    out, gate_up, down, *following = weights
    rows, m, dtype = attended.shape[:-1], math.prod(attended.shape[:-1]), attended.dtype
    operands = [
        *_apart(attended.reshape(1, m, attended.shape[-1]), residual.reshape(1, m, out.n)),
        norm,
        jnp.zeros(0, dtype) if following_norm is None else following_norm,
        *(operand for weight in weights for operand in _call_operands(weight, dtype)),
    ]
    stream = jax.ShapeDtypeStruct((1, m, out.n), dtype)
    hidden = jax.ShapeDtypeStruct((1, m, gate_up.n), dtype)
    products = [jax.ShapeDtypeStruct((1, m, weight.n), dtype) for weight in following]
    sums = max(
        _workspace_bytes(2, m, gate_up.n),
        *(_workspace_bytes(1, m, weight.n) for weight in (out, down, *following)),
    )
    workspace = _workspace(sums, [stream, *products], operands)
    formats = [_format_attributes(weight.format) for weight in weights]
    result, *others = jax.ffi.ffi_call(
        _BLOCK_TARGET, [*[stream] * 4, hidden, workspace, *products]
    )(
        *operands,
        **_attributes(
            bits=np.array([format["bits"] for format in formats]),
            group_size=np.array([format["group_size"] for format in formats]),
            activation=activation,
            epsilon=np.float32(epsilon),
        ),
    )
    results = _apart(result, *others[len(others) - len(following) :])
    return tuple(x.reshape(*rows, x.shape[-1]) for x in results)


def unnormalizable(columns: int) -> bool:
    """Whether the kernels lack the normalization of rows of this length."""
    return columns % 8 != 0 or columns > _ffi.MAX_RMS_NORM_COLUMNS


def _call_operands(weight: QuantizedArray, dtype: jnp.dtype) -> tuple[Array, ...]:
    scale, zero = weight.scale, weight.zero
    if scale.dtype != dtype:
        scale, zero = _widened(scale, zero, weight.format)
    return _weight_operands(weight.packed, scale, zero, weight.index, weight.format)


def _widened(scale: Array, zero: Array | None, format: Format) -> tuple[Array, Array | None]:
    """Scales and float zeros in float32, exactly."""
    if zero is not None and format.zero == "float":
        zero = zero.astype(jnp.float32)
    return scale.astype(jnp.float32), zero


def _weight_operands(
    packed: Array, scale: Array, zero: Array | None, index: Array | None, format: Format
) -> tuple[Array, ...]:
    """The operands of a custom call that follow lhs."""
    num_weights = math.prod(packed.shape[:-3])
    zero_dtype = jnp.uint8 if format.zero != "float" else scale.dtype
    return (
        packed.reshape(num_weights, *packed.shape[-3:]),
        scale.reshape(num_weights, *scale.shape[-3:]),
        jnp.zeros(0, zero_dtype) if zero is None else zero.reshape(num_weights, *zero.shape[-3:]),
        jnp.zeros(0, jnp.int32) if index is None else index.reshape(-1),
    )


def _format_attributes(format: Format, prefix: str = "") -> dict[str, np.int64]:
    # No matrix has more rows, so that larger groups mean the same.
    sizes = {"bits": format.bits, "group_size": min(format.group_size, 2**62)}
    return {prefix + name: np.int64(size) for name, size in sizes.items()}


def _attributes(**attributes: Any) -> dict[str, Any]:
    """The attributes of a call, with the versions that another version of the library refuses."""
    versions = {"version": _ffi.CALL_VERSION, "layout_version": _layout.VERSION}
    return {name: np.int64(version) for name, version in versions.items()} | attributes


def _workspace(
    sums: int, results: Sequence[jax.ShapeDtypeStruct], operands: Sequence[Array]
) -> jax.ShapeDtypeStruct:
    """The workspace of a call: room for partial sums, and for buffers that XLA places badly.

    Slices that XLA fuses into a call begin at any element, and a result may lie over an operand.
    Such buffers are copied by way of the workspace (`cuda/placement.h`).
    """
    buffers = (x for x in (*results, *operands) if x.dtype != jnp.uint32)  # words stay in place
    sizes = [sums, *(_placed_bytes(x.shape, x.dtype) for x in buffers)]
    limit = _ffi.MAX_WORKSPACE_BYTES
    bound = min(limit, sum(sizes)) if all(isinstance(size, int) for size in sizes) else limit
    return jax.ShapeDtypeStruct((bound,), jnp.uint8)


def _apart(*arrays: Array) -> Sequence[Array]:
    """Activations and results of a call, which have buffers of their own.

    XLA fuses slices of operands and updates with results into a call, but looks for them no further
    than a barrier. In a loop these begin elsewhere each time, so that a handler would launch other
    kernels, and a captured graph cannot be updated to a different number of them.
    """
    return [lax.optimization_barrier(array) for array in arrays]


def _placed_bytes(shape: Sequence[int], dtype: Any) -> int:
    unit = _ffi.PLACE_ALIGNMENT
    return -(-math.prod(shape) * jnp.dtype(dtype).itemsize // unit) * unit


_PARTS = 3  # of 8 bits each, for the 24 of float32


def _in_range(lhs: Array) -> tuple[Array, Array]:
    """Float32 rows with which no sum overflows before scales multiply it, and what they lack.

    Rows that reach beyond 2^96 are divided by 2^32, which leaves room for the rounding of parts and
    for sums of up to 2^24 products with 8-bit integers.
    """
    large = jnp.max(jnp.abs(lhs), axis=-1, keepdims=True, initial=0) >= 2.0**96
    return lhs * jnp.where(large, 2.0**-32, 1.0), jnp.where(large, 2.0**32, 1.0)


def _in_parts(lhs: Array, axis: int) -> Array:
    """Float32 as bfloat16 values that add up to it, on a new axis."""
    parts = []
    for _ in range(_PARTS):
        # Not a cast there and back, which XLA may drop.
        part = lax.reduce_precision(lhs, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        lhs = jnp.where(jnp.isfinite(part), lhs - part, 0)
    return jnp.stack(parts, axis=axis)


class DeviceFacts(NamedTuple):
    """What the selection knows of a GPU."""

    name: str
    compute_capability: int
    num_sms: int
    shared_bytes_per_sm: int


class Product(NamedTuple):
    """One product (m, k) @ (k, n), as choices are measured for it."""

    m: int
    n: int
    k: int
    format: Format
    lhs: str  # dtypes
    scale: str

    def fields(self) -> tuple:
        """What `set_tuned` takes of it."""
        bits, group_size, zero = self.format.bits, self.format.group_size, self.format.zero
        widened = self.scale != self.lhs
        return self.m, self.n, self.k, bits, group_size, self.lhs, widened, zero


class Choice(NamedTuple):
    """How a CUDA kernel would compute a product (`cuda/dispatch.h`)."""

    kernel: str
    block_m: int
    split_k: int
    slices: int
    tile: int
    mates: int


def choose(
    batch: int,
    m: int,
    k: int,
    n: int,
    lhs: jnp.dtype,
    scale: jnp.dtype,
    format: Format,
    *,
    device: DeviceFacts,
) -> dict:
    """The CUDA handler's choice for a device: its fields, and "unsupported", a reason or ""."""
    parts = _PARTS if lhs == jnp.float32 else 1
    return _ffi.select(
        m=parts * m,
        n=n,
        k=k,
        bits=format.bits,
        group_size=format.group_size,
        batch=batch,
        lhs="float16" if lhs == jnp.float16 else "bfloat16",
        float32_scale=scale != lhs or parts > 1,  # as `matmul` widens scales
        zero=format.zero,
        scale_sums=parts > 1,
        **_named(device),
        workspace_bytes=_workspace_bytes(batch, parts * m, n),
    )


def candidates(product: Product, device: DeviceFacts) -> list[Choice]:
    """The choices worth measuring for a product, first the one that is made without measuring."""
    m, n, k, bits, group_size, lhs, float32_scale, zero = product.fields()
    found = _ffi.candidates(
        m=m,
        n=n,
        k=k,
        bits=bits,
        group_size=group_size,
        lhs=lhs,
        float32_scale=float32_scale,
        zero=zero,
        **_named(device),
        workspace_bytes=_workspace_bytes(1, m, n),
    )
    return [Choice(*fields) for fields in found]


def set_tuned(device: DeviceFacts, entries: Sequence[tuple[Product, Choice]]) -> list[str]:
    """Lets the kernels of a device, if they are not loaded yet, choose by a table.

    A choice stands for its product and for those of fewer rows, down to the next entry.

    **Returns:** for each entry why it is left out, or "".
    """
    fields = [(product.fields(), tuple(choice)) for product, choice in entries]
    facts = _named(device)
    return _ffi.set_tuned(facts.pop("device_name"), fields, **facts)


def times(
    lhs: Array,
    packed: Array,
    scale: Array,
    zero: Array | None,
    *,
    product: Product,
    calls: int,
    choices: tuple[Choice, ...],
) -> Array:
    """Microseconds (choices,) of `lhs` times a matrix, on a GPU, the median for each choice.

    One after the other, `calls` matrices of the stack that `packed`, `scale` and `zero` hold are
    multiplied.
    """
    m, n = product.m, product.n
    results = [
        jax.ShapeDtypeStruct((1, m, n), lhs.dtype),
        jax.ShapeDtypeStruct((_workspace_bytes(1, m, n),), jnp.uint8),
        jax.ShapeDtypeStruct((len(choices),), jnp.float32),
    ]
    numbers = [(_ffi.KERNELS.index(choice.kernel), *choice[1:]) for choice in choices]
    *_, microseconds = jax.ffi.ffi_call(_TIMES_TARGET, results)(
        lhs[None],
        *_weight_operands(packed, scale, zero, jnp.zeros(1, jnp.int32), product.format),
        **_attributes(
            **_format_attributes(product.format),
            calls=np.int64(calls),
            choices=np.array(numbers, np.int64).reshape(-1),
        ),
    )
    return microseconds


def _named(device: DeviceFacts) -> dict[str, Any]:
    name, compute_capability, num_sms, shared_bytes_per_sm = device
    return {
        "device_name": name,
        "compute_capability": compute_capability,
        "num_sms": num_sms,
        "shared_bytes_per_sm": shared_bytes_per_sm,
    }


def compute_capability(device: Any) -> int:
    """That of a `jax.Device`, 90 for 9.0."""
    major, minor = map(int, device.compute_capability.split("."))
    return 10 * major + minor


def too_old(compute_capability: int) -> str | None:
    """Why no CUDA kernel is written for GPUs of this compute capability, or None."""
    bfloat16 = jnp.dtype("bfloat16")
    choice = choose(
        *(1, 1, _layout.ATOM, _layout.ATOM, bfloat16, bfloat16, Format(4)),
        device=DeviceFacts("", compute_capability, 1, 0),
    )
    return choice["unsupported"] or None


def unfit(compute_capability: int) -> str | None:
    """Why the CUDA kernels of this build run no problem on such GPUs, or None."""
    if reason := too_old(compute_capability):
        return reason
    built = build_info()["cuda_architectures"].split()
    if not built or any(_runs_on(compute_capability, architecture) for architecture in built):
        return None
    return (
        f"this build has kernels for {' '.join(built)}, of which none runs on compute capability "
        f"{compute_capability // 10}.{compute_capability % 10}; build jaxlowbit on that machine"
    )


def _runs_on(compute_capability: int, architecture: str) -> bool:
    """Whether code that CMake built for an architecture, such as 90a-real, runs on a GPU."""
    found = re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", architecture)
    if found is None:
        return True
    built, feature, kind = int(found[1]), found[2], found[3]
    if feature == "a":
        return compute_capability == built
    if kind != "-real" and not feature:  # with PTX, which later GPUs compile
        return compute_capability >= built
    return compute_capability // 10 == built // 10 and compute_capability >= built


def _workspace_bytes(batch: int, m: int, columns: int) -> int:
    """Enough for the float32 partial sums of every split the selection may choose.

    The bound needs neither a device nor a concrete m, so that exported programs carry it.
    """
    if not all(isinstance(size, int) for size in (batch, m)):
        return _ffi.MAX_WORKSPACE_BYTES
    return _ffi.most_sums_bytes(batch * m, columns)


def _one_of(values: tuple) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"
