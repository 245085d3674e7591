"""Times products of few rows that round their activations on the way, beside those that do not.

    python benchmarks/rounded.py --m 1 2 8 16

Square weights of `--width`, quantized in `--format`; a line for each number of rows. Programs of 8
and of 16 products, each of the result before it and of a weight of its own, are enqueued behind
other work, so that the time is the device's where the host takes longer to enqueue a product than
the device to compute it.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import weights

import jaxlowbit as jl

COPIES = 8
CALLS = 8  # of the shorter program
PROGRAMS = 6  # that are enqueued together
SAMPLES = 11
BUSY = 8192  # rows and columns of the products of other work

Call = Callable[[jax.Array, jl.QuantizedArray], jax.Array]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times products that round their activations.")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 2, 8, 16], help="rows")
    parser.add_argument("--width", type=int, default=8192, help="rows and columns of a weight")
    parser.add_argument(
        "--format", nargs="+", default=["int4-g128", "int4-channel", "int8", "e4m3"]
    )
    options = parser.parse_args(arguments)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'':14s}{'rows':>6s}{'not rounded us':>16s}{'rounded us':>12s}{'added':>8s}")
    for name in options.format:
        format = weights.parse_format(name)
        copies = [quantized(options.width, format, seed) for seed in range(COPIES)]
        dtype = jnp.float8_e4m3fn if name.startswith("e4m3") else jnp.int8
        rounds = functools.partial(jl.quantized_matmul, activation_dtype=dtype)
        for m in options.m:
            x = jax.random.normal(jax.random.key(m), (m, options.width), jnp.bfloat16)
            plain, rounded = (
                queued_microseconds_per_call(call, x, copies)
                for call in (jl.quantized_matmul, rounds)
            )
            added = f"{100 * (rounded / plain - 1):+.0f} %"
            print(f"{name:14s}{m:6d}{plain:16.2f}{rounded:12.2f}{added:>8s}", flush=True)


def quantized(width: int, format: jl.Format, seed: int) -> jl.QuantizedArray:
    weight = jax.random.normal(jax.random.key(seed), (width, width), jnp.bfloat16) / width**0.5
    return jl.quantize(weight, format)


def queued_microseconds_per_call(call: Call, x: jax.Array, copies: list[Any]) -> float:
    """The slope between programs of CALLS and of 2 CALLS products, a median."""

    @functools.partial(jax.jit, static_argnums=2)
    def chain(x: jax.Array, copies: list[Any], calls: int) -> jax.Array:
        for i in range(calls):
            x = call(x, copies[i % len(copies)])
        return x

    other = jnp.ones((BUSY, BUSY), jnp.bfloat16)

    def seconds(calls: int) -> float:
        """Of a program, from the end of the other work."""
        before = busy(other)
        y = x
        for _ in range(PROGRAMS):
            y = chain(x, copies, calls)
        before.block_until_ready()
        start = time.perf_counter()
        y.block_until_ready()
        return (time.perf_counter() - start) / PROGRAMS

    for calls in (CALLS, 2 * CALLS):  # compiles and captures
        seconds(calls)
        seconds(calls)
    return statistics.median(
        1e6 * (seconds(2 * CALLS) - seconds(CALLS)) / CALLS for _ in range(SAMPLES)
    )


@jax.jit
def busy(x: jax.Array) -> jax.Array:
    """Some milliseconds of a GPU."""
    y = x
    for _ in range(8):
        y = (y @ x) / BUSY
    return y


if __name__ == "__main__":
    main()
