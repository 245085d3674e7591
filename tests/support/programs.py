"""Random programs around the products: slices of buffers, updates in place, loops, shared weights.

XLA may pass a custom call pointers into larger buffers, at any element offset, and may alias its
result with its operands, depending on the whole program. `sample` therefore draws whole programs as
`Program` values, whose repr recreates them, and `check` compares their results with the reference
(`backend="xla"`).
"""

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from helpers import UNOPTIMIZED
from jax import lax
from scipy import ndimage

import jaxlowbit
from jaxlowbit import Format, QuantizedArray


class _Value:
    """A dataclass whose repr omits fields with default values."""

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclasses.dataclass(frozen=True, repr=False)
class View(_Value):
    """Rows in a buffer, from element `start` of "flat" or row `start` of "grid"."""

    buffer: str
    start: int = 0
    step: int = 0  # added to `start` in each turn of a loop
    dynamic: bool = False  # whether `start` is an operand of the program

    def last(self, turns: int) -> int:
        return self.start + self.step * max(turns - 1, 0)


class Kind(NamedTuple):
    """Input and output widths ("d" or "e") of a call, and its optional operands."""

    into: str
    out: str
    epilogue: bool = False  # a bias and an activation
    residual: bool = False
    weights: tuple[str, ...] = ("stack",)


# Shapes: "wide" is (d, e), "pair" (2, d, e), "down" (e, d), the others (d, d).
KINDS = {
    "matmul": Kind("d", "d", True, True),
    "wide": Kind("d", "e", True, True, ("wide",)),
    "glu": Kind("d", "e", True, False, ("pair",)),
    "matmuls": Kind("d", "d"),
    "mlp": Kind("d", "d", weights=("pair", "down")),
    "block": Kind("d", "d", False, True, ("stack", "pair", "down")),
    "permuted": Kind("d", "d", True, True, ("permuted",)),
    "transposed": Kind("e", "d", weights=("wide",)),
    "experts": Kind("d", "d", True, True),
    "ragged": Kind("d", "d", True),
    "vmap": Kind("d", "d", True),
    "remat": Kind("d", "d"),
}


# Loops over the stack, one turn per layer.
OVER_LAYERS = ("layers", "select")


@dataclasses.dataclass(frozen=True, repr=False)
class Call(_Value):
    """A call on m rows; its result is written to `out`, or returned if `out` is None."""

    kind: str
    m: int
    lhs: View
    out: View | None = None
    other: View | None = None  # destination of the second result
    joined: View | None = None  # source of the second half of lhs
    residual: View | None = None
    bias: bool = False
    activation: str | None = None
    wide_result: bool = False  # float32, if the result is returned
    index: int = 0  # of the matrix in the stack
    pick: str = "slice"  # how it is selected: "slice", "select", "turn" (of the loop) or "layer"
    store: str = "update"  # or "set" or "add", of `.at`


@dataclasses.dataclass(frozen=True, repr=False)
class Loop(_Value):
    """Calls in a loop: "fori", "while", "scan", "layers" (`lax.scan` over the stack), "select"
    (`jaxlowbit.scan` over it) or "cond" (executed if `turns` is not 0)."""

    kind: str
    turns: int
    body: tuple[Call, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Program(_Value):
    steps: tuple[Call | Loop, ...]
    d: int = 64
    e: int = 64
    dtype: str = "bfloat16"
    scale_dtype: str | None = None  # None: dtype
    bits: int = 4
    group_size: int = 64
    zero: Literal["none", "integer", "float"] = "none"
    layers: int = 2  # of the stack
    gap: int | None = None  # elements before each leaf in a flat buffer; None: separate leaves
    margin: int = 0  # columns of the grid beyond d
    donate: bool = False
    seed: int = 0  # of the values

    def calls(self) -> list[tuple[Call, int]]:
        """Each call, with the maximum number of times it runs."""
        found = []
        for step in self.steps:
            body, turns = (step.body, step.turns) if isinstance(step, Loop) else ((step,), 1)
            found += [(call, turns) for call in body]
        return found

    @property
    def format(self) -> Format:
        return Format(self.bits, self.group_size, self.zero)

    def width(self, letter: str) -> int:
        return self.d if letter == "d" else self.e


# --- operands -------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """NumPy operands of a program, and the places of its parameters in the flat buffers."""

    state: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]
    origin: np.ndarray  # zero, unknown to XLA at compile time
    places: dict[str, tuple[str, int, tuple[int, ...]]]


def operands(program: Program) -> Operands:
    rng = np.random.default_rng(program.seed)
    dtype = jnp.dtype(program.dtype)
    leaves = _leaves(program, rng)
    arrays, places = dict(leaves), {}
    if program.gap is not None:
        parts: dict[str, list[np.ndarray]] = {}
        for name, leaf in leaves.items():
            flat = parts.setdefault(str(leaf.dtype), [])
            start = sum(part.size for part in flat) + program.gap
            places[name] = (str(leaf.dtype), start, leaf.shape)
            flat += [np.zeros(program.gap, leaf.dtype), leaf.ravel()]
        arrays = {name: np.concatenate(flat) for name, flat in parts.items()}
    state = {
        name: rng.normal(size=shape).astype(dtype)
        for name, shape in _buffer_shapes(program).items()
    }
    return Operands(state, arrays, np.zeros((), np.int32), places)


def _buffer_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for call, turns in program.calls():
        kind = KINDS[call.kind]
        into, out = program.width(kind.into), program.width(kind.out)
        views = [(call.lhs, into), (call.joined, into)]
        views += [(view, out) for view in (call.out, call.other, call.residual)]
        for view, width in views:
            if view is None:
                continue
            end = view.last(turns) + call.m * (width if view.buffer == "flat" else 1) + 1
            size = max(end, shapes.get(view.buffer, (0,))[0])
            columns = (program.d + program.margin,) if view.buffer == "grid" else ()
            shapes[view.buffer] = (size, *columns)
    return shapes


def uniform_leaves(
    rng: np.random.Generator, lead: tuple[int, ...], k: int, n: int, format: Format, dtype: Any
) -> dict[str, np.ndarray]:
    """Words, scales and zeros of matrices of random codes, with columns of norm near 1.

    Scales have both signs: the mean of the codes would otherwise accumulate along rows of lhs.
    """
    n_blocks, k_blocks, levels = -(-n // 64), -(-k // 64), 2**format.bits
    groups = 1 if format.group_size == -1 else -(-64 * k_blocks // format.group_size)
    shape = (*lead, n_blocks, groups, 64)
    scale = math.sqrt(12 / k) / levels * rng.uniform(0.7, 1.3, shape)
    scale *= rng.choice([-1.0, 1.0], shape)
    # Uniform bits give uniform codes in any layout.
    words = (*lead, n_blocks, k_blocks, 128 * format.bits)
    leaves = {"packed": rng.integers(0, 2**32, words, np.uint32), "scale": scale.astype(dtype)}
    if format.zero == "integer":
        zero = levels / 2 + levels / 16 * rng.uniform(-1, 1, shape)
        leaves["zero"] = np.round(zero).astype(np.uint8)
    elif format.zero == "float":
        leaves["zero"] = ((1 - levels) / 2 * scale * rng.uniform(0.9, 1.1, shape)).astype(dtype)
    return leaves


def _times(leaves: dict[str, np.ndarray], factor: np.ndarray) -> dict[str, np.ndarray]:
    """Scales a weight by powers of two."""
    floats = [name for name, leaf in leaves.items() if leaf.dtype not in (np.uint32, np.uint8)]
    return leaves | {name: leaves[name] * factor.astype(leaves[name].dtype) for name in floats}


def _leaves(program: Program, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The parameters: weights with columns of norm near 1, biases and norms."""
    d, e = program.d, program.e
    shapes = {"stack": ((program.layers,), d, d), "wide": ((), d, e), "pair": ((2,), d, e)}
    shapes |= {"down": ((), e, d), "permuted": ((), d, d)}
    dtype = jnp.dtype(program.scale_dtype or program.dtype)
    used = {name for call, _ in program.calls() for name in KINDS[call.kind].weights}
    if any(isinstance(step, Loop) and step.kind in OVER_LAYERS for step in program.steps):
        used.add("stack")
    leaves: dict[str, np.ndarray] = {}
    for name, (lead, k, n) in shapes.items():
        if name not in used:
            continue
        found = uniform_leaves(rng, lead, k, n, program.format, dtype)
        if name == "pair":
            found = _times(found, np.array([1, 0.25]).reshape(2, 1, 1, 1))
        if name == "down":
            found = _times(found, np.array(2.0))
        leaves |= {f"{name}.{leaf}": value for leaf, value in found.items()}
        if name == "permuted":
            leaves["permuted.permutation"] = rng.permutation(k).astype(np.int32)
    for name, width in (("d", d), ("e", e)):
        leaves[f"bias.{name}"] = rng.normal(size=width).astype(dtype)
        leaves[f"norm.{name}"] = rng.uniform(0.5, 1.5, width).astype(dtype)
    needed = {f"bias.{KINDS[call.kind].out}" for call, _ in program.calls() if call.bias}
    if any(call.kind == "block" for call, _ in program.calls()):
        needed |= {"norm.d"}
    return {
        name: leaf
        for name, leaf in leaves.items()
        if not name.startswith(("bias", "norm")) or name in needed
    }


# --- tracing --------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Run:
    """A program with its operands, traced."""

    program: Program
    backend: Any
    arrays: dict[str, jax.Array]
    origin: jax.Array
    places: dict[str, tuple[str, int, tuple[int, ...]]]
    factors: jax.Array | None  # multiply the elements of each lhs

    def steps(self, state: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        results = []
        for step in self.program.steps:
            state, more = (
                self.loop(step, state) if isinstance(step, Loop) else self.call(step, state)
            )
            results += more
        return state, results

    def loop(self, loop: Loop, state: Any) -> tuple[Any, list[jax.Array]]:
        def body(state: Any, turn: Any, layer: Any = None) -> tuple[Any, list[jax.Array]]:
            results = []
            for call in loop.body:
                state, more = self.call(call, state, turn, layer)
                results += more
            return state, results

        turns = jnp.arange(loop.turns, dtype=jnp.int32)
        if loop.kind == "fori":
            return lax.fori_loop(0, loop.turns, lambda i, x: body(x, i)[0], state), []
        if loop.kind == "while":
            end = loop.turns + self.origin
            turn = lambda x: (x[0] + 1, body(x[1], x[0])[0])  # noqa: E731
            return lax.while_loop(lambda x: x[0] < end, turn, (jnp.int32(0), state))[1], []
        if loop.kind == "cond":
            return lax.cond(
                self.origin < loop.turns, lambda x: body(x, self.origin)[0], lambda x: x, state
            ), []
        if loop.kind == "scan":
            return lax.scan(lambda x, i: body(x, i), state, turns)
        scan = {"layers": lax.scan, "select": jaxlowbit.scan}[loop.kind]
        return scan(lambda x, xs: body(x, *xs), state, (turns, self.weight("stack")))

    def call(
        self, call: Call, state: Any, turn: Any = 0, layer: Any = None
    ) -> tuple[Any, list[jax.Array]]:
        kind = KINDS[call.kind]
        into, out = self.program.width(kind.into), self.program.width(kind.out)
        if call.joined is None:
            lhs = self.read(state, call.lhs, (call.m, into), turn)
        else:
            half = call.m // 2
            first = self.read(state, call.lhs, (call.m - half, into), turn)
            lhs = jnp.concatenate([first, self.read(state, call.joined, (half, into), turn)])
        if self.factors is not None:
            # Each turn of a loop uses different factors.
            lhs *= lax.dynamic_slice(self.factors, (turn,), (lhs.size,)).reshape(lhs.shape)
        addends: dict[str, Any] = {}
        if call.bias:
            addends["bias"] = self.leaf(f"bias.{kind.out}")
        if call.residual is not None:
            addends["residual"] = self.read(state, call.residual, (call.m, out), turn)
        if call.activation is not None:
            addends["activation"] = call.activation
        results = self.product(call, lhs, turn, layer, addends)
        rest = []
        for view, result in zip((call.out, call.other), results, strict=False):
            if view is None:
                rest.append(result)
            else:
                state = self.write(state, view, result, turn, call.store)
        return state, rest

    def product(
        self, call: Call, lhs: jax.Array, turn: Any, layer: Any, addends: dict[str, Any]
    ) -> tuple[jax.Array, ...]:
        options = {"backend": self.backend}
        matmul = functools.partial(jaxlowbit.quantized_matmul, **options)
        typed = {"preferred_element_type": jnp.float32} if call.wide_result else {}
        m, d, kind = call.m, self.program.d, call.kind
        if kind in ("wide", "permuted"):
            return (matmul(lhs, self.weight(kind), **addends, **typed),)
        if kind == "glu":
            bias = addends.pop("bias", None)
            both = None if bias is None else jnp.stack([bias, -bias])
            addends.setdefault("activation", "silu")
            glu = jaxlowbit.quantized_glu
            return (glu(lhs, self.weight("pair"), bias=both, **addends, **typed, **options),)
        if kind == "mlp":
            mlp = jaxlowbit.quantized_mlp
            weights = {"gate_up": self.weight("pair"), "down": self.weight("down")}
            return (mlp(lhs, **weights, **typed, **options),)
        if kind == "transposed":
            like = jax.ShapeDtypeStruct((m, d), lhs.dtype)
            wide = self.weight("wide")
            return tuple(jax.linear_transpose(lambda x: matmul(x, wide), like)(lhs))
        if kind in ("experts", "vmap", "ragged"):
            stack = self.weight("stack")
            if kind == "ragged":
                return (self.ragged(call, lhs, stack, addends | typed | options),)
            if kind == "vmap":
                index = (np.arange(m, dtype=np.int32) + call.index) % stack.shape[0] + self.origin
                return (jax.vmap(lambda x, i: matmul(x, stack.select(i), **addends))(lhs, index),)
            experts = next(count for count in (4, 3, 2, 1) if m % count == 0)
            index = (3 * np.arange(experts, dtype=np.int32) + call.index) % stack.shape[0]
            shape = (experts, m // experts, d)
            if "bias" in addends:
                addends["bias"] = jnp.broadcast_to(addends["bias"], (experts, d))
            if "residual" in addends:
                addends["residual"] = addends["residual"].reshape(shape)
            rhs = stack.select(index + self.origin)
            return (matmul(lhs.reshape(shape), rhs, **addends, **typed).reshape(m, d),)
        square = self.square(call, turn, layer)
        if kind == "matmul":
            return (matmul(lhs, square, **addends, **typed),)
        if kind == "matmuls":
            pair = (square, self.weight("stack").select(0))
            return jaxlowbit.quantized_matmuls(lhs, pair, **typed, **options)
        if kind == "remat":
            f = jax.checkpoint(lambda x: jnp.tanh(matmul(x, square)))
            return jax.vjp(f, lhs)[1](lhs[::-1])
        residual = addends.get("residual", lhs)
        norm = self.leaf("norm.d")
        y, (following,) = jaxlowbit.quantized_block(
            lhs,
            residual,
            out=square,
            norm=norm,
            gate_up=self.weight("pair"),
            down=self.weight("down"),
            following=(norm, (self.weight("stack").select(0),)),
            **options,
        )
        return y, following

    def ragged(self, call: Call, lhs: jax.Array, stack: QuantizedArray, options: Any) -> jax.Array:
        """Rows in two groups, the others empty; the last one ends behind the rows."""
        sizes = np.zeros(stack.shape[0], np.int32)
        sizes[call.index], sizes[call.index - 1] = call.m - call.m // 3, call.m // 3
        sizes[-1] += 3
        if "bias" in options:
            shape = (*stack.shape[:1], self.program.d)
            options["bias"] = jnp.broadcast_to(options["bias"], shape)
        return jaxlowbit.quantized_ragged_dot(lhs, stack, sizes + self.origin, **options)

    def square(self, call: Call, turn: Any, layer: Any) -> QuantizedArray:
        if call.pick == "layer":
            return layer
        stack = self.weight("stack")
        if call.pick == "slice":
            return stack[call.index]
        return stack.select(call.index if call.pick == "select" else turn)

    def leaf(self, name: str) -> jax.Array:
        if name not in self.places:
            return self.arrays[name]
        buffer, start, shape = self.places[name]
        end = start + math.prod(shape)
        return lax.slice(self.arrays[buffer], (start,), (end,)).reshape(shape)

    def weight(self, name: str) -> QuantizedArray:
        p = self.program
        k, n = {"stack": "dd", "permuted": "dd", "down": "ed"}.get(name, "de")
        packed = self.leaf(f"{name}.packed")
        return QuantizedArray(
            packed=packed,
            scale=self.leaf(f"{name}.scale"),
            zero=None if p.zero == "none" else self.leaf(f"{name}.zero"),
            index=None,
            version=jnp.ones(packed.shape[:-3], jnp.uint32),
            format=p.format,
            k=p.width(k),
            n=p.width(n),
            permutation=self.leaf("permuted.permutation") if name == "permuted" else None,
        )

    def start(self, view: View, turn: Any) -> Any:
        start = view.start + view.step * turn if view.step else view.start
        return start + self.origin if view.dynamic else start

    def read(self, state: Any, view: View, shape: tuple[int, int], turn: Any) -> jax.Array:
        buffer, start = state[view.buffer], self.start(view, turn)
        at, size = (start,), (math.prod(shape),)
        if view.buffer == "grid":
            at, size = (start, self.program.margin // 2), shape
        if isinstance(start, int):
            ends = [first + count for first, count in zip(at, size, strict=True)]
            return lax.slice(buffer, at, ends).reshape(shape)
        return lax.dynamic_slice(buffer, at, size).reshape(shape)

    def write(self, state: Any, view: View, value: jax.Array, turn: Any, store: str) -> Any:
        buffer, start = state[view.buffer], self.start(view, turn)
        at = (start,)
        if view.buffer == "grid":
            at = (start, self.program.margin // 2)
        else:
            value = value.reshape(-1)
        value = value.astype(buffer.dtype)
        if store == "update" or not isinstance(start, int):
            new = lax.dynamic_update_slice(buffer, value, at)
        else:
            where = tuple(
                slice(first, first + count) for first, count in zip(at, value.shape, strict=True)
            )
            new = getattr(buffer.at[where], store)(value)
        return {**state, view.buffer: new}


def function(program: Program, backend: Any, places: Any) -> Callable[..., Any]:
    """(state, arrays, origin) -> (state, results)."""

    def run(state: Any, arrays: Any, origin: Any, factors: Any = None) -> Any:
        return _Run(program, backend, arrays, origin, places, factors).steps(state)

    return run


# --- the comparison -------------------------------------------------------------------------------


def unit(dtype: Any, k: int) -> float:
    """Relative rounding error of a product of k terms."""
    return float(ml_dtypes.finfo(dtype).eps) + 4 * math.sqrt(k) * 2.0**-24


def bound(want: np.ndarray, dtype: Any, k: int, products: int = 1) -> np.ndarray:
    """Bound on the difference of an element between two correct computations.

    Both start from values of `dtype` near 1 and chain `products` products of at most k terms, with
    weight columns of norm near 1. Each product rounds its weights and its result by half an `eps`
    of the value, and adds in a different order. An element inherits a sum of many such errors of
    both signs, so the error grows as the square root of the number of products, and as the square
    root of k within a sum. Values that a gate made small inherit the errors of larger ones, hence a
    minimum size. A missing value is off by about the root mean square: 20 of these bounds after
    one product in bfloat16.
    """
    size = np.abs(want) + max(np.sqrt(np.mean(np.square(want))), 0.25)
    return 6 * unit(dtype, k) * math.sqrt(products) * size


class Report(NamedTuple):
    worst: float  # maximum ratio of error to bound
    text: str  # the compiled program
    replayed: bool | None  # whether the last run executed no calls; None if not counted


def check(program: Program, runs: int = 1, executions: Callable[[], int] | None = None) -> Report:
    """Runs a program and compares each run with the reference.

    `executions` returns the number of calls executed so far; a replayed graph executes none.

    **Raises:** `AssertionError` with the program's repr if they differ.
    """
    given = operands(program)
    want, within = _definition(program, given)
    state, arrays, origin, places = given
    donated = 0 if program.donate else ()
    jitted = jax.jit(function(program, None, places), donate_argnums=donated)
    rest = jax.device_put((arrays, origin))
    compiled = jitted.lower(jax.device_put(state), *rest).compile()
    worst, counts, first = 0.0, [], None
    for _ in range(runs):
        before = executions() if executions else 0
        got = jax.block_until_ready(compiled(jax.device_put(state), *rest))
        counts.append(executions() - before if executions else 0)
        worst = max(worst, _assert_close(program, jax.tree.map(np.asarray, got), want, within))
        # Keeping the first result moves the buffers of the second run; later runs reuse them.
        first = first or got
        del got
    replayed = counts[0] > 0 == counts[-1] if executions else None
    return Report(worst, compiled.as_text() or "", replayed)


def _definition(program: Program, given: Operands) -> tuple[Any, Any]:
    """Reference results of a program, and the tolerance of each element.

    The error an element inherits from earlier products depends on the values: a gate multiplies
    them by each other, so rows and their errors diverge. The tolerance is therefore measured: four
    runs perturb the elements of each lhs by `unit`, about three times the rounding of a product.
    The tolerance is twice the largest change of the element or its neighbours (mostly of the same
    row), and at least the bound of one product. None of 1,155 programs needed more than 0.57 of it
    on a CPU.
    """
    dtype, k = jnp.dtype(program.dtype), max(program.d, program.e)
    size = max(call.m * program.width(KINDS[call.kind].into) + n for call, n in program.calls())
    signs = np.random.default_rng(program.seed).choice([-1.0, 1.0], (4, size))
    factors = 1 + unit(dtype, k) * np.concatenate([np.zeros((1, size)), signs])
    oracle = jax.jit(function(program, "xla", given.places), compiler_options=UNOPTIMIZED)
    rest = (given.state, given.arrays, given.origin, factors.astype(dtype))
    *rest, factors = jax.device_put(rest, jax.devices("cpu")[0])
    want, *moved = (jax.tree.map(np.asarray, oracle(*rest, each)) for each in factors)
    finite = jax.tree.map(lambda leaf: bool(np.isfinite(leaf).all()), (want, moved))
    assert all(jax.tree.leaves(finite)), f"what is not finite by definition is in\n{program}"

    def within(exact: np.ndarray, *moved: np.ndarray) -> np.ndarray:
        if not exact.size:
            return exact
        exact = exact.astype(np.float64)
        far = np.max([np.abs(one.astype(np.float64) - exact) for one in moved], axis=0)
        far = ndimage.maximum_filter1d(far.ravel(), 33).reshape(far.shape)
        return np.maximum(bound(exact, dtype, k), 2 * far)

    return want, jax.tree.map(within, want, *moved)


def _assert_close(program: Program, got: Any, want: Any, within: Any) -> float:
    """Returns the maximum ratio of error to bound."""
    worst = 0.0
    arrays, _ = jax.tree_util.tree_flatten_with_path(want)
    leaves = jax.tree.leaves(got), jax.tree.leaves(within)
    for (path, exact), one, limit in zip(arrays, *leaves, strict=True):
        name = f"{jax.tree_util.keystr(path)} of (buffers, results)"
        assert one.shape == exact.shape and one.dtype == exact.dtype, f"{name} in\n{program}"
        if not exact.size:
            continue
        exact, one = exact.astype(np.float64), one.astype(np.float64)
        error = np.nan_to_num(np.abs(one - exact) / limit, nan=np.inf)
        at = np.unravel_index(error.argmax(), error.shape)
        assert error[at] <= 1, (
            f"{np.sum(error > 1)} of {error.size} elements of {name} differ, the worst "
            f"{error[at]:.3g} bounds at {tuple(map(int, at))}: {one[at]} for {exact[at]} in\n"
            f"{program}"
        )
        worst = max(worst, float(error[at]))
    return worst


# --- drawing --------------------------------------------------------------------------------------

# Simplest first: `rng` is driven by hypothesis, which shrinks to the first values.
_SIZES = (64, 128, 192, 256, 320, 512, 72, 136, 200, 33, 67, 100)
_ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 24, 33, 40, 1, 4, 16, 40, 0, 70, 128, 200, 300)
_GROUPS = (64, -1, 16, 32, 48, 128, 256, 1024)
_ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh", "relu")


def sample(rng: random.Random, large: bool = False) -> Program:
    """Draws a program; with `large`, one in 8 has more tiles than a GPU runs at once."""
    size = rng.choice(_SIZES)
    program = Program(
        steps=(),
        d=size,
        e=rng.choice(_SIZES),
        dtype=rng.choice(("bfloat16", "bfloat16", "float16", "float32")),
        bits=rng.choice((4, 4, 8, 4, 8, 3, 2, 1, 5, 6, 7)),
        group_size=rng.choice(_GROUPS),
        zero=rng.choice(("none", "integer", "float")),
        layers=rng.choice((2, 3, 4)),
        gap=rng.choice((None, None, 0, 1, 2, 3, 8)),
        margin=rng.choice((0, 0, 0, 1, 8)),
        donate=rng.choice((False, True)),
        seed=rng.randrange(1000),
    )
    if program.bits == 1:
        # Otherwise both values have one sign, and sums are far from 1.
        program = dataclasses.replace(program, zero="float")
    if _one_in(rng, 5):
        program = dataclasses.replace(program, scale_dtype="float32")
    if large and _one_in(rng, 8):
        program = dataclasses.replace(program, d=rng.choice((1024, 2048)), bits=rng.choice((4, 8)))
    steps: list[Call | Loop] = []
    for _ in range(rng.choice((1, 2, 3))):
        kind = rng.choice((None, None, None, "fori", "while", "cond", "scan", "layers", "select"))
        if kind is None:
            steps.append(_sample_call(rng, program, None, 1))
            continue
        turns = program.layers if kind in OVER_LAYERS else rng.choice((2, 3, 1, 4))
        if kind == "cond":
            turns = rng.choice((1, 1, 0))
        body = tuple(_sample_call(rng, program, kind, turns) for _ in range(rng.choice((1, 1, 2))))
        steps.append(Loop(kind, turns, body))
    return dataclasses.replace(program, steps=tuple(steps))


def _one_in(rng: random.Random, count: int) -> bool:
    return rng.randrange(count) == count - 1


def _sample_call(rng: random.Random, program: Program, loop: str | None, turns: int) -> Call:
    name = rng.choice(("matmul", "matmul", *KINDS))
    kind, m = KINDS[name], rng.choice(_ROWS)
    into, out = program.width(kind.into), program.width(kind.out)
    if program.d > 512 and m == 200:
        m = 520
    moves = loop is not None and turns > 1
    view = functools.partial(_sample_view, rng, program, m, moves=moves)
    lhs = view(into)
    # Loops that return no results write all of them to buffers.
    stored = loop in ("fori", "while", "cond") or not _one_in(rng, 4)
    picks = ["slice", "select"]
    if loop is not None:
        picks.append("turn")
    if loop in OVER_LAYERS:
        picks += 3 * ["layer"]
    call = Call(
        name,
        m,
        lhs,
        out=view(out, like=lhs) if stored else None,
        index=rng.randrange(program.layers),
        pick=rng.choice(picks),
        store=rng.choice(("update", "update", "set", "add")),
        wide_result=not stored
        and name not in ("block", "remat", "vmap", "transposed")
        and _one_in(rng, 3),
    )
    changes: dict[str, Any] = {}
    if stored and name in ("matmuls", "block"):
        changes["other"] = view(out, like=lhs)
    if _one_in(rng, 5):
        changes["joined"] = view(into, like=lhs)
    if kind.residual and _one_in(rng, 2):
        changes["residual"] = view(out, like=call.out or lhs)
    if kind.epilogue and _one_in(rng, 2):
        changes |= {"bias": rng.choice((False, True)), "activation": rng.choice(_ACTIVATIONS)}
    return dataclasses.replace(call, **changes)


def _sample_view(
    rng: random.Random,
    program: Program,
    m: int,
    width: int,
    *,
    moves: bool,
    like: View | None = None,
) -> View:
    """Draws rows that often coincide with `like` or overlap it."""
    names = ("grid", "flat") if width == program.d else ("flat",)
    if like is not None and like.buffer in names and not _one_in(rng, 5):
        buffer = like.buffer
    else:
        buffer, like = rng.choice(names), None
    row = 1 if buffer == "grid" else width
    shift = rng.choice((0, 0, 0, row, 1, 3, m * row, 8, (m // 2) * row))
    step = rng.choice((m * row, row, 1, 0)) if moves else 0
    if like is not None and not _one_in(rng, 3):
        step = like.step
    start = shift if like is None else like.start + shift
    return View(buffer, start, step, dynamic=_one_in(rng, 3))
