"""The compiled module: its build configuration, and whether its custom calls run here.

The only file that imports `_ffi`. `xla_ffi/module.cc` defines the handlers.
"""

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import jax

try:
    from .. import _ffi as ffi
except ImportError as error:
    raise ImportError(
        "jaxlowbit: the compiled module jaxlowbit._ffi is missing, so this is a source tree. "
        "Install the package (pip install .) and import it from another folder."
    ) from error


BUILD: dict[str, Any] = ffi.build_info()
"""Describes the build; `jaxlowbit info` prints it."""


def _runtime_api() -> tuple[int, int]:
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    found = re.findall(
        r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header.read_text(encoding="utf-8")
    )
    return int(found[0]), int(found[1])


RUNTIME_API = _runtime_api()
"""The custom-call API version of the installed jaxlib, read from the headers it ships."""


def _unavailable(platform: str) -> str | None:
    built, runtime = tuple(BUILD["ffi_api"]), RUNTIME_API
    if built[0] != runtime[0] or built > runtime:
        return (
            f"the installed jaxlib speaks custom-call API {runtime[0]}.{runtime[1]} and this build "
            f"needs {built[0]}.{built[1]}; install jax 0.10 or newer"
        )
    if platform == "cuda" and not BUILD["cuda"]:
        return "this build has no CUDA kernels; reinstall where nvcc is found"
    return None


UNAVAILABLE: dict[str, str | None] = {name: _unavailable(name) for name in ("cpu", "cuda")}
"""For each platform, None if this build's custom calls run there, else the reason."""


def no_compiler(what: str) -> str | None:
    """Returns None if CUDA kernels for `what`, from `ffi.compiled_for`, can be compiled on this
    machine, or are prebuilt (""), else the reason."""
    error = ffi.toolchain()["error"] if what and BUILD["cuda"] else None
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
    reason = UNAVAILABLE["cpu"]
    if reason is not None:
        warnings.warn(
            f"jaxlowbit: {reason}. Until then products run through the slower definition.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    if BUILD["cuda"]:
        _find_nvrtc()
    for platform, targets in ffi.targets().items():
        for target, handlers in targets.items():
            jax.ffi.register_ffi_target(target, handlers, platform=platform)
