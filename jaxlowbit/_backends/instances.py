"""Instances of the CUDA kernels, and their compiler. Needs no GPU."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._core.activations import EXACT, VALUES
from .._core.format import Format
from . import selection
from .cuda import HOPPER
from .extension import ffi
from .selection import DeviceFacts


class Instance(NamedTuple):
    """A kernel template and its C++ arguments."""

    family: str
    expression: str


class Compiled(NamedTuple):
    """Result of compiling an instance: an error or "", whether it was cached, seconds."""

    instance: Instance
    error: str
    cached: bool
    seconds: float


def of_format(format: Format, lhs: jnp.dtype, scale: jnp.dtype, capability: int) -> list[Instance]:
    """All instances that products of a format may need and that are compiled at run time.

    Instances for small M read two-level scales; all others have float scales.
    """
    if format.two_levels:
        floats = of_format(format.expanded, lhs, jnp.dtype("float32"), capability)
    else:
        floats = []
    sums = lhs == jnp.float32  # for float32 activations, supported by only one kernel
    scale = jnp.dtype("float32") if sums else scale
    narrow = format.scale if format.two_levels else format.scale_dtype
    types_of = str(EXACT if sums else lhs), str(narrow or scale)
    numbers = ffi.codebook(format.values)
    found = []
    for family, expression, ahead_of_time, *types, zero, codebook in ffi.instances(format.bits):
        old = family.startswith("sm80")  # supports every kind of zero on every GPU
        # For small M, the product rounds bfloat16 rows itself.
        rounds = "kRounds" in expression
        if (
            not ahead_of_time
            and codebook == numbers
            and (old or (zero == format.zero and capability == HOPPER))
            and tuple(types) == (str(EXACT) if rounds else types_of[0], types_of[1])
            and sums == ("kGroups" in expression)
            and (not rounds or lhs in VALUES)
        ):
            found.append(Instance(family, expression))
    return found + floats


def of_product(
    m: int,
    n: int,
    k: int,
    format: Format,
    lhs: jnp.dtype,
    scale: jnp.dtype,
    *,
    device: DeviceFacts,
    transposed: bool = False,
) -> list[Instance]:
    """The instances selected for a product of this size that are compiled at run time.

    Covers the product as the only one of its call, after another one, as one of a gated pair, with
    unaligned weights, and, if requested, transposed.
    """
    narrow = lhs in VALUES  # quantized activations, supported by only one kind of call
    variants: list[dict[str, bool]] = [
        {"gated": gated, "early_start": early}
        for gated, early in itertools.product((False,) if narrow else (False, True), (False, True))
    ]
    if not narrow:
        variants.append({"aligned": False})
    if transposed and not narrow:
        variants.append({"transposed": True})
    choices = (
        selection.choose(1, m, k, n, lhs, scale, format, device=device, **variant)
        for variant in variants
    )
    wanted = {Instance(*choice["instance"]): None for choice in choices if "instance" in choice}
    ahead_of_time = {expression for _, expression, ahead, *_ in ffi.instances(format.bits) if ahead}
    return [instance for instance in wanted if instance.expression not in ahead_of_time]


def compile_all(instances: Sequence[Instance], capability: int) -> Iterator[Compiled]:
    """Compiles instances concurrently, or finds them in the cache, and reports in order."""
    architecture = ffi.architecture(capability)
    ffi.compile(instances, architecture, wait=False)
    for instance in instances:
        result: dict[str, Any]
        (result,) = ffi.compile([instance], architecture)
        yield Compiled(instance, result["error"], result["cached"], result["seconds"])
