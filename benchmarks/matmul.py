"""Times one matrix product as a user's program runs it: jitted, captured, over cold weights.

    python benchmarks/matmul.py --size 8192 --m 1 2 4 8 16 32 64 --json results.json

Microseconds per call are a slope, (t(2 n) - t(n)) / n, of two jitted programs with n and 2 n calls
in a chain (each call's input is the output before it), so that what a program costs once does not
count. Weights rotate over copies that together exceed the L2 cache several times, buffers are
donated so that XLA's captured graph is replayed and not recorded again, and each time is the median
of 20 runs. A row is printed only after its result was within the error bound of the definition.
"""

import argparse
import functools
import json
import operator
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxlowbit as jl

COLD_BYTES = 240 << 20  # four times the L2 of an H200
CALLS = 16
RUNS = 20


def xla_bf16(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight


def xla_int4(x: jax.Array, weight: tuple[jax.Array, jax.Array]) -> jax.Array:
    """XLA's own int4, written plainly: dequantize, then multiply."""
    codes, scale = weight
    groups, n = scale.shape
    floats = codes.astype(x.dtype).reshape(groups, -1, n) * scale[:, None]
    return x @ floats.reshape(-1, n)


def xla_int4_grouped(x: jax.Array, weight: tuple[jax.Array, jax.Array]) -> jax.Array:
    """XLA's own int4, one product per group, scaled afterwards."""
    codes, scale = weight
    groups, n = scale.shape
    x = x.reshape(x.shape[0], groups, -1)
    codes = codes.astype(x.dtype).reshape(groups, -1, n)
    products = jnp.einsum("mgk,gkn->gmn", x, codes, preferred_element_type=jnp.float32)
    return (products * scale[:, None].astype(jnp.float32)).sum(0).astype(x.dtype)


def per_call_us(product: Callable, x: jax.Array, weights: list) -> float:
    """The slope between chains of CALLS and 2 * CALLS products."""

    @functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
    def chain(x: jax.Array, weights: list, calls: int) -> jax.Array:
        for i in range(calls):
            x = product(x, weights[i % len(weights)])
        return x

    def median(calls: int) -> float:
        value, times = x + 0, []
        for _ in range(RUNS + 5):
            start = time.perf_counter()
            value = chain(value, weights, calls).block_until_ready()
            times.append(time.perf_counter() - start)
        return statistics.median(times[5:])

    return (median(2 * CALLS) - median(CALLS)) / CALLS * 1e6


def copies(make: Callable[[jax.Array], jax.Array]) -> list:
    """Enough different weights to keep each out of the cache until its next turn."""
    first = make(jax.random.key(0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    return [first, *(make(jax.random.key(i)) for i in range(1, max(2, -(-COLD_BYTES // size))))]


def error_over_bound(got: jax.Array, x: jax.Array, weight: np.ndarray) -> float:
    """Largest error of a bfloat16 product in units of the bound that rounding allows."""
    left = np.asarray(x, np.float64)
    exact, size = left @ weight, np.abs(left) @ np.abs(weight)
    unit = 2.0**-8
    bound = (unit + left.shape[-1] * 2.0**-24) * size + unit * np.abs(exact)
    return float((np.abs(np.asarray(got, np.float64) - exact) / bound).max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Times one matrix product, jitted, over cold weights."
    )
    parser.add_argument("--size", type=int, nargs="+", default=[8192], help="k = n of the weight")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    format = jl.Format(args.bits, args.group_size)
    rows = []
    for size in args.size:
        # Products of unit-variance inputs keep unit variance along the chain.
        make = functools.partial(jax.random.normal, shape=(size, size), dtype=jnp.bfloat16)
        dense = jax.jit(lambda key, make=make, size=size: make(key) * size**-0.5)
        quantized = jax.jit(lambda key, dense=dense: jl.quantize(dense(key), format))

        def integers(key: jax.Array, size: int = size) -> tuple[jax.Array, jax.Array]:
            codes = jax.random.randint(key, (size, size), -8, 8, jnp.int8).astype(jnp.int4)
            scale = jnp.full((size // args.group_size, size), 0.2 * size**-0.5, jnp.bfloat16)
            return codes, scale

        contenders = {"jaxlowbit": (operator.matmul, quantized)}
        contenders["xla bf16"] = (xla_bf16, dense)
        if args.bits == 4 and args.group_size > 0:
            contenders["xla int4"] = (xla_int4, jax.jit(integers))
            contenders["xla int4 grouped"] = (xla_int4_grouped, jax.jit(integers))
        for name, (product, maker) in contenders.items():
            weights = copies(maker)
            for m in args.m:
                x = jax.random.normal(jax.random.key(m), (m, size), jnp.bfloat16)
                row = {"size": size, "m": m, "name": name, "format": str(format)}
                if name == "jaxlowbit":
                    got = jax.jit(product)(x, weights[0])
                    exact = np.asarray(weights[0].dequantize(jnp.float32), np.float64)
                    row["error_over_bound"] = error_over_bound(got, x, exact)
                    if not row["error_over_bound"] <= 1:
                        raise SystemExit(f"wrong result, not timed: {row}")
                row["us"] = per_call_us(product, x, weights)
                rows.append(row)
                print(f"{name:18s} {size} x {size}  m={m:<5d} {row['us']:9.2f} us", flush=True)
            del weights
    if args.json:
        device = jax.devices()[0]
        environment = {"device": device.device_kind, "jax": jax.__version__}
        partial = args.json.with_suffix(".partial")
        partial.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))
        os.replace(partial, args.json)


if __name__ == "__main__":
    main()
