"""Times the overhead of a custom call in a jitted program, beyond the work of its kernel.

    python benchmarks/custom_call.py

For weights with negligible work (128 x 128, one kernel) and for a small layer (4096 x 4096, two
kernels): device time per call of a chain, with and without XLA's graph capture (the default), with
and without donated buffers (stable addresses); host time per program of one and of eight calls.
"""

import argparse
import statistics
import time
from operator import matmul

import jax
import jax.numpy as jnp
from timing import microseconds_per_call

import jaxlowbit as jl

CALLS = 128
COPIES = 4
RUNS = 200


def main() -> None:
    argparse.ArgumentParser(
        description="Times the overhead of a custom call in a program."
    ).parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print("  size  capture  donated   us per call")
    for size in (128, 4096):
        weights = make(size)
        x = jnp.ones((1, size), jnp.bfloat16)
        for capture in (True, False):
            for donate in (True, False):
                spent = microseconds_per_call(
                    matmul,
                    x,
                    weights,
                    CALLS,
                    donate=donate,
                    compiler_options=None if capture else {"xla_gpu_enable_command_buffer": ""},
                )
                print(
                    f"{size:6d}  {yes(capture)}      {yes(donate)}     {spent.median:10.2f}",
                    flush=True,
                )
    print("  calls of a program (128 x 128)   us of host time enqueueing   waiting for the result")
    for calls in (1, 8):
        enqueue, wait = host_us(make(128), calls)
        print(f"{calls:25d} {enqueue:28.1f} {wait:24.1f}", flush=True)


def yes(flag: bool) -> str:
    return "yes" if flag else "no "


def make(size: int) -> list[jl.QuantizedArray]:
    keys = jax.random.split(jax.random.key(0), COPIES)
    return [jl.quantize(jax.random.normal(k, (size, size), jnp.bfloat16), jl.INT4) for k in keys]


def host_us(weights: list[jl.QuantizedArray], calls: int) -> tuple[float, float]:
    """Median times until a program is enqueued, and until its result is ready."""

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        for i in range(calls):
            x = x @ weights[i % COPIES]
        return x

    x = jnp.ones((1, weights[0].shape[0]), jnp.bfloat16)
    chain(x).block_until_ready()
    enqueued, waited = [], []
    for _ in range(RUNS):
        start = time.perf_counter()
        y = chain(x)
        enqueued.append(time.perf_counter() - start)
        y.block_until_ready()
        waited.append(time.perf_counter() - start)
    return statistics.median(enqueued) * 1e6, statistics.median(waited) * 1e6


if __name__ == "__main__":
    main()
