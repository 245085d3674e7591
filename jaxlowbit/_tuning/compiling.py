"""The command `jaxlowbit compile`: compiles kernels into the cache, without a GPU."""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp

from .._backends import cuda, extension, instances, registry
from .._backends.extension import ffi
from .._backends.instances import HOPPER, Instance
from .._core.activations import EXACT, VALUES
from .._core.dtypes import FLOATS
from .._core.format import format_name, parse_format
from .._core.layout import blocks
from . import devices
from .devices import Device
from .weights import Weight, add_arguments, check_tokens, find

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


def add_compile(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    add_arguments(parser, [], _ROWS)
    dtype = "dtype of activations; int8 and float8_e4m3fn for rounded ones (%(default)s)"
    parser.add_argument("--dtype", default="bfloat16", help=dtype)
    gpu = "the GPU (the first that JAX sees)"
    parser.add_argument("--device", choices=devices.GPUS, help=gpu)
    parser.add_argument("--transposed", action="store_true", help="also compile for gradients")
    return _run


def _run(options: argparse.Namespace) -> int:
    tokens, device = check_tokens(options.tokens), _device(options.device)
    formats = [parse_format(text) for text in options.format]
    taken = (*FLOATS, *VALUES)
    if str(options.dtype) not in map(str, taken):
        raise ValueError(f"--dtype {options.dtype}: name one of {', '.join(map(str, taken))}.")
    dtype = jnp.dtype(options.dtype)
    floats = EXACT if dtype in VALUES else dtype
    if dtype in VALUES and device.capability != HOPPER:
        raise ValueError(
            f"--dtype {dtype}: {device.name} multiplies quantized activations in {EXACT}; "
            f"name that, or a GPU of compute capability 9.0."
        )
    for format in formats:
        reason = registry.unsupported("cuda", floats, format, built=False)
        if dtype in VALUES:
            reason = reason or cuda.unsupported_activations(dtype, format)
        if reason:
            raise ValueError(f"--format {format_name(format)}: {reason}.")
    sources = [source for source in (options.checkpoint, options.shapes) if source]
    if len(sources) > 1 or not (sources or formats):
        raise ValueError("name a checkpoint, --shapes with --format, or only --format.")
    if sources:
        weights = find(sources[0], formats, str(floats))
        wanted = _of_weights(weights, dtype, tokens, device, options.transposed)
    else:
        found = [
            instance
            for format in formats
            for instance in instances.of_format(format, dtype, floats, device.capability)
        ]
        wanted = [
            instance
            for instance in found
            if options.transposed or instance.family != "sm80_transposed"
        ]
    return int(_compile(list(dict.fromkeys(wanted)), device))


def _device(name: str | None) -> Device:
    if reason := extension.UNAVAILABLE["cuda"]:
        raise ValueError(f"{reason}.")
    if error := ffi.toolchain()["error"]:
        raise ValueError(f"{error}.")
    device = devices.GPUS[name] if name else devices.first()
    if device.platform != "cuda":
        raise ValueError(f"JAX sees no GPU; name one: --device {' or '.join(devices.GPUS)}.")
    return device


def _of_weights(
    weights: Iterable[Weight],
    dtype: jnp.dtype,
    tokens: Iterable[int],
    device: Device,
    transposed: bool,
) -> Iterable[Instance]:
    distinct = {
        weight._replace(n=blocks(weight.n), k=blocks(weight.k)): weight for weight in weights
    }
    for n, k, format, scale in distinct.values():
        narrow = dtype in VALUES and cuda.unsupported_activations(dtype, format) is None
        least = cuda.least_rows(dtype, format, k) if narrow else 0
        floats = EXACT if dtype in VALUES else dtype
        for m in tokens:
            lhs = dtype if narrow and m >= least else floats
            yield from instances.of_product(
                *(m, n, k, format, lhs, jnp.dtype(scale)),
                device=device.facts,
                transposed=transposed,
            )


def _compile(wanted: Sequence[Instance], device: Device) -> bool:
    """Compiles, with a line for each instance. Returns whether any failed."""
    if not wanted:
        print("Nothing to compile: the build contains all of these kernels.")
        return False
    start, cached, errors = time.monotonic(), 0, []
    architecture = ffi.architecture(device.capability)
    for number, one in enumerate(instances.compile_all(wanted, device.capability), 1):
        how = "failed" if one.error else "cached" if one.cached else f"{one.seconds:.1f} s"
        print(f"{number}/{len(wanted)}  {how:8} {one.instance.expression}", flush=True)
        cached += one.cached
        if one.error:
            errors.append(one.error)
    spent = time.monotonic() - start
    toolchain = ffi.toolchain()
    print(
        f"\nsm_{architecture}: {len(wanted) - cached - len(errors)} compiled, {cached} were there, "
        f"in {spent:.1f} s by {toolchain['compiler']}; kept in {toolchain['cache'] or 'no folder'}."
    )
    for error in errors:
        print(error)
    return bool(errors)
