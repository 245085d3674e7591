"""Time per call of a chain of calls, on the device, as a user's program runs them."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

BLOCKS = 7
PROGRAMS_PER_BLOCK = 20


def microseconds_per_call(
    call: Callable[[jax.Array, Any], jax.Array],
    x: jax.Array,
    weights: list,
    calls: int,
    *,
    donate: bool = True,
    compiler_options: dict[str, Any] | None = None,
) -> float:
    """The slope (t(2 n) - t(n)) / n between jitted chains of n and 2 n calls.

    Each call's input is the output before it, and weights take turns. Programs are enqueued one
    after the other without waiting, so that the time is the device's as long as the host keeps
    ahead, and what a program costs once cancels. The median of several blocks.
    """

    @functools.partial(
        jax.jit,
        static_argnums=2,
        donate_argnums=0 if donate else (),
        compiler_options=compiler_options,
    )
    def chain(x: jax.Array, weights: list, count: int) -> jax.Array:
        for i in range(count):
            x = call(x, weights[i % len(weights)])
        return x

    def program_us(count: int) -> float:
        value, times = x + 0, []
        for _ in range(BLOCKS + 1):
            start = time.perf_counter()
            for _ in range(PROGRAMS_PER_BLOCK):
                value = chain(value, weights, count)
            value.block_until_ready()
            times.append((time.perf_counter() - start) / PROGRAMS_PER_BLOCK)
        return statistics.median(times[1:]) * 1e6

    return (program_us(2 * calls) - program_us(calls)) / calls
