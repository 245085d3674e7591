"""Times products with small M that quantize their activations, against products that do not.

    python benchmarks/rounded.py --m 1 2 8 16

Weights are square, of size `--width`, quantized in `--format`. Prints a line per number of rows.
Programs of 8 and 16 chained products with separate weights are enqueued behind other work, so that
device time is measured even if the host enqueues products more slowly than the device runs them.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import weights
from timing import queued_microseconds_per_call

import jaxlowbit as jl

COPIES = 8
CALLS = 8  # of the shorter program


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times products that round their activations.")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 2, 8, 16], help="rows")
    parser.add_argument("--width", type=int, default=8192, help="rows and columns of a weight")
    parser.add_argument(
        "--format", nargs="+", default=["int4-g128", "int4-channel", "int8", "e4m3"]
    )
    options = parser.parse_args(arguments)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'':14s}{'rows':>6s}{'not rounded us':>16s}{'rounded us':>12s}{'added us':>10s}")
    for name in options.format:
        format = weights.parse_format(name)
        copies = [quantized(options.width, format, seed) for seed in range(COPIES)]
        dtype = jnp.float8_e4m3fn if name.startswith("e4m3") else jnp.int8
        rounds = functools.partial(jl.quantized_matmul, lhs_qtype=dtype)
        for m in options.m:
            x = jax.random.normal(jax.random.key(m), (m, options.width), jnp.bfloat16)
            plain, rounded = (
                queued_microseconds_per_call(call, x, copies, CALLS)
                for call in (jl.quantized_matmul, rounds)
            )
            added = rounded - plain
            print(f"{name:14s}{m:6d}{plain:16.2f}{rounded:12.2f}{added:+10.2f}", flush=True)


def quantized(width: int, format: jl.Format, seed: int) -> jl.QuantizedArray:
    weight = jax.random.normal(jax.random.key(seed), (width, width), jnp.bfloat16) / width**0.5
    return jl.quantize(weight, format)


if __name__ == "__main__":
    main()
