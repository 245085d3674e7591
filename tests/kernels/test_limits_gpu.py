"""Products with sizes beyond 16, 31 and 32 bits, on a GPU.

The tests compare the first rows, the last rows and rows around those limits.
"""

import ctypes
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_problems import Cases, isolated, main, normal, uniform
from helpers import Oracle, Weight, assert_within, dequantize, finished, matmul

from jaxlowbit import INT4, Format, QuantizedArray, quantized_glu, quantized_matmul

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
# Groups with and without support in the Hopper kernels.
HOPPER, GENERAL = Format(4, 64), Format(4, 16)
LIMIT = 2**31


def numbers(m: int, n: int) -> Any:
    """lhs (m, n) of small integers, created on the device."""

    @jax.jit
    def make() -> Any:
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (m, n), axis) for axis in range(2))
        return ((row * 7919 + column * 104729) % 17 - 8).astype(jnp.bfloat16)

    return make()


def around(m: int, n: int) -> np.ndarray:
    """Rows of (m, n) around element 2^31, at both ends, and some between."""
    at = LIMIT // n
    between = np.random.default_rng(0).integers(0, m, 20)
    return np.unique(np.clip([0, 1, at - 1, at, at + 1, m - 2, m - 1, *between], 0, m - 1))


def of(lhs: Any, rhs: QuantizedArray) -> Oracle:
    return Oracle.of(lhs, dequantize(rhs))


# --- elements beyond 2^31 -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "format", "dtype"),
    [
        (65600, HOPPER, "bfloat16"),
        (65604, HOPPER, "bfloat16"),  # the row pitch does not allow a tensor map
        (65600, GENERAL, "bfloat16"),
        (65600, HOPPER, "float32"),
    ],
    ids=["Hopper", "odd rows", "general", "float32"],
)
def test_large_results(columns, format, dtype):
    m = 33000 if dtype == "bfloat16" else 11001  # three bfloat16 parts are multiplied
    lhs, rhs = numbers(m, 64).astype(dtype), uniform(64, columns, format, dtype=dtype)
    at = around(m if dtype == "bfloat16" else 3 * m, columns) % m
    got = matmul(lhs, rhs)[at]
    oracle = of(lhs[at], rhs)
    assert_within(got, oracle.exact, oracle.bound(got.dtype))


def test_large_residuals():
    m, n = 33000, 65600
    lhs, rhs, at = numbers(m, 64), uniform(64, n, HOPPER), around(m, n)
    residual = jnp.broadcast_to((jnp.arange(m) % 7).astype(lhs.dtype)[:, None], (m, n)) + 0
    got = jax.jit(lambda x, q, r: quantized_matmul(x, q, residual=r))(lhs, rhs, residual)[at]
    wanted = finished(of(lhs[at], rhs), got.dtype, residual=np.asarray(residual[at]))
    assert_within(got, *wanted)


def test_large_gated_pairs():
    m, n = 33000, 65600
    lhs, pair, at = numbers(m, 64), uniform(64, n, HOPPER, stack=(2,)), around(m, n)
    got = jax.jit(quantized_glu)(lhs, pair)[at]
    gate, up = (of(lhs[at], weight) for weight in pair)
    assert_within(got, *finished(gate, got.dtype, activation="silu", up=(up, None)))


@pytest.mark.parametrize(
    ("format", "permuted"),
    [(INT4, False), (INT4, True), (GENERAL, False)],
    ids=["Hopper", "permuted", "general"],
)
def test_large_lhs(format, permuted):
    m, k = 530000, 4096
    lhs, rhs, at = numbers(m, k), uniform(k, 64, format, permuted=permuted), around(m, k)
    oracle = of(lhs[at], rhs)
    assert_within(matmul(lhs, rhs)[at], oracle.exact, oracle.bound(lhs.dtype))


def test_large_cotangents():
    m, k, n = 33000, 65600, 64
    rhs, cotangent, at = uniform(k, n, HOPPER), numbers(m, n), around(m, k)
    like = jax.ShapeDtypeStruct((m, k), cotangent.dtype)
    turned = jax.jit(lambda ct, q: jax.linear_transpose(lambda x: x @ q, like)(ct)[0])
    weight = dequantize(rhs)
    oracle = Oracle.of(cotangent[at], Weight(weight.value.T, weight.terms.T))
    assert_within(turned(cotangent, rhs)[at], oracle.exact, oracle.bound(cotangent.dtype))


@pytest.mark.parametrize(("k", "m"), [(2**21, 1), (2**21 + 64, 40), (2**22 + 4, 20)], ids=str)
def test_long_sums(k, m):
    lhs, rhs = normal(m, k), uniform(k, 64, HOPPER)
    oracle = of(lhs, rhs)
    assert_within(matmul(lhs, rhs), oracle.exact, oracle.bound(lhs.dtype))


@pytest.mark.parametrize("m", [1, 16, 64, 512])
def test_a_large_weight(m):
    """A 65536 x 65536 matrix, 2^32 elements, tiled from one of 4096 x 4096."""
    d, times = 4096, 16
    tile = uniform(d, d)
    packed, scale = (jnp.tile(leaf, (times, times, 1)) for leaf in (tile.packed, tile.scale))
    size = {"k": d * times, "n": d * times}
    rhs = dataclasses.replace(tile, packed=packed, scale=scale, **size)
    lhs = normal(m, d * times)
    at = np.unique(np.linspace(0, m - 1, 8).astype(int))
    parts = [of(lhs[at, i * d : (i + 1) * d], tile) for i in range(times)]
    exact, weights, sums = (functools.reduce(np.add, terms) for terms in zip(*parts, strict=True))
    oracle = Oracle(exact, weights, times * sums)  # times more terms
    got = np.asarray(matmul(lhs, rhs)[at])
    for part in np.split(got, times, axis=1):
        assert_within(part, oracle.exact, oracle.bound(got.dtype))


# --- values ---------------------------------------------------------------------------------------


def test_float32_near_the_largest():
    """Its bfloat16 parts must not round to infinity; scales bring the sums back into range."""
    largest, factor = np.float32(3.4e38), 2.0**-20
    lhs = jnp.ones((2, 128)).at[0, 3].set(largest).at[1, 5:9].set(-largest)
    codes = jnp.zeros((128, 64), jnp.int8).at[3].set(1).at[5:9].set(-7)
    scale = jnp.full((1, 64), factor, jnp.float32)
    rhs = QuantizedArray.from_integers(codes, scale, format=Format(4, -1))
    oracle = of(lhs, rhs)
    assert_within(matmul(lhs, rhs), oracle.exact, oracle.bound(jnp.float32))


# --- batches beyond 2^16, groups beyond 2^31, and calls after an error ----------------------------

TOKENS, EXPERTS = 66000, 8
TOKEN_FORMS: dict[str, Any] = {
    "select": lambda x, i, stack: (x[:, None] @ stack.select(i))[:, 0],
    "vmap": lambda x, i, stack: jax.vmap(lambda x, i: x @ stack.select(i))(x, i),
    "epilogue": lambda x, i, stack: quantized_matmul(
        x[:, None], stack.select(i), activation="relu"
    )[:, 0],
}


def an_expert_per_token(form: str) -> None:
    """A batch of more matrices than the y axis of a grid allows."""
    stack, lhs = uniform(1024, 1024, stack=(EXPERTS,)), normal(TOKENS, 1024)
    index = np.random.default_rng(3).integers(0, EXPERTS, TOKENS).astype(np.int32)
    got = jax.jit(TOKEN_FORMS[form])(lhs, index, stack)
    some = np.random.default_rng(4).integers(0, TOKENS, 400)
    for i, weight in enumerate(stack):
        at = np.unique([*range(40), *range(65500, TOKENS), *some])
        at = at[index[at] == i]
        activation = "relu" if form == "epilogue" else None
        wanted = finished(of(lhs[at], weight), lhs.dtype, activation=activation)
        assert_within(got[at], *wanted)


def products_after_an_error() -> None:
    """A failed launch, if any, does not affect subsequent products."""
    lhs, rhs = normal(3, 100), uniform(100, 64, GENERAL)
    oracle, multiply = of(lhs, rhs), jax.jit(quantized_matmul)
    for _ in range(2):
        try:
            an_expert_per_token("select")
        except jax.errors.JaxRuntimeError as error:
            print(f"a launch failed: {error}")
        for _ in range(20):
            assert_within(multiply(lhs, rhs), oracle.exact, oracle.bound(lhs.dtype))


def loading_is_tried_again() -> None:
    """After running out of memory while loading, the next call loads the kernels without error."""
    lhs, rhs = normal(1, 64), uniform(64, 64)
    oracle = of(lhs, rhs)
    # A program without XLA kernels, since loading them would fail too.
    program = jax.jit(quantized_matmul).lower(lhs, rhs).compile()
    assert "fusion" not in (program.as_text() or "")
    jnp.zeros(2**22).block_until_ready()  # memory that XLA reserves for results
    driver = ctypes.CDLL("libcuda.so.1")
    context, taken = ctypes.c_void_p(), []
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    size = 2**34
    failure = "loading the kernels.* on CUDA device 0 failed with cuda"
    try:
        while size >= 2**16:
            block = ctypes.c_uint64()
            if driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(size)) == 0:
                taken.append(block)
            else:
                size //= 2
        # A ValueError with jax 0.12, a RuntimeError before.
        with pytest.raises((ValueError, RuntimeError), match=failure):
            program(lhs, rhs).block_until_ready()
    finally:  # later cases of this process need memory
        for block in taken:
            assert driver.cuMemFree_v2(block) == 0
    assert_within(program(lhs, rhs), oracle.exact, oracle.bound(lhs.dtype))


def groups_of(size: int, m: int, k: int) -> None:
    """A single group spans k."""
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(-8, 8, (k, 64)).astype(np.int8), rng.uniform(0.1, 0.2, (1, 64))
    make = functools.partial(QuantizedArray.from_integers, codes, jnp.asarray(scale, jnp.bfloat16))
    lhs = normal(m, k)
    oracle = of(lhs, make(format=Format(4, -1)))
    got = jax.jit(quantized_matmul)(lhs, make(format=Format(4, size)))
    assert_within(got, oracle.exact, oracle.bound(lhs.dtype))


CASES: Cases = {
    # First, so that its process has not loaded a kernel yet.
    "loading is tried again": loading_is_tried_again,
    **{f"{form} per token": functools.partial(an_expert_per_token, form) for form in TOKEN_FORMS},
    "products after an error": products_after_an_error,
    **{
        f"groups of {size}, {m} x {k}": functools.partial(groups_of, size, m, k)
        for size in (2**31 - 64, 2**31, 2**32, 2**32 + 64, 2**40)
        for m, k in ((3, 100), (1, 128), (64, 128))
    },
}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return isolated(request, "case", CASES, __file__, workers=4)


@pytest.mark.parametrize("case", CASES)
def test_limits(case, outcomes):
    assert outcomes[case] is None, outcomes[case]


if __name__ == "__main__":
    main(CASES)
