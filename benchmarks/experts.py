"""Times products and MLPs of mixtures of experts, XLA's `ragged_dot`, and humming's products.

    python benchmarks/experts.py --out experts.json --markdown experts.md
    python benchmarks/experts.py --products --models qwen3-30b-a3b --tokens 1 16
    python benchmarks/experts.py --dry-run

Each token chooses its experts at random, all equally likely. Sizes of groups, or the choices, are
operands on the device. Weights rotate over copies, so that no call finds its experts in the cache.
`timing.microseconds_per_call` takes the times. A result is checked before it is timed.

- products: `quantized_ragged_dot`, gate and up as one matrix (k, 2 hidden), and down (hidden, k),
  without an epilogue.
- moe: `quantized_moe`, from tokens to the weighted sum; XLA computes the same in bfloat16.
- moe products: two calls that compute its products of rows that are grouped already, in bfloat16.
  The table shows the difference to moe as "not a product".

The backend `humming` times the products of the package humming-kernels, if that and PyTorch are
installed (`peers/humming_worker.py`), in the same formats, with the same choices of experts:
products of models in mxfp4 in int4-g32 too. Its fastest form and schedule counts, timed in a CUDA
graph. It runs in another process: set `XLA_PYTHON_CLIENT_PREALLOCATE=false` to leave it GPU memory.
A dry run skips it.
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import results
import timing
import weights

import jaxlowbit as jl
from jaxlowbit import Format, QuantizedArray
from jaxlowbit._core import layout
from jaxlowbit._core.format import parse_format

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
BACKENDS = ("jaxlowbit", "xla", "humming")
MORE_FORMATS = {"mxfp4": ("int4-g32",)}  # whose products are timed too, for models of a format
COLD_BYTES = 200e6  # between two reads of an expert: several times the L2
READ, MULTIPLY = 3.0e12, 700e12  # bytes and operations of an H100 in a second, for the floor
PROGRAM_US = 1500  # of the shorter program, unless one call takes longer
XLA_SLOWNESS = 16  # times the floor, about
MOST_CALLS, MOST_COPIES = 24, 32


class Model(NamedTuple):
    experts: int
    top: int
    k: int
    hidden: int
    format: str = "int4-g128"


MODELS = {
    "mixtral-8x7b": Model(8, 2, 4096, 14336),
    "qwen3-30b-a3b": Model(128, 8, 2048, 768),
    "gpt-oss-120b": Model(128, 4, 2880, 2880, "mxfp4"),
}
SMALL = {  # of a dry run
    "few experts": Model(4, 2, 128, 192),
    "many experts": Model(16, 4, 64, 64, "mxfp4"),
}


class WrongResultError(Exception):
    """A result outside its error bound."""


class Cell(NamedTuple):
    """A call to time, on weights in turn."""

    call: Callable[[jax.Array, Any], jax.Array]
    x: jax.Array
    weights: list[Any]
    bytes: float  # of the weights that one call reads
    operations: float

    @property
    def floor_us(self) -> float:
        return floor_us(self.bytes, self.operations)


def floor_us(bytes: float, operations: float) -> float:
    return 1e6 * max(bytes / READ, operations / MULTIPLY)


# --- operands -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("lead", "k", "n", "format"))
def random_stack(
    key: jax.Array, *, lead: tuple[int, ...], k: int, n: int, format: Format
) -> QuantizedArray:
    """Matrices of random codes with columns of norm near 1."""
    blocks = (layout.blocks(n), layout.blocks(k))
    keys = jax.random.split(key)
    words = (*lead, *blocks, 128 * format.bits)
    groups = -(-blocks[1] * layout.ATOM // format.group_size)
    shape = (*lead, blocks[0], groups, layout.ATOM)
    numbers = np.array(format.values or np.arange(2**format.bits) - format.offset, np.float64)
    unit = 1 / math.sqrt(k * np.mean(np.square(numbers)))
    if format.scale == "e8m0":
        exponent = round(math.log2(unit)) + jax.random.randint(keys[1], shape, -1, 2)
        scale = jax.lax.bitcast_convert_type((exponent + 127).astype(jnp.uint8), format.scale_dtype)
    else:
        factor = jax.random.uniform(keys[1], shape, jnp.float32, 0.5, 1.5)
        scale = (unit * factor).astype(jnp.bfloat16)
    return QuantizedArray(
        packed=jax.random.bits(keys[0], words, jnp.uint32),
        scale=scale,
        zero=None,
        index=None,
        version=jnp.ones(lead, jnp.uint32),
        format=format,
        k=k,
        n=n,
    )


@functools.partial(jax.jit, static_argnames="shape")
def random_floats(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) / math.sqrt(shape[-2])


def choices(model: Model, tokens: int, seed: int) -> np.ndarray:
    """Different experts for each token, (tokens, top)."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, model.experts)))[:, : model.top].astype(np.int32)


def sizes(model: Model, tokens: int, seed: int) -> jax.Array:
    chosen = choices(model, tokens, seed)
    return jnp.asarray(np.bincount(chosen.ravel(), minlength=model.experts), jnp.int32)


def active(model: Model, tokens: int) -> float:
    """The mean number of experts that are read."""
    return model.experts * (1 - (1 - model.top / model.experts) ** tokens)


def matrix_bytes(k: int, n: int, format: Format | None) -> int:
    return weights.num_bytes(n, k, format, "bfloat16")


def copies(read: float) -> int:
    """The number of stacks that call after call rotates over, each reading `read` bytes."""
    return min(MOST_COPIES, max(1, math.ceil(COLD_BYTES / read)))


# --- cells ----------------------------------------------------------------------------------------


def ours(x: jax.Array, operands: Any) -> jax.Array:
    return jl.quantized_ragged_dot(x, *operands)


def xla(x: jax.Array, operands: Any) -> jax.Array:
    return jax.lax.ragged_dot(x, *operands)


def product_shapes(model: Model) -> tuple[tuple[str, int, int], ...]:
    """Name, k and n of both products."""
    return ("gate_up", model.k, 2 * model.hidden), ("down", model.hidden, model.k)


def product_formats(model: Model) -> tuple[str, ...]:
    return model.format, *MORE_FORMATS.get(model.format, ())


def products(model: Model, backend: str) -> Iterator[tuple[str, int, int, list[Any]]]:
    """Name, k, n, and stacks (experts, k, n) of both products."""
    format = parse_format(model.format)
    for name, k, n in product_shapes(model):
        lead = (model.experts,)
        if backend == "xla":
            yield name, k, n, [random_floats(jax.random.key(0), (*lead, k, n))]
            continue
        count = copies(model.top * matrix_bytes(k, n, format))
        keys = map(jax.random.key, range(count))
        yield name, k, n, [random_stack(key, lead=lead, k=k, n=n, format=format) for key in keys]


def product_cell(
    model: Model, backend: str, tokens: int, k: int, n: int, stacks: list[Any]
) -> Cell:
    rows = tokens * model.top
    format = None if backend == "xla" else parse_format(model.format)
    read = active(model, tokens) * matrix_bytes(k, n, format)
    count = min(len(stacks), copies(read))
    routed = [sizes(model, tokens, seed) for seed in range(max(count, 4))]
    rotated = [(stacks[i % count], size) for i, size in enumerate(routed)]
    x = jax.random.normal(jax.random.key(tokens), (rows, k), jnp.bfloat16)
    return Cell(ours if format else xla, x, rotated, read, 2 * rows * k * n)


def check_product(cell: Cell) -> float:
    """The largest error of some rows, in bounds of rounding."""
    stack, sizes = cell.weights[0]
    got = jax.jit(cell.call)(cell.x, (stack, sizes))
    group = np.repeat(np.arange(len(sizes)), np.asarray(sizes))
    worst = 0.0
    for row in {0, len(group) - 1}:
        weight = stack[int(group[row])]
        if isinstance(weight, QuantizedArray):
            weight = weight.dequantize(jnp.float32)
        one = slice(row, row + 1)
        worst = max(worst, weights.error_over_bound(got[one], cell.x[one], weight))
    return worst


def our_moe(x: jax.Array, operands: Any) -> jax.Array:
    gate_up, down, expert, weight = operands
    return jl.quantized_moe(x, expert, weight, gate_up, down)


def moe_products(x: jax.Array, operands: Any) -> jax.Array:
    gate_up, down, sizes = operands
    hidden = jl.quantized_ragged_dot(x, gate_up, sizes, activation="silu")
    return jl.quantized_ragged_dot(hidden, down, sizes)


def xla_moe(x: jax.Array, operands: Any) -> jax.Array:
    """Sorts, multiplies by `ragged_dot` in bfloat16, and sums."""
    gate_up, down, expert, weight = operands
    experts, top = down.shape[0], expert.shape[1]
    order = jnp.argsort(expert.reshape(-1), stable=True)
    every = jnp.arange(experts, dtype=expert.dtype)
    sizes = jnp.sum(expert.reshape(-1, 1) == every[None], axis=0, dtype=jnp.int32)
    both = jax.lax.ragged_dot(x[order // top], gate_up, sizes)
    gate, up = jnp.split(both, 2, axis=-1)
    rows = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)
    rows = jnp.zeros_like(rows).at[order].set(rows).reshape(len(x), top, -1)
    return jnp.sum(weight[..., None] * rows.astype(jnp.float32), axis=1).astype(x.dtype)


def mlp_stacks(model: Model, backend: str) -> list[Any]:
    lead, k, hidden = (model.experts,), model.k, model.hidden
    if backend == "xla":
        shapes = (*lead, k, 2 * hidden), (*lead, hidden, k)
        return [tuple(random_floats(jax.random.key(i), shape) for i, shape in enumerate(shapes))]
    format = parse_format(model.format)
    count = copies(model.top * 3 * matrix_bytes(k, hidden, format))

    def make(seed: int) -> Any:
        keys = jax.random.split(jax.random.key(seed))
        pair = random_stack(keys[0], lead=(2, *lead), k=k, n=hidden, format=format)
        return pair, random_stack(keys[1], lead=lead, k=hidden, n=k, format=format)

    return [make(seed) for seed in range(count)]


def moe_cell(
    model: Model, backend: str, tokens: int, stacks: list[Any], *, whole: bool = True
) -> Cell:
    """A whole MLP, or only its products."""
    format = None if backend == "xla" else parse_format(model.format)
    read = active(model, tokens) * 3 * matrix_bytes(model.k, model.hidden, format)
    count = min(len(stacks), copies(read))
    rows = tokens * (1 if whole else model.top)
    rotated = []
    for seed in range(max(count, 4)):
        weight = jnp.full((tokens, model.top), 1 / model.top, jnp.float32)
        expert = jnp.asarray(choices(model, tokens, seed))
        routed = (expert, weight) if whole else (sizes(model, tokens, seed),)
        rotated.append((*stacks[seed % count], *routed))
    x = jax.random.normal(jax.random.key(tokens), (rows, model.k), jnp.bfloat16)
    operations = 6 * tokens * model.top * model.k * model.hidden
    call = moe_products if not whole else our_moe if format else xla_moe
    return Cell(call, x, rotated, read, operations)


def check_moe(cell: Cell) -> float:
    """The error of the first token, or row, in units of 2 % of its largest element."""
    gate_up, down, *routed = cell.weights[0]
    got = jax.jit(cell.call)(cell.x, cell.weights[0])[0].astype(jnp.float32)
    if cell.call is moe_products:
        (sizes,) = routed
        chosen = [(int(np.argmax(np.asarray(sizes) > 0)), 1.0)]
    else:
        expert, weight = routed
        chosen = list(zip(map(int, expert[0]), weight[0], strict=True))
    x, want = cell.x[0].astype(jnp.float32), jnp.zeros(got.shape)
    highest = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    for e, factor in chosen:
        if isinstance(down, QuantizedArray):
            gate, up = gate_up[:, e].dequantize(jnp.float32)
            last = down[e].dequantize(jnp.float32)
        else:
            gate, up = jnp.split(gate_up[e].astype(jnp.float32), 2, axis=-1)
            last = down[e].astype(jnp.float32)
        hidden = jax.nn.silu(highest(x, gate)) * highest(x, up)
        want += factor * highest(hidden, last)
    return float(jnp.max(jnp.abs(got - want)) / (0.02 * jnp.max(jnp.abs(want))))


# --- humming --------------------------------------------------------------------------------------


class Humming:
    """The process that times humming's products, and its successors when a kernel breaks it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._missing = False

    def rows(self, name: str, model: Model, tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Rows as they are measured; none without the package."""
        shapes = {part: (k, n) for part, k, n in product_shapes(model)}
        for text in product_formats(model):
            asked = [(part, count) for part in shapes for count in tokens]
            while asked and self._start():
                for answer in self._answers(model, text, asked):
                    part, count = asked.pop(0)
                    k, n = shapes[part]
                    read = active(model, count) * matrix_bytes(k, n, parse_format(text))
                    floor = floor_us(read, 2 * count * model.top * k * n)
                    row = {"shape": name, "backend": "humming", "format": text}
                    yield row | {"floor_us": floor, "bytes": read} | answer

    def _answers(
        self, model: Model, format: str, asked: Sequence[tuple[str, int]]
    ) -> Iterator[dict[str, Any]]:
        """Answers in order, all unless the process ends; if it ends early the last one says so."""
        assert self._process and self._process.stdin and self._process.stdout
        tokens = {part: [count for of, count in asked if of == part] for part, _ in asked}
        request = {"model": model, "format": format, "tokens": tokens}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        for part, count in tuple(asked):
            line = self._process.stdout.readline()
            answer = json.loads(line) if line else None
            usable = answer is not None and answer.pop("usable")
            if not usable:
                self.close()
            reason = "its process ended; see what it printed"
            yield answer or {"part": part, "tokens": count, "us": None, "error": reason}
            if not usable:
                return

    def _start(self) -> bool:
        """Whether the process runs; prints once why it cannot."""
        if self._process or self._missing:
            return not self._missing
        missing = [name for name in ("torch", "humming") if not importlib.util.find_spec(name)]
        reason = f"this Python has no package {' and no '.join(missing)}"
        if not missing:
            paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
            path = os.pathsep.join(filter(None, paths))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "peers.humming_worker"],
                env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._process.stdout
            line = self._process.stdout.readline()
            reason = json.loads(line) if line else "its process ended; see what it printed"
        if reason:
            self.close()
            self._missing = True
            print(f"humming is not timed: {reason}.")
        return not self._missing

    def close(self) -> None:
        if self._process:
            self._process.communicate()
            self._process = None


# --- the table ------------------------------------------------------------------------------------


def timed(cell: Cell, error: float, most_calls: int) -> dict[str, Any]:
    """The fields of a row with its time, of programs of up to `most_calls` and twice as many."""
    if not error <= 1:
        raise WrongResultError(f"wrong by {error:.3g} bounds")
    count, expected = len(cell.weights), max(cell.floor_us, 1)
    if cell.call in (xla, xla_moe):
        expected *= XLA_SLOWNESS
    calls = min(most_calls, max(1, round(PROGRAM_US / expected)))
    time = timing.microseconds_per_call(cell.call, cell.x, cell.weights, calls)
    return {
        "us": time.median,
        "quartiles_us": list(time.quartiles),
        "floor_us": cell.floor_us,
        "bytes": cell.bytes,
        "copies": count,
        "calls": calls,
        "error_over_bound": error,
    }


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows as they are measured; a cell that fails has an error instead of a time."""
    models = SMALL if options.dry_run else {name: MODELS[name] for name in options.models}
    humming = Humming()
    for name, model in models.items():
        for backend in options.backends:
            if backend == "humming":
                if options.products and not options.dry_run:
                    yield from humming.rows(name, model, options.tokens)
                continue
            row = {"shape": name, "backend": backend}
            if options.products:
                formats = ("bfloat16",) if backend == "xla" else product_formats(model)
                for format in formats:
                    same = model if backend == "xla" else model._replace(format=format)
                    for product, k, n, stacks in products(same, backend):
                        make = functools.partial(product_cell, k=k, n=n, stacks=stacks)
                        cells = row | {"format": format, "part": product}
                        yield from _row_of(options, cells, same, make, check_product)
                        del make, stacks
            row |= {"format": "bfloat16" if backend == "xla" else model.format}
            if options.moe:
                stacks = mlp_stacks(model, backend)
                make = functools.partial(moe_cell, stacks=stacks)
                yield from _row_of(options, row | {"part": "moe"}, model, make, check_moe)
                if backend != "xla":
                    make = functools.partial(make, whole=False)
                    cells = row | {"part": "moe products"}
                    yield from _row_of(options, cells, model, make, check_moe)
                del make, stacks
    humming.close()


def _row_of(
    options: argparse.Namespace,
    row: dict[str, Any],
    model: Model,
    make: Callable[..., Cell],
    check: Callable[[Cell], float],
) -> Iterator[dict[str, Any]]:
    for tokens in options.tokens:
        found = row | {"tokens": tokens}
        try:
            cell = make(model, row["backend"], tokens)
            yield found | timed(cell, check(cell), 1 if options.dry_run else MOST_CALLS)
        except (WrongResultError, jax.errors.JaxRuntimeError) as error:
            yield found | {"us": None, "error": str(error).splitlines()[0][:200]}


def markdown(rows: Sequence[dict[str, Any]], tokens: Sequence[int]) -> str:
    """A table: a line for each product and backend, a column for each number of tokens, in us."""
    lines = [f"| part | backend | {' | '.join(map(str, tokens))} |"]
    lines.append("|---|---|" + "---|" * len(tokens))
    times = {(r["shape"], r["part"], r["backend"], r["format"], r["tokens"]): r for r in rows}
    named = dict.fromkeys(key[:-1] for key in times)
    floors = dict.fromkeys(
        (*name[:2], "floor", name[3]) for name in named if name[2] == "jaxlowbit"
    )
    for name in sorted([*named, *floors], key=lambda name: (*name[:2], name[2] != "jaxlowbit")):
        field = "floor_us" if name[2] == "floor" else "us"
        backend = "jaxlowbit" if name[2] == "floor" else name[2]
        found = [times.get((name[0], name[1], backend, name[3], count), {}) for count in tokens]
        cells = [row.get(field) for row in found]
        texts = ["-" if us is None else f"{us:,.1f}" for us in cells]
        lines.append(f"| {name[0]} {name[1]} | {name[2]}, {name[3]} | {' | '.join(texts)} |")
    for (shape, part, backend, format), cells in _differences(times, tokens).items():
        texts = ["-" if us is None else f"{us:,.1f}" for us in cells]
        lines.append(f"| {shape} {part} | {backend}, {format} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _differences(
    times: dict[tuple[Any, ...], dict[str, Any]], tokens: Sequence[int]
) -> dict[tuple[str, ...], list[float | None]]:
    """The time of each MLP that is not in its products, by number of tokens."""
    found: dict[tuple[str, ...], list[float | None]] = {}
    for shape, part, backend, format in dict.fromkeys(key[:-1] for key in times):
        if part != "moe products":
            continue
        key = shape, "not a product", backend, format
        for count in tokens:
            own, whole = (
                times.get((shape, name, backend, format, count), {}).get("us")
                for name in (part, "moe")
            )
            rest = None if whole is None or own is None else whole - own
            found.setdefault(key, []).append(rest)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--products", action="store_true", help="only products, unless --moe is given too")
    add("--moe", action="store_true", help="only MLPs, unless --products is given too")
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    add("--tokens", type=results.positive, nargs="+", default=list(TOKENS))
    add("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    add("--blocks", type=results.positive, default=5, help="samples of each time")
    add("--dry-run", action="store_true", help="small shapes and few samples, on any device")
    add("--out", type=Path, help="write the results here, as JSON")
    add("--markdown", type=Path, help="write the table here")
    options = parser.parse_args(arguments)
    if not options.products and not options.moe:
        options.products = options.moe = True
    timing.BLOCKS = options.blocks
    if options.dry_run:
        timing.BLOCKS, timing.BLOCK_SECONDS = 2, 0.0
    environment, rows = results.environment(), []
    print(results.describe(environment))
    for row in measure(options):
        rows.append(row)
        time = row["error"] if row["us"] is None else f"{row['us']:10.1f} us"
        print(
            f"{row['shape']:14s} {row['part']:12s} {row['backend']:10s} {row['format']:10s} "
            f"{row['tokens']:5d} tokens {time}",
            flush=True,
        )
        if options.out:
            results.write(options.out, {"environment": environment, "rows": rows})
    table = markdown(rows, options.tokens)
    print(table)
    if options.markdown:
        page = f"{results.describe(environment)}, us\n\n{table}"
        options.markdown.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
