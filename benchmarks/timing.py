"""The timing method of all benchmarks: device time per call in a jitted program."""

import functools
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCKS = 11
BLOCK_SECONDS = 0.02
PROGRAMS = (2, 20)  # minimum and maximum in a block
HOST_SHARE = 0.8  # enqueueing a program may take at most this fraction of its time
MOST_CALLS = 512  # the shorter program grows up to this to keep HOST_SHARE
QUEUED = 6  # programs enqueued together, after `_busy`
BUSY_WIDTH = 8192  # n and k of the products of `_busy`


class Effort(NamedTuple):
    """Effort of timing a graph. The driver has the same two levels."""

    warm_up_seconds: float  # until clocks settle under load
    replays: int


THOROUGH, QUICK = Effort(0.03, 20), Effort(0.006, 7)


class Microseconds(NamedTuple):
    median: float
    quartiles: tuple[float, float]


def summary(seconds: list[float]) -> Microseconds:
    """Median and quartiles of some samples."""
    lower, median, upper = statistics.quantiles((1e6 * s for s in seconds), method="inclusive")
    return Microseconds(median, (lower, upper))


def microseconds_per_call(
    call: Callable[[jax.Array, Any], jax.Array],
    x: jax.Array,
    weights: list,
    calls: int,
    *,
    donate: bool = True,
    compiler_options: dict[str, Any] | None = None,
) -> Microseconds:
    """The slope (t(2 n) - t(n)) / n between jitted chains of n and 2 n calls.

    Each call's input is the previous output, and weights are used in turn. Programs are enqueued
    without waiting, so device time is measured as long as the host stays ahead, and constant costs
    of a program cancel. If enqueueing the shorter program takes nearly as long as running it, which
    would reduce the slope, both get twice as many calls. Blocks of programs of both lengths
    alternate; each pair is a sample.

    If outputs and inputs have different shapes, a small kernel (a link) makes the next input. Both
    programs then have 2 n links, so that links cancel too; the other n links of the shorter program
    read a constant.
    """
    out = jax.eval_shape(call, x, weights[0])
    links = 0 if out.shape == x.shape else 2 * calls
    idle = jnp.ones(out.shape if links else (), out.dtype)

    @functools.partial(
        jax.jit,
        static_argnums=3,
        donate_argnums=0 if donate else (),
        compiler_options=compiler_options,
    )
    def chain(x: jax.Array, weights: list, idle: jax.Array, count: int) -> jax.Array:
        for i in range(max(count, links)):
            y = call(x, weights[i % len(weights)]) if i < count else idle
            x = _link(x, y) if links else y
        return x

    def run(count: int, programs: int) -> tuple[float, float]:
        """Seconds until a program has ended, and until the host has enqueued it."""
        nonlocal x
        start = time.perf_counter()
        for _ in range(programs):
            x = chain(x, weights, idle, count)
        enqueued = time.perf_counter()
        x.block_until_ready()
        return (time.perf_counter() - start) / programs, (enqueued - start) / programs

    def seconds(count: int, programs: int) -> float:
        return run(count, programs)[0]

    def block(count: int) -> int:
        """The programs of a block."""
        least, most = PROGRAMS
        return min(max(round(BLOCK_SECONDS / seconds(count, 2)), least), most)

    x = x + 0  # do not donate the caller's array
    seconds(calls, 2)  # compiles and captures
    if _runs_ahead(x) and 2 * calls <= MOST_CALLS:
        all_of_it, of_the_host = run(calls, block(calls))
        if of_the_host > HOST_SHARE * all_of_it:
            return microseconds_per_call(
                call, x, weights, 2 * calls, donate=donate, compiler_options=compiler_options
            )
    seconds(2 * calls, 2)
    programs = block(2 * calls)
    return summary(
        [(seconds(2 * calls, programs) - seconds(calls, programs)) / calls for _ in range(BLOCKS)]
    )


def queued_microseconds_per_call(
    call: Callable[[jax.Array, Any], jax.Array], x: jax.Array, weights: list, calls: int
) -> float:
    """The median slope, as above, if enqueueing a call takes longer than running it.

    `QUEUED` programs are enqueued behind other work, and timed from its end. Outputs must have the
    shape of inputs.
    """

    @functools.partial(jax.jit, static_argnums=2)
    def chain(x: jax.Array, weights: list, count: int) -> jax.Array:
        for i in range(count):
            x = call(x, weights[i % len(weights)])
        return x

    other = jnp.ones((BUSY_WIDTH, BUSY_WIDTH), jnp.bfloat16)

    def seconds(count: int) -> float:
        before, y = _busy(other), x
        for _ in range(QUEUED):
            y = chain(x, weights, count)
        before.block_until_ready()
        start = time.perf_counter()
        y.block_until_ready()
        return (time.perf_counter() - start) / QUEUED

    for count in (calls, 2 * calls):  # compiles and captures
        seconds(count)
        seconds(count)
    slopes = [(seconds(2 * calls) - seconds(calls)) / calls for _ in range(BLOCKS)]
    return summary(slopes).median


@jax.jit
def _busy(x: jax.Array) -> jax.Array:
    """Keeps the GPU busy for some milliseconds."""
    y = x
    for _ in range(8):
        y = (y @ x) / x.shape[-1]
    return y


def _runs_ahead(x: jax.Array) -> bool:
    """Whether a program returns before it has run. On the CPU it may not."""
    return all(device.platform != "cpu" for device in x.devices())


def _link(x: jax.Array, y: jax.Array) -> jax.Array:
    """`y` in the shape of `x`, dependent on `x`. The barriers prevent fusion with other kernels."""
    x, y = jax.lax.optimization_barrier((x, y))
    k, n = x.shape[-1], y.shape[-1]
    y = jnp.tile(y, -(-k // n))[..., :k]
    return jax.lax.optimization_barrier(y + 2**-20 * x)


def graph_microseconds_per_call(
    call: Callable[[Any, Any], Any],
    x: Any,
    weights: list,
    calls: int,
    effort: Effort = THOROUGH,
) -> Microseconds:
    """Time per call of a replayed CUDA graph of `calls` calls of PyTorch.

    Weights are used in turn. Replays are samples.
    """
    torch = import_module("torch")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.stream(stream):  # tunes and allocates
            for weight in weights[:3]:
                call(x, weight)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(calls):
                call(x, weights[i % len(weights)])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds() -> float:
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return 1e-3 * begin.elapsed_time(end)

    warm = 0.0
    while warm < effort.warm_up_seconds:
        warm += seconds()
    return summary([seconds() / calls for _ in range(effort.replays)])
