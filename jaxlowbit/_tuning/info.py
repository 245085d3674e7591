"""The command `jaxlowbit info`: the build, the devices of this machine and the formats."""

import argparse
import platform
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .._backends import call, extension, registry
from .._core.format import Format
from .._core.format_table import NAMED, bits_per_weight
from .._version import __version__


def add_info(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    return _print


def report() -> Iterator[tuple[str, str]]:
    """Topic and finding, one pair per line of the report."""
    build = extension.BUILD
    yield "jaxlowbit", f"{__version__}, Python {platform.python_version()}"
    yield "jax", f"{jax.__version__}, jaxlib {metadata.version('jaxlib')}"
    built, runtime = build["ffi_api"], extension.RUNTIME_API
    rule = f"built for {_dotted(built)}; needs a jaxlib with the same or a newer minor version"
    yield "custom-call API", f"{rule}; this one has {_dotted(runtime)}"
    yield "CPU kernels", _listed(build["cpu_isa"])
    if build["cuda"]:
        yield "CUDA kernels", f"{build['cuda_architectures']}, by {build['cuda_compiler']}"
    else:
        yield "CUDA kernels", "not built, because no nvcc was found or it was turned off"
    if build["cuda"]:
        yield from _compiling()
    for device in jax.devices():
        yield f"device {device.id}", f"{_name(device)}: {_backends(device)}"


def _compiling() -> Iterator[tuple[str, str]]:
    """Availability of the kernel compiler, and the instances that it has cached."""
    toolchain, loaded = extension.ffi.toolchain(), extension.ffi.loaded()
    widths = call.one_of(extension.ffi.COMPILED_BITS)
    found = f"{toolchain['compiler']}, {toolchain['path']}"
    yield "compiler", f"of kernels for {widths} bits and others: {toolchain['error'] or found}"
    if folder := toolchain["cache"]:
        sizes = [path.stat().st_size for path in Path(folder).glob("*.cubin")]
        yield "compiled kernels", f"{folder}: {len(sizes)}, {sum(sizes) / 1e6:.1f} MB"
    else:
        yield "compiled kernels", "kept nowhere"
    here = ("of the build", "ahead_of_time"), ("compiled", "compiled"), ("from there", "cached")
    counts = ", ".join(f"{loaded[name]} {what}" for what, name in here)
    yield "loaded kernels", f"in this process: {counts}"


def _name(device: Any) -> str:
    capability = getattr(device, "compute_capability", None)
    return f"{device.device_kind} ({f'sm_{capability}' if capability else device.platform})"


def formats() -> Iterator[tuple[str, str, str, str]]:
    """The table of named formats: properties, and the backend of each on this machine."""
    device = jax.devices()[0]
    yield "format", "bits/weight", "groups", f"on the {_name(device)}, activations in bfloat16"
    for name, format in NAMED.items():
        group = "channel" if format.group_size == -1 else str(format.group_size)
        yield name, f"{bits_per_weight(format):.4g}", group, _kernel(device, format)


def _kernel(device: Any, format: Format) -> str:
    custom_call = "cuda" if device.platform == "gpu" else device.platform
    reason = registry.unsupported(custom_call, jnp.dtype("bfloat16"), format)
    return custom_call if reason is None else f"definition; {reason}"


def _backends(device: Any) -> str:
    custom_call = {"cpu": "cpu", "gpu": "cuda"}.get(device.platform)
    if custom_call is None:
        return "definition; there is no custom call for this platform"
    reason = extension.UNAVAILABLE[custom_call]
    return f"{custom_call}, definition" if reason is None else f"definition; {reason}"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _print(options: argparse.Namespace) -> None:
    for topic, finding in report():
        print(f"{topic:16} {finding}")
    print()
    for name, bits, group, kernel in formats():
        print(f"{name:16} {bits:12} {group:8} {kernel}")
