"""Time per call on the device, as a user's program runs it: the method of every figure here."""

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
PROGRAMS = (2, 20)  # least and most in a block
HOST_SHARE = 0.8  # of a program's time, that enqueueing it may take
MOST_CALLS = 512  # of the shorter program, where it needs more of them for that
QUEUED = 6  # programs that are enqueued together behind other work
BUSY_WIDTH = 8192  # of the products of that work


class Effort(NamedTuple):
    """How long a graph is timed; the driver has the same two."""

    warm_up_seconds: float  # until clocks are those of a busy device
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

    Each call's input is the output before it, and weights take turns. Programs are enqueued one
    after the other without waiting, so that the time is the device's as long as the host keeps
    ahead, and what a program costs once cancels. Where enqueueing the shorter program takes nearly
    as long as running it, which would make the slope too small, both get twice as many calls.
    Blocks of programs of either length alternate, and each pair is a sample.

    Where the output has another shape than the input, a link makes the next input of it, a small
    kernel of its own. Both programs then have 2 n links, those without a call before them reading
    a constant, so that links cancel too.
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
        """Seconds of a program, and of them those until the host has enqueued it."""
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

    x = x + 0  # the caller's is not donated
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
    """The slope, as above, where enqueueing a call takes longer than running it: a median.

    `QUEUED` programs are enqueued behind other work, and timed from its end. Outputs have the shape
    of inputs.
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
    """Some milliseconds of a GPU."""
    y = x
    for _ in range(8):
        y = (y @ x) / x.shape[-1]
    return y


def _runs_ahead(x: jax.Array) -> bool:
    """Whether a program returns before it has run, which on the CPU it need not."""
    return all(device.platform != "cpu" for device in x.devices())


def _link(x: jax.Array, y: jax.Array) -> jax.Array:
    """`y` in the shape of `x`, which it depends on; the barriers keep it out of other kernels."""
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
    """The time of a CUDA graph of `calls` calls of PyTorch, replayed, for each of them.

    Weights take turns. Replays are samples.
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
