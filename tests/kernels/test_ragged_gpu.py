"""`quantized_ragged_dot` and `quantized_moe` on a GPU, against float64 and within their bounds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_problems import normal
from helpers import Oracle, assert_within, calls, dequantize, finished, quantize

from jaxlowbit import (
    INT4,
    INT8,
    MXFP4,
    Format,
    QuantizedArray,
    quantized_moe,
    quantized_ragged_dot,
)

pytestmark = pytest.mark.gpu

EXPERTS = 20
K, N = 256, 200  # n is not a multiple of a strip
ROWS = (1, 7, 40, 100, 300, 1500)  # each selects another tile
FORMATS = {
    str(format): (format, K)
    for format in (INT4, Format(4, 64, zero="integer"), INT8, Format(2, 32), MXFP4)
} | {
    "groups of 16": (Format(4, 16), K),  # unsupported by the Hopper kernels, as the next two
    "float zeros, unaligned rows": (Format(3, 16, zero="float"), 201),
    "unaligned rows": (INT4, 201),
}


def sizes_of(m: int) -> dict[str, list[int]]:
    """Group sizes: even, one group with all rows, many empty ones, too few, too many, negative."""
    rng = np.random.default_rng(m)
    even = rng.multinomial(m, np.full(EXPERTS, 1 / EXPERTS))
    few = np.where(rng.random(EXPERTS) < 0.3, 1.0, 1e-6)
    return {
        "even": [*even],
        "one": [m if i == 3 else 0 for i in range(EXPERTS)],
        "empty": [*rng.multinomial(m, few / few.sum())],
        "short": [*rng.multinomial(m // 2, np.full(EXPERTS, 1 / EXPERTS))],
        "long": [*rng.integers(0, m + 1, EXPERTS)],
        "wrong": [2**31 - 1 if i == 5 else -4 if i % 3 else even[i] for i in range(EXPERTS)],
        "none": [0] * EXPERTS,
    }


def owners(sizes: Any, offset: int, m: int, experts: int = EXPERTS) -> np.ndarray:
    """The weight of each row, or -1."""
    owner, start = np.full(m, -1), 0
    for group, size in enumerate(sizes):
        end = min(start + max(int(size), 0), m)
        if 0 <= group - offset < experts:
            owner[start:end] = group - offset
        start = end
    return owner


def product(pairs: bool, out_dtype: Any = None):
    options = {"activation": "silu" if pairs else None, "preferred_element_type": out_dtype}

    def f(lhs: Any, rhs: Any, sizes: Any, bias: Any, offset: Any) -> Any:
        return quantized_ragged_dot(lhs, rhs, sizes, bias=bias, group_offset=offset, **options)

    return f


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("case", FORMATS)
def test_products(case, rows, pairs):
    format, k = FORMATS[case]
    stack = (2, EXPERTS) if pairs else (EXPERTS,)
    rhs = quantize(normal(*stack, k, N, seed=1), format)
    lhs, bias = normal(rows, k, seed=2), normal(*stack, N, seed=3)
    f = product(pairs)
    arguments = lhs, rhs, jnp.zeros(EXPERTS, jnp.int32), bias, jnp.int32(0)
    assert calls(f, *arguments) == ["quantized_ragged_dot"]
    f, every = jax.jit(f), Oracle.of(lhs, dequantize(rhs))
    for name, sizes in sizes_of(rows).items():
        for offset in (0, 2, -3):
            got = f(lhs, rhs, jnp.asarray(sizes, jnp.int32), bias, jnp.int32(offset))
            owner = owners(sizes, offset, rows)
            own = Oracle(*(x[..., np.maximum(owner, 0), np.arange(rows), :] for x in every))
            addend = np.asarray(bias)[..., np.maximum(owner, 0), :]
            if pairs:
                gate, up = (Oracle(*(x[i] for x in own)) for i in range(2))
                exact, bound = finished(
                    gate, lhs.dtype, bias=addend[0], activation="silu", up=(up, addend[1])
                )
            else:
                exact, bound = finished(own, lhs.dtype, bias=addend)
            has = owner[:, None] >= 0
            try:
                assert_within(got, np.where(has, exact, 0), np.where(has, bound, 2.0**-149))
            except AssertionError as error:
                raise AssertionError(f"{name}, offset {offset}") from error


@pytest.mark.parametrize("rows", [5, 150, 2000])
def test_more_groups_than_experts(rows):
    """Sums over more groups than a warp loads at a time; products of small integers are exact."""
    groups, experts = 700, 300
    rng = np.random.default_rng(rows)
    values = rng.integers(-7, 8, (experts, 64, 72))
    scale = jnp.ones((experts, 1, 72), jnp.bfloat16)
    rhs = QuantizedArray.from_integers(jnp.asarray(values, jnp.int4), scale, format=Format(4, 64))
    lhs = rng.integers(-3, 4, (rows, 64))
    f = jax.jit(product(False, jnp.float32))
    few = np.where(rng.random(groups) < 0.1, 1.0, 1e-6)
    for sizes in (
        rng.multinomial(rows, few / few.sum()),
        rng.multinomial(rows, [1 / groups] * 700),
    ):
        for offset in (0, 60, 350, -10):
            owner = owners(sizes, offset, rows, experts)
            want = np.where(owner[:, None] < 0, 0, np.einsum("rk,rkn->rn", lhs, values[owner]))
            given = jnp.asarray(lhs, jnp.bfloat16), rhs, jnp.asarray(sizes, jnp.int32)
            np.testing.assert_array_equal(f(*given, None, jnp.int32(offset)), want)


@pytest.mark.parametrize("rows", ROWS)
def test_float32_results_repeat(rows):
    rhs, lhs = quantize(normal(EXPERTS, K, N, seed=1), INT4), normal(rows, K, seed=2)
    sizes = jnp.asarray(sizes_of(rows)["empty"], jnp.int32)
    f = jax.jit(product(False, jnp.float32))
    first = f(lhs, rhs, sizes, None, None)
    assert first.dtype == jnp.float32
    for _ in range(20):
        np.testing.assert_array_equal(f(lhs, rhs, sizes, None, None), first)


def test_sizes_change_between_replays():
    """Sizes are on the device: one captured program serves all of them."""
    rhs, lhs = quantize(normal(EXPERTS, K, N, seed=1), INT4), normal(64, K, seed=2)
    f = jax.jit(product(False))
    by_sizes = [jnp.asarray(s, jnp.int32) for s in sizes_of(64).values()]
    before = [np.asarray(f(lhs, rhs, sizes, None, None)) for sizes in by_sizes]
    after = [np.asarray(f(lhs, rhs, sizes, None, None)) for sizes in reversed(by_sizes)]
    for x, y in zip(before, reversed(after), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("activation", ["silu", "gpt_oss"])
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_mixture_is_its_composition(tokens, activation):
    """Custom calls and definition differ by the rounding of hidden features and results."""
    gate_up = quantize(normal(2, EXPERTS, K, 128, seed=1), INT4)
    down = quantize(normal(EXPERTS, 128, K, seed=2), INT4)
    x = normal(tokens, K, seed=3)
    weight, expert = jax.lax.top_k(jax.nn.softmax(normal(tokens, EXPERTS, seed=4)), 4)

    def mixture(backend: Any) -> Any:
        return jax.jit(
            lambda *operands: quantized_moe(*operands, activation=activation, backend=backend)
        )(x, expert, weight, gate_up, down)

    got, want = (np.asarray(mixture(b), np.float64) for b in (None, "xla"))
    assert np.abs(got - want).max() <= 2.0**-6 * np.abs(want).max()
