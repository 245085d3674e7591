"""Times products with small and large M on the CPU against XLA's dots of the same shape.

    python benchmarks/cpu_rows.py --rows 1 16 64 256 --formats int4 int4-g48 nf4 codebook6-g128

All are timed in one process: the formats in turn, once per round, then XLA's dots. `codebookB-gN`
has 2^B normal numbers and groups of N. For comparison, two threads read as many bytes as the first
format's weights and scales and compute the maximum of a half each: the limit set by memory and by
waking a thread. `--int8` multiplies previously quantized rows, and also their values as bfloat16,
the fallback without an int8 kernel. `--multiplied` doubles all results in the program of the
product, as programs with nvfp4 do anyway: XLA runs programs of 1000 operations and more, not
counting calls, on another thread.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowbit import (
    Format,
    QuantizedActivations,
    QuantizedArray,
    quantize,
    quantize_activations,
    quantized_matmul,
)
from jaxlowbit._core.format import parse_format

SEED = 0
WARM_UP = 3
DTYPES = ("bfloat16", "float32")


def main() -> None:
    parser = argparse.ArgumentParser(description="Times small and large M on the CPU.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128, 256])
    parser.add_argument("--size", type=int, default=4096, help="of k and of n")
    parser.add_argument("--formats", nargs="+", default=["int4"])
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--int8", action="store_true", help="quantize the rows before")
    parser.add_argument("--multiplied", action="store_true", help="double the results")
    arguments = parser.parse_args()
    rng = np.random.default_rng(SEED)
    weight = rng.standard_normal((arguments.size, arguments.size), dtype=np.float32)
    arrays = {name: quantized(weight, name) for name in arguments.formats}
    sizes = {
        name: sum(leaf.nbytes for leaf in jax.tree.leaves(x)) / 1e6 for name, x in arrays.items()
    }
    product = doubled if arguments.multiplied else jax.jit(quantized_matmul)
    dot = jax.jit(jnp.dot)
    for dtype in arguments.dtypes:
        kinds = [""] + [", values in bfloat16"] * arguments.int8
        times: dict[str, list[str]] = {
            name: [] for name in (*(name + kind for kind in kinds for name in arrays), "XLA")
        }
        dense = jnp.asarray(weight, dtype)
        for rows in arguments.rows:
            lhs = jnp.asarray(rng.standard_normal((rows, arguments.size)), dtype)
            given = quantize_activations(lhs) if arguments.int8 else lhs
            calls = [
                lambda x=given, q=q, f=f: f(x, q).block_until_ready()
                for f in (product, in_bfloat16)[: len(kinds)]
                for q in arrays.values()
            ]
            found = milliseconds(calls, arguments.calls)
            dots = [lambda x=lhs, w=dense: dot(x, w).block_until_ready()]
            found += milliseconds(dots, arguments.calls)
            for own, one in zip(times.values(), found, strict=True):
                own.append(one)
        print(f"| {dtype} | MB | " + " | ".join(map(str, arguments.rows)) + " |")
        print("|---" * (len(arguments.rows) + 2) + "|")
        for name, row in times.items():
            size = sizes.get(name.split(",")[0], dense.nbytes / 1e6)
            print(f"| {name} | {size:.1f} | " + " | ".join(row) + " |", flush=True)
    (read,) = milliseconds([two_thread_read(int(1e6 * next(iter(sizes.values()))))], 20)
    print(f"A read of the bytes of {arguments.formats[0]}: {read}")


@jax.jit
def doubled(lhs: jax.Array, rhs: QuantizedArray) -> jax.Array:
    return 2 * quantized_matmul(lhs, rhs)


@jax.jit
def in_bfloat16(lhs: QuantizedActivations, rhs: QuantizedArray) -> jax.Array:
    sums = quantized_matmul(
        lhs.values.astype(jnp.bfloat16), rhs, preferred_element_type=jnp.float32
    )
    return (sums * lhs.scale).astype(lhs.dtype)


def quantized(weight: np.ndarray, name: str) -> QuantizedArray:
    if (found := re.fullmatch(r"codebook(\d)(?:-g(\d+)|-channel)", name)) is None:
        return quantize(jnp.asarray(weight), parse_format(name))
    bits, group_size = int(found[1]), int(found[2] or -1)
    numbers = np.random.default_rng(SEED).standard_normal(2**bits)
    return quantize(jnp.asarray(weight), Format(bits, group_size, codebook=tuple(numbers)))


def milliseconds(calls: Sequence[Callable[[], object]], count: int) -> list[str]:
    """The median and minimum time of each."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(WARM_UP + count):
        for call, own in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            own.append(1e3 * (time.perf_counter() - begin))
    warm = (own[WARM_UP:] for own in times)
    return [f"{statistics.median(own):.2f} ({min(own):.2f})" for own in warm]


def two_thread_read(count: int) -> Callable[[], object]:
    first, second = np.ones((2, count // 8), np.int32)
    pool = ThreadPoolExecutor(1)

    def read() -> None:
        other = pool.submit(np.max, second)
        np.max(first)
        other.result()

    return read


if __name__ == "__main__":
    main()
