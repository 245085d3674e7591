"""Checks and times the requested cells."""

import functools
import math
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import contenders
import jax
import jax.numpy as jnp
import timing
import weights
from contenders import Contender
from results import InputError
from shapes import Shape

from jaxlowbit import Format

_MOST_COPIES = 512
_READ_COLUMNS = 4096


class Plan(NamedTuple):
    """All combinations of shapes, formats, numbers of tokens and backends to measure."""

    shapes: Sequence[Shape]
    tokens: Sequence[int]
    formats: Sequence[Format]
    dtype: str
    backends: Sequence[str]
    calls: int  # minimum, of the shorter program
    cold_bytes: int  # minimum total size of the distinct copies of a weight
    effort: timing.Effort = timing.THOROUGH  # of CUDA graphs


class Skipped(NamedTuple):
    """A backend that cannot run or lacks this format, with the reason."""

    backend: str
    format: str
    reason: str


class Wrong(NamedTuple):
    """A product that is not timed because its result is wrong."""

    backend: str
    shape: str
    m: int
    format: str
    error_over_bound: float


def measure(plan: Plan) -> Iterator[dict[str, Any] | Skipped | Wrong]:
    """Yields findings as they are made."""
    table = contenders.table()
    if plan.dtype != "bfloat16" and any(format.scale for format in plan.formats):
        raise InputError(
            "formats with 8-bit scales are timed with bfloat16 activations; see --dtype."
        )
    for name in plan.backends:
        dense = name in table and table[name].dense
        for format in plan.formats[:1] if dense else plan.formats:
            reason = table[name].unsupported(format, plan.dtype) if name in table else None
            label = "dense" if dense else weights.name(format)
            if reason:
                yield Skipped(name, label, reason)
                continue
            for shape in plan.shapes:
                row = {"shape": shape.name, "n": shape.n, "k": shape.k}
                row |= {"format": label, "dtype": plan.dtype, "backend": name}
                size = weights.num_bytes(*shape[1:], None if dense else format, plan.dtype)
                if name == contenders.READ:
                    findings = iter([row | {"m": None} | _read(plan, size)])
                else:
                    findings = _products(plan, shape, format, table[name], row, size)
                yield from map(_with_a_time, findings)


def _with_a_time(finding: dict[str, Any] | Skipped | Wrong) -> dict[str, Any] | Skipped | Wrong:
    if not isinstance(finding, dict) or finding["us"] > 0:
        return finding
    reason = f"{finding['shape']}: {finding['us']:.2f} us, too short to differ from noise"
    return Skipped(finding["backend"], finding["format"], reason)


def copies(plan: Plan, size: int, shares: bool = False) -> tuple[int, int]:
    """Distinct weights of `size` bytes, and calls of the shorter program that rotate over them.

    **Raises:** `InputError` for a weight so small that it needs too many copies.
    """
    count = max(1, math.ceil(plan.cold_bytes / size))
    if count > _MOST_COPIES:
        raise InputError(
            f"{count} copies of a weight of {size} bytes would be needed to keep it out of the "
            f"cache, more than {_MOST_COPIES}; name a larger shape, or to benchmark.py a smaller "
            "--cold-mb."
        )
    calls = count * math.ceil(plan.calls / count)
    return (2 * calls if shares else count), calls


def _read(plan: Plan, size: int) -> dict[str, Any]:
    """Time of XLA to sum the rows of `size` bytes, which reads every byte."""
    count, calls = copies(plan, size)
    shape = (math.ceil(size / 4 / _READ_COLUMNS), _READ_COLUMNS)
    buffers = [_random_words(jax.random.key(i), shape) for i in range(count)]
    x = jnp.zeros(shape[0], jnp.uint32)
    time = timing.microseconds_per_call(contenders.row_sums, x, buffers, calls)
    return timed(time, "jit", 4 * math.prod(shape), count, calls, None)


@functools.partial(jax.jit, static_argnames="shape")
def _random_words(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return jax.random.bits(key, shape, jnp.uint32)


def _products(
    plan: Plan,
    shape: Shape,
    format: Format,
    contender: Contender,
    row: dict[str, Any],
    size: int,
) -> Iterator[dict[str, Any] | Skipped | Wrong]:
    ours = row["backend"] in contenders.OURS + contenders.DENSE
    if not ours and format.group_size > 0 and shape.k % format.group_size:
        reason = f"{shape.name}: the last group of k={shape.k} is incomplete"
        yield Skipped(row["backend"], row["format"], reason)
        return
    count, calls = copies(plan, size, contender.shares)
    torch = contender.framework == "torch"

    def make(i: int) -> Any:
        key = jax.random.key(i)
        codes = weights.random_codes(key, shape.n, shape.k, format, plan.dtype)
        if torch:
            codes = jax.tree.map(import_module("torch").from_dlpack, codes)
        return contender.make(codes, format)

    try:
        made = [make(i) for i in range(count)]
        exact = _reference(plan, shape, format, contender, made[0])
        for m in plan.tokens:
            x = jax.random.normal(jax.random.key(m), (m, shape.k), jnp.dtype(plan.dtype))
            operand = import_module("torch").from_dlpack(x) if torch else x
            call = contender.call if torch else jax.jit(contender.call)
            product = call(operand, made[0])
            product = jax.dlpack.from_dlpack(product.detach().contiguous()) if torch else product
            error = weights.error_over_bound(product, x, exact)
            if not error <= 1:
                yield Wrong(row["backend"], shape.name, m, row["format"], error)
                continue
            if torch:
                time = timing.graph_microseconds_per_call(
                    contender.call, operand, made, calls, plan.effort
                )
            else:
                time = timing.microseconds_per_call(contender.call, operand, made, calls)
            method = "cuda graph" if torch else "jit"
            yield row | {"m": m} | timed(time, method, size, count, calls, error)
    except Exception as error:
        if ours:
            raise
        # Other packages raise various errors for unsupported shapes.
        reason = f"{shape.name}: {type(error).__name__}: {error}"
        yield Skipped(row["backend"], row["format"], reason.splitlines()[0])


def _reference(
    plan: Plan, shape: Shape, format: Format, contender: Contender, weight: Any
) -> jax.Array:
    if contender.reference is not None:
        return jax.dlpack.from_dlpack(contender.reference(weight).detach().float().contiguous())
    codes = weights.random_codes(jax.random.key(0), shape.n, shape.k, format, plan.dtype)
    return weights.dequantize(codes, format)


def timed(
    time: timing.Microseconds, method: str, size: int, count: int, calls: int, error: float | None
) -> dict[str, Any]:
    """Fields of a row for a time of `calls` calls over `count` weights of `size` bytes."""
    return {
        "method": method,
        "us": time.median,
        "quartiles_us": list(time.quartiles),
        "bytes": size,
        "copies": count,
        "calls": calls,
        "error_over_bound": error,
    }
