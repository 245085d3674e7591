"""`explain` and its command: the kernel of a product, without running it."""

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .._backends import cpu, extension, registry, selection, target
from .._backends.instances import HOPPER
from .._core import checks
from .._core.activations import EXACT, VALUES, QuantizedActivations
from .._core.array import QuantizedArray
from .._core.dtypes import FLOATS
from .._core.format import parse_format
from .._matmul import quantized_lhs
from .._matmul.api import quantized_matmul
from .._matmul.options import Options
from ..quantizers._quantize import quantize
from . import devices
from .devices import Device
from .weights import add_arguments, check_tokens, find


def explain(lhs: Any, rhs: QuantizedArray, *, lhs_qtype: Any = None, device: Any = None) -> str:
    """Returns which backend, kernel, tile and split `lhs @ rhs` would use on a device, and why.

    Nothing runs. For CUDA it calls the custom call's selection, which includes measurements by
    `jaxlowbit tune` on a device of that name.

    **Arguments:**

    - `lhs`, `rhs`, `lhs_qtype`: as for `quantized_matmul`; an `lhs` that is not quantized
      may be any object with a shape and a dtype.
    - `device`: None for the first device that JAX sees, a `jax.Device`, `"cpu"`, or a GPU that need
      not be installed, if the build has kernels for it: `"A100"`, `"B200"`, `"H100"`, `"H200"`,
      `"L4"` or `"T4"`. A GPU with an unknown number of multiprocessors is treated as an H200.

    **Returns:** a few lines of readable text.

    **Raises:** as `quantized_matmul` for these operands; `ValueError` for an unknown device.

    ```python
    rhs = quantize(jnp.ones((256, 512)), INT4)
    print(explain(jax.ShapeDtypeStruct((1, 256), jnp.bfloat16), rhs, device="H200"))
    print(explain(quantize_activations(jnp.ones((512, 256))), rhs, device="H200"))
    ```
    """
    given = isinstance(lhs, QuantizedActivations)
    if not given:
        checks.shaped("explain", "lhs", lhs)
        lhs = jax.ShapeDtypeStruct(lhs.shape, jax.dtypes.canonicalize_dtype(lhs.dtype))
    checks.quantized("explain", "rhs", rhs, QuantizedArray)
    Options().check("explain", jax.ShapeDtypeStruct(lhs.shape, lhs.dtype), rhs)
    with checks.within("explain"):
        product = functools.partial(quantized_matmul, lhs_qtype=lhs_qtype)
        out = jax.eval_shape(product, lhs, rhs)
    narrow = lhs.values.dtype if given else lhs_qtype
    narrow = None if narrow is None else jnp.dtype(narrow)
    rows = out.shape[:-1] if len(lhs.shape) > 1 else (*out.shape[:-1], 1)
    where = _describe(device)
    size = rhs.format.group_size
    groups = "per channel" if size == -1 else f"groups of {size}"
    order = "" if rhs.permutation is None else ", rows permuted: lhs is gathered first"
    format = rhs.format
    meaning = f"zero {format.zero}" if format.codebook is None else f"codebook {format.codebook}"
    scales = "" if format.scale is None else f", {format.scale} scales"
    how = "" if narrow is None else f" in {narrow}" if given else f", rounded to {narrow},"
    activations = f"{lhs.dtype}{how}"
    findings = [
        ("product", f"{activations} {lhs.shape} @ {rhs.shape} -> {out.dtype} {out.shape}"),
        ("weights", f"{format.bits} bits, {groups}, {meaning}{scales}{order}"),
        ("device", where.name),
        *_choice(jnp.dtype(lhs.dtype), narrow, rhs, rows, where),
    ]
    return "\n".join(f"{topic:8} {finding}" for topic, finding in findings)


def add_explain(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    add_arguments(parser, ["int4-g128"], [1])
    dtypes, values = list(map(str, FLOATS)), list(map(str, VALUES))
    dtype = "dtype of activations (%(default)s)"
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16", help=dtype)
    parser.add_argument("--lhs-qtype", choices=values, help="dtype that activations are rounded to")
    gpus = ["cpu", *devices.GPUS]
    parser.add_argument("--device", choices=gpus, help="the device (the first that JAX sees)")
    return _run


def _run(options: argparse.Namespace) -> None:
    sources = [source for source in (options.checkpoint, options.shapes) if source is not None]
    if len(sources) != 1:
        raise ValueError("name a checkpoint or --shapes.")
    formats, tokens = map(parse_format, options.format), check_tokens(options.tokens)
    weights = find(sources[0], list(formats), options.dtype, excluded=lambda *_: None)
    separator = ""
    for weight in weights:
        floats = jax.ShapeDtypeStruct((weight.k, weight.n), weight.scale)
        rhs = jax.eval_shape(functools.partial(quantize, format=weight.format), floats)
        for m in tokens:
            lhs = jax.ShapeDtypeStruct((m, weight.k), options.dtype)
            rounded = options.lhs_qtype
            print(separator + explain(lhs, rhs, lhs_qtype=rounded, device=options.device))
            separator = "\n"


def _choice(
    lhs: jnp.dtype, narrow: Any, rhs: QuantizedArray, rows: tuple[int, ...], device: Device
) -> Iterator[tuple[str, str]]:
    """`narrow`: the dtype of quantized activations, or None."""
    lhs = lhs if narrow is None else EXACT
    if math.prod(rows) == 0:
        yield "backend", "none"
        yield "why", "the result is empty"
        return
    reason = registry.unsupported(
        device.platform, lhs, rhs.format, sizes=rhs.padded_shape, built=device.here
    )
    if reason is None and device.platform == "cuda":
        fits = target.unfit if device.here else target.too_old
        reason = fits(device.capability)
    if reason is not None:
        yield "backend", "xla: dequantizes, then multiplies"
        yield "why", reason
        return
    yield "backend", f"{device.platform}: a custom call, which reads the packed weights"
    if narrow is not None:
        values = jax.ShapeDtypeStruct((*rows, rhs.k), narrow)
        reason = _not_in_bytes(values, rhs, device)
        if reason is None:
            lhs = narrow
        yield "values", "in 8 bits" if reason is None else f"as {lhs}, exactly: {reason}"
    if device.platform == "cpu":
        yield "kernel", f"qmm_cpu, compiled for {extension.BUILD['cpu_isa'][0]}"
        return
    # Leading axes of lhs that the stack lacks are more rows of the same weights.
    batch = math.prod(rows[1 - rhs.ndim : -1])
    m = math.prod(rows) // batch
    choice = selection.choose(
        batch,
        m,
        rhs.k,
        rhs.n,
        lhs,
        rhs.scale.dtype,
        rhs.format,
        device=device.facts,
    )
    if reason := choice.pop("unsupported"):
        yield "kernel", f"none, and the call fails: {reason}; use backend='xla'"
        return
    block_m, split_k = choice["block_m"], choice["split_k"]
    yield "kernel", f"{choice['kernel']}, block_m={block_m}, split_k={split_k}"
    yield "why", f"m={m}, batch={batch}: tiles of {block_m} rows, {-(-m // block_m)} per weight"
    sms = f"the {device.num_sms} multiprocessors of {device.name}"
    if choice["tuned"]:
        yield "", f"measured to be the fastest on {device.name}: jaxlowbit tune --show"
    elif split_k > 1:
        yield "", f"the sum over k={rhs.k} in {split_k} parts occupies {sms} better than in one"
    else:
        yield "", f"the sum over k={rhs.k} in one part occupies {sms} as well as it can"


def _not_in_bytes(values: Any, rhs: QuantizedArray, device: Device) -> str | None:
    """Returns None if a device multiplies quantized activations in 8 bits, else the reason."""
    if device.platform == "cpu":
        if rhs.ndim != 2:
            return "the call multiplies 8 bits by one matrix, not by a stack"
        return cpu.unsupported_activations(values.dtype, math.prod(values.shape[:-1]), rhs.format)
    if device.capability != HOPPER:
        return "the kernels that multiply 8 bits are those of compute capability 9.0"
    reason = quantized_lhs.uncovered_bytes(values, rhs, built=device.here)
    return reason or quantized_lhs.too_few_rows(values, rhs)


def _describe(device: Any) -> Device:
    if device is None:
        return devices.first()
    if isinstance(device, str) and device == "cpu":
        return Device("cpu", "cpu")
    if hasattr(device, "platform") and hasattr(device, "device_kind"):
        return devices.describe(device)
    if not isinstance(device, str) or device not in devices.GPUS:
        raise ValueError(
            f"explain: device={checks.brief(device)} is unknown; it is a jax.Device or one of cpu, "
            f"{', '.join(devices.GPUS)}."
        )
    return devices.GPUS[device]
