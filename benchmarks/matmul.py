"""Times one matrix product as a user's program runs it: jitted, captured, over cold weights.

    python benchmarks/matmul.py --size 8192 --m 1 2 4 8 16 32 64 --json results.json

Microseconds per call as `timing.py` defines them. Every call has its own weight, so that none is in
the cache (give sizes of which 16 exceed it several times); buffers are donated, so that XLA's
captured graph is replayed and not recorded again. A row is printed only after its result was within
the error bound of the definition.
"""

import argparse
import functools
import json
import operator
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import microseconds_per_call

import jaxlowbit as jl

CALLS = 16


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


def error_over_bound(got: jax.Array, x: jax.Array, weight: np.ndarray) -> float:
    """Largest error of a bfloat16 product in units of the bound that rounding allows."""
    left = np.asarray(x, np.float64)
    exact, size = left @ weight, np.abs(left) @ np.abs(weight)
    unit = 2.0**-8
    bound = (unit + left.shape[-1] * 2.0**-24) * size + unit * np.abs(exact)
    return float((np.abs(np.asarray(got, np.float64) - exact) / bound).max())


def contenders(
    size: int, format: jl.Format, backends: list[Any]
) -> dict[str, tuple[Callable, Callable]]:
    """Name to a product and a maker of its (size, size) weight from a key.

    Weights keep unit variance along a chain, so that no run ends in zeros or infinities.
    """

    def dense(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (size, size), jnp.bfloat16) * size**-0.5

    def integers(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes = jax.random.randint(key, (size, size), -7, 8, jnp.int8).astype(jnp.int4)
        root_mean_square = 4.32  # of -7 to 7
        scale = size**-0.5 / root_mean_square
        return codes, jnp.full((size // format.group_size, size), scale, jnp.bfloat16)

    def quantized(key: jax.Array) -> jl.QuantizedArray:
        return jl.quantize(dense(key), format)

    found = {"jaxlowbit": (operator.matmul, quantized), "xla bf16": (operator.matmul, dense)}
    for backend in backends:
        product = functools.partial(jl.quantized_matmul, backend=backend)
        found[f"jaxlowbit {backend}"] = product, quantized
    if format.bits == 4 and format.group_size > 0:
        found |= {
            "xla int4": (xla_int4, integers),
            "xla int4 grouped": (xla_int4_grouped, integers),
        }
    return found


def measure(
    size: int, format: jl.Format, tokens: list[int], backends: list[Any]
) -> Iterator[dict[str, Any]]:
    """One row per contender and number of tokens; ours only after its result was right."""
    for name, (product, make) in contenders(size, format, backends).items():
        # A weight of its own for every call: XLA would share work between equal operands.
        weights = [jax.jit(make)(jax.random.key(i)) for i in range(2 * CALLS)]
        for m in tokens:
            x = jax.random.normal(jax.random.key(m), (m, size), jnp.bfloat16)
            row = {"size": size, "m": m, "name": name, "format": str(format)}
            if name.startswith("jaxlowbit"):
                exact = np.asarray(weights[0].dequantize(jnp.float32), np.float64)
                row["error_over_bound"] = error_over_bound(
                    jax.jit(product)(x, weights[0]), x, exact
                )
                if not row["error_over_bound"] <= 1:
                    raise SystemExit(f"a wrong result is not timed: {row}")
            row["us"] = microseconds_per_call(product, x, weights, CALLS)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description="Times one jitted product over cold weights.")
    parser.add_argument("--size", type=int, nargs="+", default=[8192], help="k = n of the weight")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--bits", type=int, choices=range(2, 9), default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument(
        "--backends", nargs="*", default=[], help="forced ones to time too: pallas, xla, cuda, cpu"
    )
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    rows, format = [], jl.Format(args.bits, args.group_size)
    for size in args.size:
        for row in measure(size, format, args.m, args.backends):
            rows.append(row)
            print(f"{row['name']:18s} {size} x {size}  m={row['m']:<5d} {row['us']:9.2f} us")
    if args.json:
        device = jax.devices()[0]
        environment = {"device": device.device_kind, "jax": jax.__version__}
        partial = args.json.with_suffix(".partial")
        partial.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))
        os.replace(partial, args.json)


if __name__ == "__main__":
    main()
