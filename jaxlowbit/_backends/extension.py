"""The compiled module: its build configuration, and whether its custom calls run here.

The only file that imports `_ffi`. `xla_ffi/module.cc` defines the handlers.
"""

import functools
import importlib.util
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp

from .._core.format import Format

try:
    from .. import _ffi as ffi
except ImportError as error:
    raise ImportError(
        "jaxlowbit: the compiled module jaxlowbit._ffi is missing, so this is a source tree. "
        "Install the package (pip install .) and import it from another folder."
    ) from error


def build_info() -> dict:
    """Describes the build; `jaxlowbit info` prints it."""
    return ffi.build_info()


@functools.cache
def runtime_ffi_version() -> tuple[int, int]:
    """The custom-call API version of the installed jaxlib, read from the headers it ships."""
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    found = re.findall(
        r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header.read_text(encoding="utf-8")
    )
    return int(found[0]), int(found[1])


@functools.cache
def unavailable(platform: str) -> str | None:
    """Returns None if this build's custom calls run on `platform` ("cpu" or "cuda"), else the
    reason."""
    built, runtime = tuple(build_info()["ffi_api"]), runtime_ffi_version()
    if built[0] != runtime[0] or built > runtime:
        return (
            f"the installed jaxlib speaks custom-call API {runtime[0]}.{runtime[1]} and this build "
            f"needs {built[0]}.{built[1]}; install jax 0.10 or newer"
        )
    if platform == "cuda" and not build_info()["cuda"]:
        return "this build has no CUDA kernels; reinstall where nvcc is found"
    return None


@functools.cache
def uncompiled(format: Format, lhs: jnp.dtype, *, transposed: bool = False) -> str | None:
    """Returns None if CUDA kernels for a product can be compiled on this machine, else the reason.

    Also None if the kernel is prebuilt.
    """
    what = (
        "codebooks"
        if format.codebook is not None
        else "8-bit scales"
        if format.scale is not None
        else f"{format.bits} bits"
        if format.bits in ffi.COMPILED_BITS
        else "float32 lhs"
        if lhs == jnp.float32
        else "transposed products"
        if transposed
        else None
    )
    return _no_compiler(what) if what else None


def uncompiled_activations() -> str | None:
    """Like `uncompiled`, for kernels with 8-bit activations."""
    return _no_compiler("8-bit activations")


def _no_compiler(what: str) -> str | None:
    error = ffi.toolchain()["error"] if build_info()["cuda"] else None
    return f"its kernels for {what} are compiled where they run, and {error}" if error else None


def _find_nvrtc() -> None:
    """Sets the path of NVRTC in NVIDIA's wheels, which is not on the system's search path."""
    wheels = importlib.util.find_spec("nvidia")
    folders = [] if wheels is None else wheels.submodule_search_locations or []
    names = ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12")
    found = [path for folder in folders for name in names if (path := Path(folder, name)).exists()]
    ffi.set_nvrtc_paths([str(path) for path in found])


def register() -> None:
    """Registers the custom calls without initialising a backend.

    A registration that XLA rejects would break the whole backend, so it is checked before.
    """
    reason = unavailable("cpu")
    if reason is not None:
        warnings.warn(
            f"jaxlowbit: {reason}. Until then products run through the slower definition.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    if build_info()["cuda"]:
        _find_nvrtc()
    for platform, targets in ffi.targets().items():
        for target, handlers in targets.items():
            jax.ffi.register_ffi_target(target, handlers, platform=platform)
