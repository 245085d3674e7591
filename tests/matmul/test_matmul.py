"""Products: every problem on every compiled backend, compared with float64."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    PLATFORM,
    UNOPTIMIZED,
    Oracle,
    Weight,
    assert_within,
    backends,
    dequantize,
    dequantized,
    interpreted_matmul,
    matmul,
)
from helpers import pack as pack_words
from pairwise import covering
from problems import PROBLEMS, Problem, operands

from jaxlowbit import Format, QuantizedArray, quantize, quantized_matmul


def path(problem: Problem) -> dict[str, Any]:
    """Properties that select code paths of the Pallas kernel, the reference and their callers."""
    p = problem
    return {
        "bits": p.bits,
        "zero": p.zero,
        "codebook": p.codebook if isinstance(p.codebook, str) else bool(p.codebook),
        "scales of 8 bits": p.narrow,
        "group": p.group_size if p.group_size == -1 else p.group_size % 64 == 0,
        "dtype": p.dtype,
        "scale": p.scale_dtype or p.dtype,
        "result": p.result_dtype.name,
        "blocks of m": min(-(-p.m // 256), 2),
        "blocks of k": p.k > 64,
        "blocks of n": p.n > 64,
        "stack": bool(p.stack),
        "index": p.index is not None,
        "permuted": p.permuted,
        "shards": p.shards > 1,
    }


def supports(name: str, problem: Problem) -> bool:
    return name in backends(problem.dtype, problem.format)


# Interpreted Pallas and the reference lack the tiles and branches of compiled kernels, and compile
# longer than all other backends together. They run a pairwise cover of the values of `path`.
COVERING = {
    name: covering((p for p in PROBLEMS if supports(name, p) and not p.compiled), path)
    for name in ("pallas", "xla")
}


def computing(problem: Problem) -> list[str]:
    """The backends tested with this problem."""
    found = backends(problem.dtype, problem.format)
    return [name for name in found if name not in COVERING or problem in COVERING[name]]


CASES = [(p, backend) for p in PROBLEMS for backend in computing(p)]
every_case = pytest.mark.parametrize(
    ("problem", "backend"), CASES, ids=[f"{p.name}-{backend}" for p, backend in CASES]
)


@functools.cache
def result(problem: Problem, backend: str) -> np.ndarray:
    """The result, shared by the tests of a problem."""
    return run(problem, backend)


def run(problem: Problem, backend: str) -> np.ndarray:
    lhs, rhs, _ = operands(problem)
    return compute(lhs, rhs, backend, problem.out_dtype)


def compute(lhs, rhs, backend, out_dtype=None) -> np.ndarray:
    dtype = None if out_dtype is None else jnp.dtype(out_dtype)
    multiply = interpreted_matmul if backend == "pallas" else matmul
    out = multiply(lhs, rhs, backend=backend, preferred_element_type=dtype)
    assert out.dtype == (dtype or lhs.dtype)
    return np.asarray(out)


@pytest.mark.parametrize(
    ("bits", "group_size", "m"), [(4, 128, 1), (4, 16, 16), (3, 48, 5), (8, -1, 17), (7, 80, 300)]
)
def test_bits_do_not_depend_on_threads(bits, group_size, m):
    """Some threads may flush subnormals; lhs contains subnormal and much larger values."""
    problem = Problem("threads", m, 1000, 777, bits, group_size, dtype="float32", scale=1e-8)
    rhs, rng = operands(problem).rhs, np.random.default_rng(m)
    lhs = rng.normal(size=(m, 1000)) * 10.0 ** rng.integers(-40, 2, (m, 1000))
    lhs = jnp.asarray(lhs.astype(np.float32))
    one = np.asarray(matmul(lhs, rhs)).tobytes()
    assert all(np.asarray(matmul(lhs, rhs)).tobytes() == one for _ in range(30))


def cases_of(*names: str) -> pytest.MarkDecorator:
    """The problems of these names on every backend that supports them."""
    cases = [case for name in names for case in CASES if case[0].name == name]
    assert {p.name for p, _ in cases} == set(names)
    ids = [f"{p.name}-{backend}" for p, backend in cases]
    return pytest.mark.parametrize(("problem", "backend"), cases, ids=ids)


def test_problems_are_named_by_their_reason():
    assert len({p.name for p in PROBLEMS}) == len(PROBLEMS) >= 60


@every_case
@pytest.mark.ways("backend")
def test_result_is_within_its_error_bound(problem, backend):
    oracle = operands(problem).oracle
    assert_within(result(problem, backend), oracle.exact, oracle.bound(problem.result_dtype))


@every_case
def test_two_runs_are_bitwise_equal(problem, backend):
    assert run(problem, backend).tobytes() == result(problem, backend).tobytes()


SHARED = [p for p in PROBLEMS if len(computing(p)) > 1]


@pytest.mark.parametrize("problem", SHARED, ids=[p.name for p in SHARED])
def test_backends_agree(problem):
    oracle = operands(problem).oracle
    bound = oracle.bound(problem.result_dtype, results=2)
    results = [result(problem, backend) for backend in computing(problem)]
    for one, other in itertools.combinations(results, 2):
        assert_within(one, other.astype(np.float64), bound)


DEQUANTIZED = (
    "k = 7: below a step, unaligned rows",
    "k = 201: odd rows, one row",
    "group 48: straddles atoms",
    "integer zero, group -1",
    "8 bits, integer zero, group 48",
    "8 bits, group -1",
    "float16, integer zero",
    "float16, subnormal scales",
    "float32, 8 bits, many rows",
    "float32 scales of float16",
    "3 bits, integer zero",
    "5 bits",
    "6 bits, integer zero",
    "7 bits",
    "fp4, float16",
    "e4m3, per channel",
    "e5m2, float32",
    "a codebook of 2 bits",
    "a codebook of 5 bits",
    "a codebook of 6 bits, float32",
    "a codebook of 7 bits",
    "a codebook of 8 bits, one row",
    "nvfp4, float16",
    "permuted, odd k",
    "permuted, 8 bits per channel",
    "permuted, k in 4 padded shards",
    "everything odd at once",
)


@cases_of(*DEQUANTIZED)
def test_identity_gives_the_dequantized_weight(problem, backend):
    rhs = operands(problem).rhs
    dtype = jnp.dtype(problem.dtype)
    got = compute(np.eye(problem.k, dtype=dtype), rhs, backend)
    # Without a float zero the weight is one float32 product, then rounded once.
    weight = dequantize(rhs).value.astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(got, weight)


@pytest.mark.parametrize("name", DEQUANTIZED)
def test_dequantize_rounds_each_weight_once(name):
    problem = next(p for p in PROBLEMS if p.name == name)
    rhs, dtype = operands(problem).rhs, jnp.dtype(problem.dtype)
    weight = dequantize(rhs).value.astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(dequantized(rhs, dtype), weight)


@cases_of(
    "9 rows: one past an mma tile",
    "33 rows: one past 32",
    "k = 33: odd rows are unaligned",
    "8 bits, group 48",
    "8 bits, integer zero, group -1",
    "float zero, group 48, many rows",
    "float32",
    "float16, integer zero",
    "all weights zero",
    "3 bits",
    "integer zero, group -1",
    "permuted, odd k",
    "permuted, 8 bits per channel",
)
def test_nan_and_infinity_stay_in_their_rows(problem, backend):
    clean, rhs, _ = operands(problem)
    lhs = clean.copy()
    rows = {0: np.nan, problem.m // 2: np.inf, problem.m - 1: -np.inf}
    for row, value in rows.items():
        lhs[row, (7 * row + 3) % problem.k] = value
    got, before = (compute(x, rhs, backend) for x in (lhs, clean))
    others = [row for row in range(problem.m) if row not in rows]
    assert got[others].tobytes() == before[others].tobytes()
    with np.errstate(invalid="ignore"):
        want = lhs.astype(np.float64) @ dequantize(rhs).value
    for row in rows:
        np.testing.assert_array_equal(got[row].astype(np.float64), want[row])


# Float codebooks have codes without a finite value; the padding contains all of them.
@pytest.mark.skipif(PLATFORM != "cpu", reason="the kernels of GPUs read integers")
@pytest.mark.parametrize(
    ("name", "dtype", "k", "m"),  # a pairwise cover
    [
        ("e4m3", "float32", 128, 1),
        ("e4m3", "float32", 100, 40),
        ("e5m2", "bfloat16", 128, 40),
        ("e5m2", "bfloat16", 100, 1),
    ],
)
def test_codes_of_nan_and_infinity_on_the_cpu(name, dtype, k, m):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7B, (128, 128))
    codes[k:] = 0xFF
    codes[rng.permutation(k)[:4], [0, 5, 70, 71]] = 0x7C, 0xFC, 0x7F, 0xFF
    padded = pack_words(codes, 8)
    rhs = packed(np.zeros((k, 128), np.float32), Format(8, 32, codebook=name))
    scale = np.where(np.arange(64) % 2, 0.5, -0.25) * np.ones(rhs.scale.shape)
    rhs = rhs._with(packed=jnp.asarray(padded), scale=jnp.asarray(scale, jnp.float32))
    lhs = (1 + rng.integers(0, 4, (m, k))).astype(jnp.dtype(dtype))
    want, got = (compute(lhs, rhs, backend).astype(np.float64) for backend in ("xla", "cpu"))
    assert 0 < np.sum(~np.isfinite(want)) <= 4 * m
    special = ~np.isfinite(want)
    np.testing.assert_array_equal(got[special], want[special])
    np.testing.assert_allclose(got[~special], want[~special], rtol=2**-7, atol=0.5)


@cases_of(
    "33 rows: one past 32",
    "permuted, one row",
    "permuted, odd k",
    "permuted, 8 bits per channel",
    "permuted, a stack",
    "permuted, a view",
    "permuted, k in 4 padded shards",
)
@pytest.mark.ways("backend")
def test_cotangent_of_lhs_is_within_its_error_bound(problem, backend):
    lhs, rhs, oracle = operands(problem)
    cotangent = np.random.default_rng(0).normal(size=oracle.exact.shape).astype(lhs.dtype)
    (got,) = jax.vjp(lambda x: matmul(x, rhs, backend=backend), lhs)[1](cotangent)
    turned = Weight(*(np.swapaxes(x, -1, -2) for x in dequantize(rhs)))
    want = Oracle.of(cotangent, turned)
    assert_within(got, want.exact, want.bound(lhs.dtype))


@pytest.mark.parametrize("backend", backends("float16", PROBLEMS[0].format))
def test_float16_results_overflow_to_infinity(backend):
    problem = next(p for p in PROBLEMS if p.name == "float16, large scales")
    lhs, rhs, _ = operands(problem)
    lhs = (np.sign(lhs) * 2).astype(np.float16)
    exact = Oracle.of(lhs, dequantize(rhs)).exact
    got = compute(lhs, rhs, backend)
    certain = np.abs(np.abs(exact) - 65520) > 1000
    beyond = np.abs(exact) > 65520
    assert beyond.any() and not beyond.all()
    np.testing.assert_array_equal(np.isinf(got[certain]), beyond[certain])
    wide = compute(lhs, rhs, backend, "float32")
    assert np.isfinite(wide).all()


ROWS = (1, 40)  # the two paths of the CPU kernel: small and large M
BOTH_WAYS = pytest.mark.parametrize("m", ROWS)


def backends_of_rows(m: int, dtype: str, format: Format) -> list[str]:
    """All backends for large M; the reference and Pallas have no separate path for small M."""
    return backends(dtype, format)[: None if m == max(ROWS) else 1]


def packed(weight, format, **options) -> QuantizedArray:
    """Quantizes under `jit`, where ranges are not checked; unoptimized, since it runs once."""
    program = functools.partial(quantize, format=format, **options)
    return jax.jit(program, compiler_options=UNOPTIMIZED)(weight)


@functools.cache
def largest(bits: int, shards: int, zero: Any, k: int, group_size: int) -> QuantizedArray:
    """Weights of maximum magnitude. Without a zero, code 0 is infinite."""
    low = 0 if zero == "integer" else -1
    weight = np.where(np.random.default_rng(0).random((k, 70)) < 0.5, 1.0, low).astype(np.float32)
    weight *= np.float32(3.2e38 if zero != "float" else 1.6e38)
    format = Format(bits, group_size, zero=zero)
    return packed(weight, format, shards=(shards, 1), quantizer="absmax")


# Padding at the end of an atom, or as the missing second atom of a stage; every kind of zero, one
# and two shards of k, small and large M. Width and dtype alternate, so that each meets every other
# value.
EVERY_PADDING = [
    (
        k,
        group_size,
        (2, 4)[(i + j) % 2],
        shards,
        zero,
        ("float32", "bfloat16")[(j + shards + m) % 2],
        m,
    )
    for i, (k, group_size) in enumerate([(66, -1), (130, -1), (130, 48)])
    for j, zero in enumerate(("none", "integer", "float"))
    for shards in (1, 2)
    for m in ROWS
]
# Pairwise covers of these values: with large M, on every backend; with small M, on the CPU.
PADDED_EVERYWHERE, PADDED = (
    covering((row for row in EVERY_PADDING if m in row), lambda row: dict(enumerate(row)))
    for m in (max(ROWS), min(ROWS))
)


@pytest.mark.parametrize("row", [*PADDED_EVERYWHERE, *PADDED], ids=str)
def test_padding_has_no_effect_next_to_the_largest_weights(row):
    k, group_size, bits, shards, zero, dtype, m = row
    rhs = largest(bits, shards, zero, k, group_size)
    lhs = np.zeros((m, k), jnp.dtype(dtype))
    lhs[:, [0, 40, 65]] = [2.0**-10, -(2.0**-12), 2.0**-14]
    oracle = Oracle.of(lhs, dequantize(rhs))
    assert np.isfinite(oracle.exact).all() and (np.abs(oracle.exact) > 1e30).any()
    for backend in backends(dtype, rhs.format)[: None if row in PADDED_EVERYWHERE else 1]:
        assert_within(compute(lhs, rhs, backend), oracle.exact, oracle.bound(lhs.dtype))


@pytest.mark.skipif(PLATFORM != "cpu", reason="on GPUs the kernels ask for finite scales there")
@BOTH_WAYS
@pytest.mark.parametrize("group_size", [64, 48])
def test_an_infinite_scale_matches_the_definition(group_size, m):
    """Including a group that ends in padding."""
    values, scale = np.ones((72, 70), np.int8), np.ones((2, 70), np.float32)
    scale[1, ::2] = np.inf
    pack = jax.jit(functools.partial(QuantizedArray.from_integers, format=Format(8, group_size)))
    rhs, lhs = pack(values, scale), np.ones((m, 72), np.float32)
    want = compute(lhs, rhs, "xla")
    assert np.isinf(want[:, ::2]).all() and (want[:, 1::2] == 72).all()
    np.testing.assert_array_equal(compute(lhs, rhs, "cpu"), want)


BEYOND = {  # dtype of lhs: a weight that rounds to infinity, and one that does not
    "float16": (65520.0, 65519.0),
    "bfloat16": (float(np.uint32(0x7F7F8000).view(np.float32)), 3.3961e38),
}


@BOTH_WAYS
@pytest.mark.parametrize("dtype", BEYOND)
@pytest.mark.parametrize("zero", ["none", "integer", "float", "codebook"])
def test_weights_beyond_the_dtype_of_lhs_are_infinite(zero, dtype, m):
    """Like `lhs @ rhs.dequantize(lhs.dtype)`; finite in CUDA kernels that do not round weights."""
    beyond, within = BEYOND[dtype]
    unsigned = zero != "none"
    values = np.full((64, 70), 8 * unsigned, np.uint8 if unsigned else np.int8)
    values[5] += 1  # one scale away from the zero point
    scale = np.where(np.arange(70) % 2, within, beyond).astype(np.float32)[None]
    scale[0, ::3] *= -1
    zeros = {
        "none": None,
        "integer": np.full((1, 70), 8, np.uint8),
        "float": np.zeros((1, 70), np.float32),
        "codebook": None,
    }
    one = Format(4, codebook=(*[0.0] * 9, 1.0, *[0.0] * 6))
    format = one if zero == "codebook" else Format(4, zero=zero)
    if zero == "float":
        values -= 8
    rhs = QuantizedArray.from_integers(values, scale, zeros[zero], format=format)
    lhs = np.zeros((m, 64), jnp.dtype(dtype))
    lhs[:, 5] = 2.0**-8
    if m > 1:
        lhs[1, 5] = 0
    with np.errstate(invalid="ignore", over="ignore"):
        rounded, unrounded = (
            (lhs[:, 5:6].astype(np.float32) * weights.astype(np.float32)).astype(lhs.dtype)
            for weights in (scale.astype(lhs.dtype), scale)
        )
    assert np.isinf(rounded[0, ::2]).all() and np.isfinite(rounded[0, 1::2]).all()
    for backend in backends_of_rows(m, dtype, rhs.format):
        got = compute(lhs, rhs, backend)
        finite = backend == "cuda" and np.isfinite(got).all()
        np.testing.assert_array_equal(
            *(x.astype(np.float32) for x in (got, unrounded if finite else rounded)),
            err_msg=backend,
        )


@pytest.mark.parametrize(
    "backend", [b for b in backends("float16", PROBLEMS[0].format) if b != "cuda"]
)
def test_backends_without_float16_accumulation_use_float32(backend):
    lhs, rhs, _ = operands(next(p for p in PROBLEMS if p.name == "float16, large scales"))
    product = functools.partial(matmul, jnp.asarray(lhs), rhs, backend=backend)
    half = product(precision=jax.lax.DotAlgorithmPreset.F16_F16_F16)
    assert np.asarray(half).tobytes() == np.asarray(product()).tobytes()


def test_vector_lhs_gives_a_vector():
    lhs, rhs, oracle = operands(next(p for p in PROBLEMS if p.name == "one row: decoding"))
    got = quantized_matmul(jnp.asarray(lhs[0]), rhs)
    assert got.shape == (rhs.n,)
    assert_within(got, oracle.exact[0], oracle.bound(lhs.dtype)[0])


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_matmul_operator(array):
    problem = next(p for p in PROBLEMS if p.name == "float32")
    lhs, rhs, oracle = operands(problem)
    assert_within(array(lhs) @ rhs, oracle.exact, oracle.bound(lhs.dtype))
