"""The compiled module: one custom call for CUDA and one for the CPU.

The only file that knows `_ffi`, target names and the order of a custom call's operands.
"""

import functools
import math
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .. import _layout
from .._formats import Format

try:
    from .. import _ffi
except ImportError as error:
    raise ImportError(
        "jaxlowbit: the compiled module jaxlowbit._ffi is missing, so this is a source tree. "
        "Install the package (pip install .) and import it from another folder."
    ) from error

_TARGET = "jaxlowbit_quantized_matmul"
_BITS = (4, 8)
_LHS = {"cpu": ("float32", "bfloat16", "float16"), "cuda": ("bfloat16", "float16")}
_ZEROS = {"cpu": ("none", "integer", "float"), "cuda": ("none", "integer")}


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
    for platform, handlers in _ffi.targets().items():
        jax.ffi.register_ffi_target(_TARGET, handlers, platform=platform)


def unsupported(platform: str, lhs: jnp.dtype, format: Format) -> str | None:
    """Why the custom call of `platform` cannot compute this problem, or None."""
    return unavailable(platform) or uncovered(platform, lhs, format)


def uncovered(platform: str, lhs: jnp.dtype, format: Format) -> str | None:
    """Why the kernels for `platform`, in a build that has them, lack this problem, or None."""
    if platform not in _LHS:
        return "there is no custom call for this platform"
    if format.bits not in _BITS:
        return f"its kernels read {_one_of(_BITS)} bits, the format has {format.bits}"
    if str(lhs) not in _LHS[platform]:
        return f"its kernels take lhs of {_one_of(_LHS[platform])}, this one is {lhs}"
    if format.zero not in _ZEROS[platform]:
        return f"its kernels take zero {_one_of(_ZEROS[platform])}, the format's is {format.zero}"
    return None


def matmul(
    lhs: Array,
    packed: Array,
    scale: Array,
    zero: Array | None,
    index: Array | None,
    *,
    format: Format,
    n: int,
    out_dtype: jnp.dtype,
    platform: str,
) -> Array:
    """`definition.matmul` as one custom call."""
    lead = packed.shape[:-3] if index is None else index.shape
    rows = lhs.shape[len(lead) : -1]
    batch, m, k = math.prod(lead), math.prod(rows), lhs.shape[-1]
    num_weights = math.prod(packed.shape[:-3])
    if platform == "cuda" and scale.dtype not in (lhs.dtype, jnp.float32):
        scale = scale.astype(jnp.float32)  # exact
    zero_dtype = jnp.uint8 if format.zero != "float" else scale.dtype
    results = [jax.ShapeDtypeStruct((batch, m, n), out_dtype)]
    if platform == "cuda":
        results.append(jax.ShapeDtypeStruct((_workspace_bytes(batch, m, n),), jnp.uint8))
    out, *_ = jax.ffi.ffi_call(_TARGET, results)(
        lhs.reshape(batch, m, k),
        packed.reshape(num_weights, *packed.shape[-3:]),
        scale.reshape(num_weights, *scale.shape[-3:]),
        jnp.zeros(0, zero_dtype) if zero is None else zero.reshape(num_weights, *zero.shape[-3:]),
        jnp.zeros(0, jnp.int32) if index is None else index.reshape(batch),
        bits=np.int64(format.bits),
        group_size=np.int64(format.group_size),
    )
    return out.reshape(*lead, *rows, n)


def choose(
    batch: int,
    m: int,
    k: int,
    n: int,
    lhs: jnp.dtype,
    scale: jnp.dtype,
    format: Format,
    *,
    compute_capability: int,
    num_sms: int,
    shared_bytes_per_sm: int,
) -> dict:
    """The CUDA handler's choice for a device: its fields, and "unsupported", a reason or ""."""
    return _ffi.select(
        m=m,
        n=n,
        k=k,
        bits=format.bits,
        group_size=format.group_size,
        batch=batch,
        float32_scale=scale != lhs,  # `matmul` widens the other 16-bit dtype
        integer_zero=format.zero == "integer",
        compute_capability=compute_capability,
        num_sms=num_sms,
        shared_bytes_per_sm=shared_bytes_per_sm,
        workspace_bytes=_workspace_bytes(batch, m, n),
    )


def _workspace_bytes(batch: int, m: int, n: int) -> int:
    """Enough for the float32 partial sums of every split the selection may choose.

    The bound needs neither a device nor a concrete m, so that exported programs carry it.
    """
    limit = _ffi.MAX_WORKSPACE_BYTES
    if not all(isinstance(size, int) for size in (batch, m)):
        return limit
    padded = batch * m * _layout.blocks(n) * _layout.ATOM
    return min(limit, 4 * _ffi.MAX_SPLIT_K * padded)


def _one_of(values: tuple) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"
