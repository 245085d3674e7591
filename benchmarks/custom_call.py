"""What a custom call costs inside a jitted program, beyond the work of its kernel.

    python benchmarks/custom_call.py

Prints microseconds of GPU time per call of a chain, with XLA's graph capture (the default) and
without, and microseconds of host time per program, for weights small enough that the work itself is
next to nothing (128 x 128) and for a real layer.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp

import jaxlowbit as jl

RUNS = 50


def main() -> None:
    argparse.ArgumentParser(
        description="What a custom call costs inside a jitted program."
    ).parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print("     size  capture  donated   us per call of a chain   us of host time per program of")
    print("                              (slope of 16 and 32)        1 call  8 calls   8, waiting")
    for size in (128, 4096):
        weights = [
            jl.quantize(jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16), jl.INT4)
            for i in range(32)
        ]
        for capture in (True, False):
            for donated in (True, False):
                row(size, weights, capture, donated)


def row(size: int, weights: list, capture: bool, donated: bool) -> None:
    options = {} if capture else {"xla_gpu_enable_command_buffer": ""}
    compiler_options = options if jax.default_backend() == "gpu" else {}

    @functools.partial(
        jax.jit,
        static_argnums=2,
        donate_argnums=0 if donated else (),
        compiler_options=compiler_options,
    )
    def chain(x: jax.Array, weights: list, calls: int) -> jax.Array:
        for i in range(calls):
            x = x @ weights[i]
        return x

    def median(calls: int, *, wait: bool) -> float:
        x = jnp.zeros((1, size), jnp.bfloat16)
        times = []
        for _ in range(RUNS + 5):
            start = time.perf_counter()
            x = chain(x, weights, calls)
            if wait:
                x.block_until_ready()
            times.append(time.perf_counter() - start)
            x.block_until_ready()
        return statistics.median(times[5:]) * 1e6

    slope = (median(32, wait=True) - median(16, wait=True)) / 16
    host = [median(1, wait=False), median(8, wait=False), median(8, wait=True)]
    print(
        f"{size:9d}  {'yes' if capture else 'no':7s}  {'yes' if donated else 'no':7s}   "
        f"{slope:22.2f}   {host[0]:16.1f} {host[1]:8.1f} {host[2]:12.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
