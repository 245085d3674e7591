"""Times two products, column-parallel then row-parallel, on several devices against one.

    python benchmarks/sharded.py --json results.json

A hidden layer (size -> hidden -> size) without its nonlinearity: the first weight is sharded along
its columns, the second along its rows, so one all-reduce follows both. Prints microseconds per pair
of products (`timing.py`), with several weights in turn to keep them out of the cache, after
checking that results are within the error bound of the definition.
"""

import argparse
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from timing import microseconds_per_call
from weights import error_over_bound

import jaxlowbit as jl

CALLS = 16
COPIES = 4
AXIS = "model"

Weights = tuple[jl.QuantizedArray, jl.QuantizedArray]
Results = tuple[jax.Array, jax.Array]  # of the first product and of both


def products(x: jax.Array, weights: Weights) -> Results:
    up, down = weights
    hidden = x @ up
    return hidden, hidden @ down


def auto(mesh: jax.sharding.Mesh) -> Callable[[jax.Array, Weights], Results]:
    """XLA divides the program by the shardings of the weights."""

    def divided(x: jax.Array, weights: Weights) -> Results:
        hidden, out = products(x, weights)
        return hidden, jax.lax.with_sharding_constraint(out, jax.NamedSharding(mesh, jax.P()))

    return divided


def mapped(mesh: jax.sharding.Mesh, specs: Any) -> Callable[[jax.Array, Weights], Results]:
    """Divides the program with `shard_map`."""

    def local(x: jax.Array, weights: Weights) -> Results:
        up, down = weights
        hidden = x @ up
        part = jl.quantized_matmul(hidden, down, preferred_element_type=jnp.float32)
        return hidden, jax.lax.psum(part, AXIS).astype(x.dtype)

    out_specs = jax.P(None, AXIS), jax.P()
    return jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), specs), out_specs=out_specs)


def make(key: jax.Array, size: int, hidden: int) -> Weights:
    """Weights that keep unit variance along a chain."""

    @jax.jit
    def quantized(key: jax.Array) -> Weights:
        up, down = jax.random.split(key)
        return (
            jl.quantize(jax.random.normal(up, (size, hidden), jnp.bfloat16) * size**-0.5, jl.INT4),
            jl.quantize(
                jax.random.normal(down, (hidden, size), jnp.bfloat16) * hidden**-0.5, jl.INT4
            ),
        )

    return quantized(key)


def measure(devices: list[Any], size: int, hidden_size: int, m: int) -> Iterator[dict[str, Any]]:
    mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
    weights = [make(jax.random.key(i), size, hidden_size) for i in range(COPIES)]
    x = jax.random.normal(jax.random.key(COPIES), (m, size), jnp.bfloat16)
    up, down = weights[0]
    exact = [weight.dequantize(jnp.float32) for weight in (up, down)]
    specs = up.partition_spec(mesh, n=AXIS), down.partition_spec(mesh, k=AXIS)

    def put(tree: Any, specs: Any) -> Any:
        shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
        return jax.device_put(tree, shardings)

    for name, count, product in (
        ("one device", 1, products),
        ("auto mesh", len(devices), auto(mesh)),
        ("shard_map", len(devices), mapped(mesh, specs)),
    ):
        if name == "auto mesh":
            weights, x = [put(pair, specs) for pair in weights], put(x, jax.P())
        hidden, out = jax.jit(product)(x, weights[0])
        row = {"name": name, "devices": count, "size": size, "hidden": hidden_size, "m": m}
        row["error_over_bound"] = max(
            error_over_bound(hidden, x, exact[0]), error_over_bound(out, hidden, exact[1])
        )
        if not row["error_over_bound"] <= 1:
            raise SystemExit(f"a wrong result is not timed: {row}")
        last = functools.partial(lambda product, x, pair: product(x, pair)[1], product)
        row["us"] = microseconds_per_call(last, x, weights, CALLS).median
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description="Times sharded products against one device's.")
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=28672)
    parser.add_argument("--m", type=int, default=16)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    devices = jax.devices()[: args.devices]
    if len(devices) < args.devices:
        raise SystemExit(f"--devices {args.devices}, but JAX sees {len(devices)}.")
    rows = []
    for row in measure(devices, args.size, args.hidden, args.m):
        rows.append(row)
        print(f"{row['name']:12s} {row['devices']} devices {row['us']:9.2f} us", flush=True)
    if args.json:
        environment = {"device": devices[0].device_kind, "jax": jax.__version__}
        partial = args.json.with_suffix(".partial")
        partial.write_text(
            json.dumps({"environment": environment, "rows": rows}, indent=1), encoding="utf-8"
        )
        os.replace(partial, args.json)


if __name__ == "__main__":
    main()
