"""Times GPTQ of a decoder layer, and estimates the time of a model of such layers.

    python tools/time_gptq.py                            # llama3-8b, 128 windows of 512 tokens
    python tools/time_gptq.py --model tiny --windows 4   # a dry run on a CPU

Weights and inputs are random. The time of a layer includes the statistics of its four inputs, GPTQ
of its seven matrices, and the products with float and with rounded weights, which calibration runs
for all tokens. The first layer compiles; the others are timed. The last line is JSON.
"""

import argparse
import functools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowbit import quantize
from jaxlowbit.quantizers import Statistics

# Width, queries, keys, hidden, layers.
MODELS = {"llama3-8b": (4096, 4096, 1024, 14336, 32), "tiny": (256, 256, 128, 512, 4)}
WINDOWS_AT_ONCE = 8  # as in calibration of language models


def main() -> None:
    parser = argparse.ArgumentParser(description="Times GPTQ of a decoder layer.")
    parser.add_argument("--model", choices=MODELS, default="llama3-8b", help="(%(default)s)")
    parser.add_argument("--windows", type=int, default=128, help="of 512 tokens (%(default)s)")
    parser.add_argument("--format", default="int4", help="(%(default)s)")
    parser.add_argument("--quantizer", default="gptq", help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="to time (%(default)s)")
    options = parser.parse_args()
    width, queries, keys, hidden, layers = MODELS[options.model]
    shapes = {
        "q": (width, queries),
        "k": (width, keys),
        "v": (width, keys),
        "o": (queries, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    run = functools.partial(layer, shapes, options.windows, options.format, options.quantizer)
    print(jax.devices()[0].device_kind, flush=True)
    first = run(0)
    print(f"first layer, with compilation: {sum(first.values()):.1f} s", flush=True)
    times = [run(1 + i) for i in range(options.layers)]
    mean = {part: sum(x[part] for x in times) / len(times) for part in first}
    for part, seconds in mean.items():
        print(f"{part:12} {seconds:8.3f} s a layer", flush=True)
    total = sum(mean.values())
    stats: Any = jax.devices()[0].memory_stats() or {}
    found = {
        "device": jax.devices()[0].device_kind,
        "model": options.model,
        "tokens": 512 * options.windows,
        "format": options.format,
        "quantizer": options.quantizer,
        "seconds_first": round(sum(first.values()), 1),
        "seconds_a_layer": round(total, 3),
        "seconds_model": round(total * layers, 1),
        "peak_gigabytes": round(stats.get("peak_bytes_in_use", 0) / 1e9, 2),
    }
    print(f"{layers} layers: {found['seconds_model']} s, peak {found['peak_gigabytes']} GB")
    print(json.dumps(found))


def layer(
    shapes: dict[str, tuple[int, int]], windows: int, format: str, quantizer: str, seed: int
) -> dict[str, float]:
    """The seconds of the parts of a layer."""
    times = {"statistics": 0.0, quantizer: 0.0, "products": 0.0}
    shared: dict[Any, Statistics] = {}
    for place, (name, (k, n)) in enumerate(shapes.items()):
        key = jax.random.key(100 * seed + place)
        weight = jax.block_until_ready(jax.random.normal(key, (k, n), jnp.float32) / k**0.5)
        source = name if name in ("o", "down") else "qkv" if name in "qkv" else "gate_up"
        start = time.perf_counter()
        if source not in shared:
            shared = {source: jax.block_until_ready(statistics_of(key, k, windows))}
            times["statistics"] += time.perf_counter() - start
        start = time.perf_counter()
        found = quantize(weight, format, quantizer=quantizer, statistics=shared[source])
        jax.block_until_ready(found.packed)
        times[quantizer] += time.perf_counter() - start
        start = time.perf_counter()
        jax.block_until_ready(products(key, weight, found, windows))
        times["products"] += time.perf_counter() - start
    return times


def batches(key: jax.Array, windows: int) -> list[jax.Array]:
    count = -(-windows // WINDOWS_AT_ONCE)
    return list(jax.random.split(key, count))


def inputs(key: jax.Array, k: int) -> jax.Array:
    """Inputs of 8 windows; features differ in magnitude."""
    sizes = jnp.exp(jax.random.normal(jax.random.key(0), (k,)))
    return (jax.random.normal(key, (512 * WINDOWS_AT_ONCE, k)) * sizes).astype(jnp.bfloat16)


def statistics_of(key: jax.Array, k: int, windows: int) -> Statistics:
    parts = (_statistics(part, k) for part in batches(key, windows))
    return functools.reduce(_add, parts)


@functools.partial(jax.jit, static_argnums=1)
def _statistics(key: jax.Array, k: int) -> Statistics:
    return Statistics.of(inputs(key, k), full=True)


@jax.jit
def _add(first: Statistics, second: Statistics) -> Statistics:
    return first + second


def products(key: jax.Array, weight: jax.Array, rounded: Any, windows: int) -> Any:
    """The products of a pass with floats and of a pass with rounded weights."""
    dense = rounded.dequantize(jnp.float32)
    found = None
    for part in batches(key, windows):
        found = _products(part, weight, dense)
    return found


@jax.jit
def _products(key: jax.Array, weight: jax.Array, dense: jax.Array) -> tuple[jax.Array, ...]:
    x = inputs(key, weight.shape[0])
    return tuple(jnp.sum(x @ matrix.astype(jnp.bfloat16)) for matrix in (weight, dense))


if __name__ == "__main__":
    main()
