"""Times products of 1 to 256 rows on the CPU beside XLA's dots of the same shape, and a read.

    python benchmarks/cpu_rows.py --rows 1 16 64 256 --group-size 128 48

All are timed in one process, one after the other, so that each finds its operands in the caches.
The read is that of as many bytes as a product has weights and scales, by two threads that take the
largest number of a half each: what memory, and waking a thread, allow one row.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowbit import Format, quantize, quantized_matmul

SEED = 0
WARM_UP = 3
DTYPES = ("bfloat16", "float32")


def main() -> None:
    parser = argparse.ArgumentParser(description="Few and many rows on the CPU.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128, 256])
    parser.add_argument("--size", type=int, default=4096, help="of k and of n")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, nargs="+", default=[128])
    parser.add_argument("--calls", type=int, default=20)
    arguments = parser.parse_args()
    rng = np.random.default_rng(SEED)
    weight = rng.standard_normal((arguments.size, arguments.size), dtype=np.float32)
    arrays = {
        size: quantize(jnp.asarray(weight), Format(arguments.bits, size))
        for size in arguments.group_size
    }
    dense = {dtype: jnp.asarray(weight, dtype) for dtype in DTYPES}
    product, dot = jax.jit(quantized_matmul), jax.jit(jnp.dot)
    columns = [f"{dtype}, groups of {size}" for dtype in DTYPES for size in arrays]
    columns += [f"XLA, {dtype}" for dtype in DTYPES]
    print("| rows | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for rows in arguments.rows:
        lhs = {
            dtype: jnp.asarray(rng.standard_normal((rows, arguments.size)), dtype)
            for dtype in DTYPES
        }
        calls = [
            lambda x=lhs[dtype], array=array: product(x, array).block_until_ready()
            for dtype in DTYPES
            for array in arrays.values()
        ]
        calls += [
            lambda x=lhs[dtype], w=dense[dtype]: dot(x, w).block_until_ready() for dtype in DTYPES
        ]
        times = [milliseconds(call, arguments.calls) for call in calls]
        print(f"| {rows} | " + " | ".join(times) + " |", flush=True)
    for size, array in arrays.items():
        count = sum(leaf.nbytes for leaf in jax.tree.leaves(array))
        read = milliseconds(two_thread_read(count), arguments.calls)
        print(f"A read of {count / 1e6:.1f} MB, groups of {size}: {read}")


def milliseconds(call: Callable[[], object], count: int) -> str:
    """The median time, and the least."""
    times = []
    for i in range(WARM_UP + count):
        begin = time.perf_counter()
        call()
        if i >= WARM_UP:
            times.append(1e3 * (time.perf_counter() - begin))
    return f"{statistics.median(times):.2f} ({min(times):.2f})"


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
