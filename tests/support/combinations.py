"""Weights x scales x zeros x lhs x epilogues: a sample of the combinations, and a test of one.

`COMBINATIONS` covers every compatible pair of values of `DIMENSIONS`, and every triple that
decides which kernels there are (`TRIPLES`). `check` computes one on one backend: its product
against the float64 oracle, the product of an identity, and sums of integers.
`tools/run_combinations.py` runs them all and writes the table of
`docs/measurements/combinations.md`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from helpers import PLATFORM, UNOPTIMIZED, Oracle, dequantize, dequantized, finished, reasons
from pairwise import covering
from problems import Problem, generator, weights

import jaxlowbit as jl
from jaxlowbit import QuantizedActivations, QuantizedArray

INTEGERS = {f"int{bits}": bits for bits in range(1, 9)}
FLOATS = {"nf4": 4, "fp4": 4, "e2m1": 4, "e4m3": 8, "e5m2": 8}
TABLES = {f"table of {2**bits}": bits for bits in range(1, 9)}  # user codebooks
BITS = INTEGERS | FLOATS | TABLES

WIDE_SCALES = ("16 bits", "float32")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
QUANTIZED = ("int8", "float8_e4m3fn")

DIMENSIONS: Mapping[str, tuple[Any, ...]] = {
    "weights": tuple(BITS),
    "scales": (*WIDE_SCALES, "e8m0", "e4m3", "int8", "two_level"),
    "lhs": ("bfloat16", "float16", "float32", *QUANTIZED),
    "zero": ("none", "integer", "float"),
    "group": (-1, 16, 32, 48, 64, 96, 128),
    "epilogue": ("none", "bias", *ACTIVATIONS, "residual", "all", "gated"),
    "rows": (1, 5, 40, 200),
    # (k, n): whole atoms of 64, partial atoms, and rows aligned to 8 bytes or unaligned.
    "shape": ((256, 192), (512, 320), (328, 200), (259, 193)),
    "result": ("lhs", "float32"),
}
TRIPLES = (("family", "scales", "lhs"), ("family", "zero", "lhs"), ("family", "scales", "zero"))

# Magnitude of results: epilogues are nonlinear there, and pairs do not overflow float16.
SIZE = 4.0
_MOST_CALLS = 40  # per identity; with fewer rows per call, only some rows are computed
_LEAST = float(ml_dtypes.finfo("float32").smallest_normal)


@dataclasses.dataclass(frozen=True)
class Combination:
    weights: str
    scales: str
    lhs: str
    zero: str
    group: int
    epilogue: str
    rows: int
    shape: tuple[int, int]
    result: str

    @property
    def name(self) -> str:
        group = "channel" if self.group == -1 else f"groups of {self.group}"
        zero = "" if self.zero == "none" else f", {self.zero} zeros"
        epilogue = "" if self.epilogue == "none" else f", {self.epilogue}"
        result = "" if self.result == "lhs" else f" -> {self.result}"
        k, n = self.shape
        return (
            f"{self.rows} x {k} x {n}: {self.lhs} by {self.weights}, {group}, scales {self.scales}"
            f"{zero}{epilogue}{result}"
        )

    @property
    def codebook(self) -> str | tuple[float, ...] | None:
        if self.weights in INTEGERS:
            return None
        if self.weights in FLOATS:
            return self.weights
        count = 2 ** BITS[self.weights]
        return tuple(np.random.default_rng(count).standard_normal(count).tolist())

    @property
    def gated(self) -> bool:
        return self.epilogue == "gated"

    @property
    def dtype(self) -> str:
        """The dtype of activations, and of results that are not float32."""
        return "bfloat16" if self.lhs in QUANTIZED else self.lhs

    @property
    def problem(self) -> Problem:
        narrow = None if self.scales in WIDE_SCALES else self.scales
        wide = "float16" if self.lhs == "float16" else "bfloat16"
        problem = Problem(
            self.name,
            self.rows,
            *self.shape,
            BITS[self.weights],
            self.group,
            cast(Any, self.zero),
            self.codebook,
            cast(Any, narrow),
            self.dtype,
            scale_dtype="float32" if self.scales == "float32" else wide,
            stack=(2,) if self.gated else (),
        )
        numbers = np.array(problem.format.values or [2.0 ** (problem.bits - 1)])
        return dataclasses.replace(problem, scale=1 / np.abs(numbers[np.isfinite(numbers)]).max())


# --- selection ------------------------------------------------------------------------------------

Values = Mapping[str, Any]


def accepted(values: Values) -> bool:
    """Whether these values are compatible, and some value of every other dimension with them."""
    weights, scales, lhs = (values.get(name) for name in ("weights", "scales", "lhs"))
    integers = weights is None or weights in INTEGERS
    zero = values.get("zero", "none")
    with_zeros = (
        scales is None or scales in WIDE_SCALES or (scales == "two_level" and zero == "float")
    )
    if zero != "none" and not (integers and with_zeros):
        return False
    if scales == "two_level" and values.get("group", 16) not in (16, 32, 64, 128):
        return False  # these divide a super-block
    if scales == "int8" and weights not in (None, "int2", "int3", "int4"):
        return False
    if values.get("epilogue") == "gated" and lhs in QUANTIZED:
        return False  # quantized_glu takes floats
    return not (lhs == values.get("result") == "float32")  # "lhs" already means float32


def family(weights: str) -> str:
    """Groups weights that share kernels: CUDA kernels look up tables of up to 32 numbers."""
    if weights not in TABLES:
        return weights
    return "small tables" if TABLES[weights] <= 5 else "large tables"


def _aspects(values: Values) -> dict[str, Any]:
    return {**values, **({"family": family(values["weights"])} if "weights" in values else {})}


_COVERED = (*TRIPLES, *itertools.combinations(DIMENSIONS, 2))


def _touching(name: str) -> list[tuple[str, ...]]:
    own = {name, "family"} if name == "weights" else {name}
    return [names for names in _COVERED if own & {*names}]


def covered(
    values: Values, sets: Iterable[tuple[str, ...]] = _COVERED
) -> Iterator[tuple[Any, ...]]:
    """The aspects that these values of some dimensions cover."""
    aspects = _aspects(values)
    for names in sets:
        if all(name in aspects for name in names):
            yield tuple((name, aspects[name]) for name in names)


def required() -> dict[tuple[Any, ...], Values]:
    """Every aspect to cover, with values of its dimensions."""
    found: dict[tuple[Any, ...], Values] = {}
    for names in _COVERED:
        plain = ["weights" if name == "family" else name for name in names]
        for row in itertools.product(*(DIMENSIONS[name] for name in plain)):
            if accepted(values := dict(zip(plain, row, strict=True))):
                (part,) = covered(values, [names])
                found.setdefault(part, values)
    return found


def _chosen() -> Iterator[Combination]:
    """Greedy cover: for each uncovered aspect, sets every other dimension to the value that
    covers most with it; among equals, to the value used least often."""
    missing = required()
    touching = {name: _touching(name) for name in DIMENSIONS}
    taken = {(name, value): 0 for name, options in DIMENSIONS.items() for value in options}

    def gain(values: Values, name: str) -> tuple[int, int]:
        found = sum(part in missing for part in covered(values, touching[name]))
        return found, -taken[name, values[name]]

    while missing:
        part, values = next(iter(missing.items()))
        goal = dict(part)
        values = {name: value for name, value in values.items() if name in goal}
        for name, options in DIMENSIONS.items():
            if name in values:
                continue
            more = [{**values, name: value} for value in options]
            if name == "weights" and "family" in goal:
                more = [x for x in more if family(x["weights"]) == goal["family"]]
            values = max(filter(accepted, more), key=functools.partial(gain, name=name))
        for found in covered(values):
            missing.pop(found, None)
        for item in values.items():
            taken[item] += 1
        yield Combination(**values)


COMBINATIONS = tuple(_chosen())


def interpreted(count: int) -> list[Combination]:
    """Some combinations for Pallas, with small M because it is interpreted on the CPU."""
    few = (x for x in COMBINATIONS if x.rows <= 40 and "pallas" in claimed(x))
    chosen = covering(
        few,
        lambda x: {name: getattr(x, name) for name in ("weights", "zero", "lhs", "epilogue")},
    )
    return chosen[:count]


# --- one combination ------------------------------------------------------------------------------


class Operands(NamedTuple):
    lhs: Any  # floats, or QuantizedActivations
    rhs: QuantizedArray
    epilogue: dict[str, Any]  # arguments of the product
    exact: np.ndarray
    bound: np.ndarray


class Outcome(NamedTuple):
    error: float  # maximum ratio of error to bound in the product
    weights: int  # number that differ between the product of an identity and `dequantize`
    sums: int | None  # number of wrong integer sums; None if not applicable

    @property
    def right(self) -> bool:
        return self.error <= 1 and not self.weights and not self.sums


def claimed(combination: Combination) -> list[str]:
    """The backends that claim to support it on this machine."""
    # Quantized activations are values exact in bfloat16, times their scales.
    found = reasons(combination.dtype, combination.problem.format)
    return [name for name in (PLATFORM, "pallas", "xla") if found[name] is None]


def check(combination: Combination, backend: str) -> Outcome:
    c = combination
    lhs, rhs, epilogue, exact, bound = operands(c)
    product = jl.quantized_glu if c.gated else jl.quantized_matmul
    dtype = jnp.dtype("float32") if c.result == "float32" else None
    got = _jitted(product, backend)(lhs, rhs, **epilogue, preferred_element_type=dtype)
    assert got.shape == exact.shape and got.dtype == (dtype or c.dtype)
    error = np.abs(np.asarray(got).astype(np.float64) - exact) / bound
    return Outcome(
        float(np.nan_to_num(error, nan=np.inf).max()), _weights(c, backend), _sums(c, backend)
    )


@functools.lru_cache(maxsize=2)
def operands(combination: Combination) -> Operands:
    c = combination
    rng = generator(c.problem)
    rhs = weights(c.problem, rng)
    weight = dequantize(rhs)
    k, n = c.shape
    size = SIZE / math.sqrt(k * np.mean(weight.value**2))
    if c.lhs in QUANTIZED:
        integers = rng.integers(-127, 128, (c.rows, k), np.int8)
        floats = np.clip(64 * rng.normal(size=(c.rows, k)), -448, 448)
        values = integers if c.lhs == "int8" else floats.astype(jnp.float8_e4m3fn)
        scale = (size / 64 * rng.uniform(0.5, 1.5, (c.rows, 1))).astype(np.float32)
        lhs = QuantizedActivations(jnp.asarray(values), jnp.asarray(scale), jnp.dtype(c.dtype))
        oracle = Oracle.of(values.astype(jnp.bfloat16), weight).scaled(scale)
    else:
        lhs = jnp.asarray((size * rng.normal(size=(c.rows, k))).astype(jnp.dtype(c.dtype)))
        oracle = Oracle.of(lhs, weight)

    def normal(*shape: int, dtype: str = c.dtype) -> np.ndarray:
        return rng.normal(size=shape).astype(jnp.dtype(dtype))

    epilogue: dict[str, Any] = {}
    if c.epilogue in ("bias", "gated"):
        epilogue["bias"] = normal(2, n) if c.gated else normal(n)
    if c.epilogue == "residual":
        epilogue["residual"] = normal(c.rows, n)
    if c.epilogue == "all":
        epilogue["bias"] = normal(n, dtype="float32")
        epilogue |= {"activation": "gelu_tanh", "residual": normal(c.rows, n, dtype="float32")}
    if c.epilogue in ACTIVATIONS:
        epilogue["activation"] = c.epilogue
    dtype = "float32" if c.result == "float32" else c.dtype
    if c.gated:
        gate, up = (Oracle(*(x[i] for x in oracle)) for i in range(2))
        bias, other = epilogue["bias"]
        exact, bound = finished(gate, dtype, bias=bias, activation="silu", up=(up, other))
    else:
        exact, bound = finished(oracle, dtype, **epilogue)
    return Operands(lhs, rhs, epilogue, exact, bound)


@functools.cache
def _jitted(product: Any, backend: str) -> Any:
    interpreted = backend == "pallas" and PLATFORM == "cpu"
    return jax.jit(
        functools.partial(product, backend=backend),
        static_argnames=("activation", "preferred_element_type"),
        compiler_options=UNOPTIMIZED if interpreted else None,
    )


def _weights(combination: Combination, backend: str) -> int:
    """Number of weights that differ between the product of an identity and `dequantize`.

    The identity is multiplied in parts with the M of the combination, to use the same kernels.
    Signs of zeros are ignored, and subnormal float32 values count as 0.
    """
    c, rhs = combination, operands(combination).rhs
    k = c.shape[0]
    want = _plain(_dequantized(c))
    slack = _slack(c, want)
    starts = [*range(0, k - c.rows + 1, c.rows), k - c.rows]
    wrong = 0
    for start in starts[:: -(-len(starts) // _MOST_CALLS)]:
        rows = slice(start, start + c.rows)
        eye = np.eye(c.rows, k, start)
        if c.lhs in QUANTIZED:
            ones = np.ones((c.rows, 1), np.float32)
            lhs: Any = QuantizedActivations(eye.astype(jnp.dtype(c.lhs)), ones, jnp.dtype(c.dtype))
        else:
            lhs = eye.astype(jnp.dtype(c.dtype))
        got = _jitted(jl.quantized_matmul, backend)(lhs, rhs, preferred_element_type=None)
        missed = np.abs(_plain(got) - want[..., rows, :])
        wrong += int(np.sum(~(missed <= slack[..., rows, :])))
    return wrong


def _slack(combination: Combination, want: np.ndarray) -> np.ndarray:
    """Tolerance of a weight: one unit in the last place if it may be rounded once more (the tensor
    scale may multiply a rounded value) or once less (with a float zero, the product by a float32
    scale need not be rounded)."""
    c, info = combination, ml_dtypes.finfo(combination.dtype)
    fused = c.zero == "float" and c.scales == "float32"
    if not fused and not rounds_twice(c):
        return np.zeros_like(want)
    slack = float(info.eps) * np.abs(want) + float(info.smallest_subnormal)
    return slack + fused * 2.0**-23 * dequantize(operands(c).rhs).terms


def rounds_twice(combination: Combination) -> bool:
    """Whether a number times an e4m3 scale is inexact before the tensor scale multiplies it."""
    c = combination
    if c.scales != "e4m3":
        return False
    format = c.problem.format
    numbers = format.values or np.arange(2.0**format.bits) - format.offset
    scales = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
    products = np.outer(np.array(numbers)[np.isfinite(numbers)], scales)
    with np.errstate(over="ignore"):
        rounded = products.astype(jnp.dtype(c.dtype)).astype(np.float64)
    return bool((np.isfinite(rounded) & (rounded != products)).any())


@functools.lru_cache(maxsize=2)
def _dequantized(combination: Combination) -> jax.Array:
    return dequantized(operands(combination).rhs, jnp.dtype(combination.dtype))


def _plain(values: Any) -> np.ndarray:
    values = np.asarray(values).astype(np.float64)
    return np.where(np.abs(values) < _LEAST, 0, values)


def has_sums(combination: Combination) -> bool:
    """Whether both operands are integers, apart from their scales."""
    integers = combination.weights in INTEGERS and combination.zero != "float"
    return integers and combination.lhs == "int8"


def _sums(combination: Combination, backend: str) -> int | None:
    """Number of wrong sums of int8 values times integers, with all scales 1.

    Sums are below 2^24, so float32 is exact.
    """
    if not has_sums(combination):
        return None
    c = combination
    lhs, rhs, *_ = operands(c)
    ones = {"scale": np.ones(rhs.scale.shape, np.float32).astype(rhs.scale.dtype)}
    if rhs.tensor_scale is not None:
        ones["tensor_scale"] = np.ones(rhs.tensor_scale.shape, np.float32)
    units = dataclasses.replace(rhs, **jax.tree.map(jnp.asarray, ones))
    rows = QuantizedActivations(lhs.values, jnp.ones_like(lhs.scale), lhs.dtype)
    values, weight = (np.asarray(x, np.float64) for x in (lhs.values, dequantize(units).value))
    assert (np.abs(values) @ np.abs(weight)).max() < 2**24
    wide = jnp.dtype("float32")
    got = _jitted(jl.quantized_matmul, backend)(rows, units, preferred_element_type=wide)
    return int(np.sum(np.asarray(got).astype(np.float64) != values @ weight))
