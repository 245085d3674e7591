"""Quantized activations on a GPU: one custom call, which uses 8-bit tensor cores on Hopper."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_problems import rounding
from helpers import Oracle, call_names, dequantize, dequantized
from jax import lax

from jaxlowbit import (
    FP8,
    INT4,
    INT8,
    MXFP4,
    NF4,
    UINT4,
    Format,
    QuantizedActivations,
    QuantizedArray,
    quantize,
    quantize_activations,
    quantized_block,
    quantized_matmul,
)
from jaxlowbit._backends import call, cuda_calls
from jaxlowbit._composite.rms_norm import rms_norm

pytestmark = pytest.mark.gpu
WEIGHTS = {
    "int8": (
        *(INT4, Format(4, 64), Format(4, 256), Format(4), INT8, Format(8, 128)),
        *(Format(4, size, scale="int8") for size in (64, 128, 384, -1)),
        *(Format(4, size, "integer") for size in (64, 128, 384, -1)),
    ),
    "float8_e4m3fn": (FP8, Format(8, 64, codebook="e4m3"), Format(8, 128, codebook="e4m3")),
}
KINDS = [(dtype, format) for dtype, formats in WEIGHTS.items() for format in formats]
kinds = pytest.mark.parametrize(("dtype", "format"), KINDS, ids=str)


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def is_one_call(function: Any, *operands: Any, name: str = "quantized_activations") -> bool:
    return name in call_names(jax.jit(function).lower(*operands).as_text())


@kinds
@pytest.mark.parametrize("m", [31, 45, 192, 301, 1000])
@pytest.mark.parametrize("out", ["bfloat16", "float32", "float16"])
def test_products_are_within_the_bound(dtype, format, m, out):
    n, k = 200, 1000  # not multiples of the tile; k is not a multiple of 16
    lhs = quantize_activations(normal((m, k), out, 0), dtype)
    rhs = quantize(normal((k, n), "bfloat16", 1), format)
    one_sum = dtype == "int8" and (format.group_size == -1 or format.scale == "int8")
    in_8_bits = m >= (32 if one_sum else 192)
    assert is_one_call(quantized_matmul, lhs, rhs) == in_8_bits
    result = jax.jit(quantized_matmul)(lhs, rhs)
    assert result.dtype == out
    found = np.asarray(result).astype(np.float64)
    # Its term for the rounding of weights covers the 13 bits of float8 accumulators.
    oracle = Oracle.of(lhs.values.astype(jnp.bfloat16), dequantize(rhs))
    scale = np.asarray(lhs.scale).astype(np.float64)
    bound = oracle.bound(jnp.float32 if in_8_bits else jnp.bfloat16) * scale
    exact = oracle.exact * scale
    bound += float(jnp.finfo(out).eps) * (np.abs(exact) + bound)
    assert (np.abs(found - exact) <= bound).all()


@kinds
def test_identity_gives_the_weights(dtype, format):
    k, n = 512, 130
    rhs = quantize(normal((k, n), "bfloat16", 1), format)
    lhs = QuantizedActivations(
        jnp.eye(k).astype(dtype), jnp.full((k, 1), 0.5, jnp.float32), jnp.float32
    )
    assert is_one_call(quantized_matmul, lhs, rhs)
    found = jax.jit(quantized_matmul)(lhs, rhs)
    np.testing.assert_array_equal(found, 0.5 * dequantized(rhs, jnp.float32))


def test_integers_are_multiplied_exactly():
    rng = np.random.default_rng(0)
    values = rng.integers(-127, 128, (256, 1024), np.int8)
    weights = rng.integers(-128, 128, (1024, 192), np.int8)
    rhs = QuantizedArray.from_integers(weights, jnp.ones((1, 192)), format=Format(8))
    lhs = QuantizedActivations(jnp.asarray(values), jnp.ones((256, 1)), jnp.float32)
    assert is_one_call(quantized_matmul, lhs, rhs)
    exact = values.astype(np.int64) @ weights.astype(np.int64)
    np.testing.assert_array_equal(jax.jit(quantized_matmul)(lhs, rhs), exact)


@pytest.mark.parametrize("format", [Format(4), Format(4, 128, scale="int8")], ids=str)
def test_one_of_a_stack(format):
    stack = quantize(normal((3, 512, 200), "bfloat16", 1), format)
    lhs = quantize_activations(normal((64, 512), "bfloat16", 0), "int8")
    for i in range(3):
        assert is_one_call(quantized_matmul, lhs, stack.select(i))
        found, expected = (jax.jit(quantized_matmul)(lhs, x) for x in (stack.select(i), stack[i]))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_tokens_of_zeros_and_without_digits(dtype):
    x = normal((256, 512), "bfloat16", 0)
    x = x.at[3].set(0).at[5, 7].set(jnp.nan).at[9, 1].set(jnp.inf)
    rhs = quantize(normal((512, 128), "bfloat16", 1), WEIGHTS[dtype][0])
    product = functools.partial(quantized_matmul, lhs_qtype=dtype)
    assert is_one_call(product, x, rhs, name="rounded_activations")
    found = np.asarray(jax.jit(product)(x, rhs)).astype(np.float64)
    np.testing.assert_array_equal(found[3], 0)
    assert np.isnan(found[[5, 9]]).all()
    assert np.isfinite(np.delete(found, [5, 9], 0)).all()


@pytest.mark.parametrize(("dtype", "format"), [kind for kind in KINDS if kind[1].group_size != 384])
@pytest.mark.parametrize(("m", "width", "hidden"), [(201, 208, 304), (512, 1024, 2048)])
@pytest.mark.parametrize("silent", [True, False], ids=["no MLP", "all"])
def test_a_block_rounds_its_rows(dtype, format, m, width, hidden, silent):
    """A NaN affects only its token. Without the MLP, fewer values round differently."""
    attended, x = (normal((m, width), "bfloat16", seed) for seed in (0, 1))
    attended = attended.at[7, 3].set(jnp.nan)
    norm = 1 + normal((width,), "float32", 2) / 8

    def weight(*shape, seed):
        return quantize(normal(shape, "float32", seed) / np.sqrt(shape[-2]), format)

    out, gate_up = weight(width, width, seed=3), weight(2, width, hidden, seed=4)
    down, following = weight(hidden, width, seed=5), [weight(width, n, seed=n) for n in (208, 72)]
    operands = attended, x, out, norm * float(not silent), gate_up, down
    options = {"lhs_qtype": dtype, "activation": "gelu_tanh", "following": (norm, following)}

    def block(attended, x, out, norm, gate_up, down):
        weights: Any = {"out": out, "norm": norm, "gate_up": gate_up, "down": down}
        return quantized_block(attended, x, **weights, **options)

    assert is_one_call(block, *operands, name="rounded_block")

    # Without jit: XLA does not round between the operations of a program.
    product = functools.partial(quantized_matmul, lhs_qtype=dtype)
    y = x + product(attended, out)
    normed = rms_norm(y, operands[3], 1e-5)
    wide = functools.partial(product, normed, preferred_element_type=jnp.float32)
    gate, up = (wide(gate_up.select(i)) for i in range(2))
    y += product((jax.nn.gelu(gate) * up).astype(x.dtype), down)
    normed = rms_norm(y, norm, 1e-5)
    expected = [y, *(product(normed, matrix) for matrix in following)]
    for got, want in zip(jax.tree.leaves(jax.jit(block)(*operands)), expected, strict=True):
        got, want = (np.asarray(rows).astype(np.float64) for rows in (got, want))
        assert np.isnan(got[7]).all() and np.isnan(want[7]).all()
        got, want = (np.delete(rows, 7, 0) for rows in (got, want))
        # A difference in the last bit of bfloat16 may round to the adjacent 8-bit value.
        assert np.linalg.norm(got - want) <= (0.01 if silent else 0.04) * np.linalg.norm(want)
        assert np.abs(got - want).max() <= 0.3 * want.std()


def test_products_without_a_kernel_are_compositions():
    for m, format, dtype in [
        (64, INT4, jnp.int8),
        (256, Format(4, 32), jnp.int8),
        (256, Format(8, 128, "integer"), jnp.int8),
        (256, Format(4, 128, "float"), jnp.int8),
        (256, FP8, jnp.int8),
        (256, INT4, jnp.float8_e4m3fn),
    ]:
        lhs = quantize_activations(normal((m, 512), "bfloat16", 0), dtype)
        rhs = quantize(normal((512, 128), "bfloat16", 1), format)
        assert not is_one_call(quantized_matmul, lhs, rhs)


def test_derivatives_match_the_composition():
    x, rhs = normal((256, 512), "float32", 0), quantize(normal((512, 128), "float32", 1), INT4)

    def loss(x: Any, backend: Any) -> Any:
        out = quantized_matmul(x, rhs, lhs_qtype=jnp.int8, backend=backend)
        return jnp.sum(out**2)

    found, expected = (
        jax.jit(jax.grad(loss), static_argnums=1)(x, backend) for backend in ("cuda", "xla")
    )
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2 * float(jnp.abs(found).max()))


# --- rounding inside the call ---------------------------------------------------------------------

FLOATS = ("bfloat16", "float16", "float32")


def tokens(m: int, k: int, dtype: str) -> jax.Array:
    """Activations of every magnitude; the first tokens are special cases of rounding."""
    rng = np.random.default_rng(m + k)
    x = rng.normal(size=(m, k)) * 10.0 ** rng.uniform(-4, 4, (m, 1))
    x[5] = 2.0**-130 * rng.integers(-9, 10, k)
    x[6] = float(jnp.finfo(dtype).max) * rng.uniform(-1, 1, k)
    x[6, -1] = float(jnp.finfo(dtype).max)
    x[7] = (rng.integers(-127, 128, k) + 0.5) / 128  # ties
    x[7, 0] = 127 / 128
    x[8] = 2.0**-100 * rng.normal(size=k)
    x = x.astype(jnp.dtype(dtype))
    x[1], x[2, -1], x[3, 0], x[4, k // 2] = 0, np.nan, np.inf, -np.inf
    return jnp.asarray(x)


def in_order(values: Any, k: int) -> np.ndarray:
    """The values of a call with interleaved columns put in order; the padding must be 0."""
    halves = np.asarray(values).astype(np.float32).reshape(values.shape[0], -1, 8, 2)
    columns = np.swapaxes(halves, -1, -2).reshape(values.shape)
    np.testing.assert_array_equal(columns[:, k:], 0)
    return columns[:, :k]


def assert_rounded(
    x: Any, rhs: Any, dtype: str, factor: Any = None, stored: str | None = None
) -> None:
    types = {
        "dtype": jnp.dtype(dtype),
        "stored": stored or dtype,
        "out_dtype": jnp.dtype("float32"),
    }
    _, values, scale = jax.jit(functools.partial(cuda_calls.rounded, **types))(x, factor, rhs)
    expected = rounding(x, dtype, factor)
    found = in_order(values, x.shape[-1]) if stored is None else values.astype(jnp.float32)
    np.testing.assert_array_equal(found, expected[0])
    np.testing.assert_array_equal(np.asarray(scale)[:, None], expected[1])


# Rows shorter than a vector, of one unit, of one and two units per thread, longer; and large M.
SHAPES = [(9, 3), (33, 1001), (34, 16), (40, 1000), (65, 8192), (40, 17000), (36, 40008)]
SHAPES += [(9000, 72)]


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_every_value_matches_numpy(m, k, kind, dtype):
    rhs = quantize(normal((k, 64), "bfloat16", 1), WEIGHTS[dtype][0])
    assert_rounded(tokens(m, k, kind), rhs, dtype)


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("k", [1000, 1001, 17000])
def test_every_value_matches_numpy_with_a_factor(k, kind, dtype):
    factor = jnp.exp(normal((k,), "float32", 2))
    rhs = quantize(normal((k, 64), "bfloat16", 1), WEIGHTS[dtype][0])
    assert_rounded(tokens(40, k, kind), rhs, dtype, factor)


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(("m", "k"), [(1, 4096), (2, 64), (5, 17984), (16, 40000), (31, 1024)])
def test_values_for_small_m_are_bfloat16(m, k, kind, dtype):
    rhs = quantize(normal((k, 192), "bfloat16", 1), Format(4, 64))
    x = tokens(40, k, kind)[9 - m % 9 : 9 - m % 9 + m]
    if kind != "bfloat16" or m > 2:  # else the product rounds in registers and writes no values
        assert_rounded(x, rhs, dtype, stored="bfloat16")
    assert_rounded(x, rhs, dtype, jnp.exp(normal((k,), "float32", 2)), stored="bfloat16")


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("k", [64, 1024, 4032])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_every_value_rounded_by_the_product_matches_numpy(k, dtype, out):
    """Products with an identity give the rounded bfloat16 rows times their scales."""
    rhs = QuantizedArray.from_integers(np.eye(k, dtype=np.int8), jnp.ones((1, k)), format=Format(8))
    whole = tokens(9, k, "bfloat16")
    product = jax.jit(
        functools.partial(quantized_matmul, lhs_qtype=dtype, preferred_element_type=out)
    )
    for first, m in [
        *((row, 1) for row in range(9)),
        (0, 2),
        (1, 3),
        (4, 4),
        (4, 5),
        (3, 6),
        (1, 8),
    ]:
        x = whole[first : first + m]
        assert is_one_call(product, x, rhs, name="rounded_activations")
        values, scale = rounding(x, dtype)
        expected = jnp.asarray(values * scale).astype(out).astype(jnp.float32)
        found = product(x, rhs).astype(jnp.float32)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-126, err_msg=f"{first, m}")


@pytest.mark.parametrize("own_buffers", [True, False])
@pytest.mark.parametrize("dtype", WEIGHTS)
def test_small_m_at_odd_addresses_with_overlapping_results(monkeypatch, dtype, own_buffers):
    """The result overlaps the activations, so two kernels round and multiply; int8 is exact."""
    if not own_buffers:
        monkeypatch.setattr(call, "apart", lambda *arrays: arrays)
    d, m = 512, 4
    rhs = QuantizedArray.from_integers(
        np.random.default_rng(0).integers(-1, 2, (d, d), np.int8),
        jnp.ones((1, d)),
        format=Format(8),
    )
    product = functools.partial(quantized_matmul, lhs_qtype=dtype)
    x, flat = normal((3 * m, d), "bfloat16", 0), normal((m * d + 3,), "bfloat16", 2)
    apart = jax.jit(lambda x, rhs: product(x, rhs))
    tolerance = 0 if dtype == "int8" else 0.01

    @jax.jit
    def moved(flat: Any, rhs: Any) -> Any:
        return product(lax.slice(flat, (3,), (3 + m * d,)).reshape(m, d), rhs)

    expected = apart(flat[3:].reshape(m, d), rhs)
    np.testing.assert_allclose(moved(flat, rhs), expected, rtol=tolerance, atol=tolerance)

    @functools.partial(jax.jit, donate_argnums=0)
    def updated(x: Any, rhs: Any) -> Any:
        rows = lax.slice_in_dim(x, m, 2 * m)
        return lax.dynamic_update_slice(x, product(rows, rhs), (m, 0))

    expected = x.at[m : 2 * m].set(apart(x[m : 2 * m], rhs))
    np.testing.assert_allclose(updated(x, rhs), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(
    "format", [INT4, Format(4), INT8, FP8, NF4, MXFP4, Format(3, 64, "float"), UINT4], ids=str
)
def test_products_of_small_m(format, kind, dtype):
    k, n = 1024, 200
    rhs = quantize(normal((k, n), "bfloat16", 1), format)
    product = functools.partial(quantized_matmul, lhs_qtype=dtype)
    for m in (1, 5, 8, 9, 16, 32)[: 6 if format.bits <= 4 else 5]:
        x = tokens(40, k, kind)[:m]
        assert is_one_call(product, x, rhs, name="rounded_activations")
        found = np.asarray(jax.jit(product)(x, rhs)).astype(np.float64)
        values, scale = rounding(x, dtype)
        oracle = Oracle.of(jnp.asarray(values, jnp.bfloat16), dequantize(rhs)).scaled(scale)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(oracle.exact))
        # Values far beyond the dtype's range are infinite.
        small = np.abs(oracle.exact) < float(jnp.finfo(kind).max) / 2
        close = np.abs(found - oracle.exact) <= oracle.bound(jnp.dtype(kind))
        assert close[small].all()


@kinds
@pytest.mark.parametrize("kind", FLOATS)
def test_the_product_matches_rounded_activations(dtype, format, kind):
    """Bitwise: the same kernel multiplies the same values."""
    m, k, n = 301, 1000, 200
    x, rhs = tokens(m, k, kind), quantize(normal((k, n), "bfloat16", 1), format)
    values, scale = rounding(x, dtype)
    given = QuantizedActivations(jnp.asarray(values).astype(dtype), jnp.asarray(scale), x.dtype)
    product = functools.partial(quantized_matmul, lhs_qtype=dtype)
    assert is_one_call(product, x, rhs, name="rounded_activations")
    expected = jax.jit(quantized_matmul)(given, rhs)
    batch = jax.jit(jax.vmap(product, (0, None)))(x.reshape(7, 43, k), rhs)
    for found in (jax.jit(product)(x, rhs), batch.reshape(m, n)):
        # In float32, since NumPy compares NaN of bfloat16 as unequal.
        floats, want = (np.asarray(y).astype(np.float32) for y in (found, expected))
        np.testing.assert_array_equal(floats, want)
    wide = jax.jit(functools.partial(quantized_matmul, preferred_element_type=jnp.float32))
    bias = normal((n,), kind, 3)
    found = jax.jit(functools.partial(product, bias=bias, activation="relu"))(x, rhs)
    want = jax.nn.relu(wide(given, rhs) + bias.astype(jnp.float32)[None]).astype(kind)
    found, want = (np.asarray(x).astype(np.float64) for x in (found, want))
    np.testing.assert_allclose(found, want, rtol=float(jnp.finfo(kind).eps))


@pytest.mark.parametrize("own_buffers", [True, False])
@pytest.mark.parametrize("dtype", WEIGHTS)
def test_operands_at_odd_places_and_results_over_them(monkeypatch, dtype, own_buffers):
    """Without barriers XLA fuses slices and updates into the call."""
    if not own_buffers:
        monkeypatch.setattr(call, "apart", lambda *arrays: arrays)
    d, m = 512, 256
    rhs = quantize(normal((d, d), "bfloat16", 1), WEIGHTS[dtype][0])
    product = functools.partial(quantized_matmul, lhs_qtype=dtype)
    x, flat = normal((3 * m, d), "bfloat16", 0), normal((m * d + 3,), "bfloat16", 2)
    apart = jax.jit(lambda x, rhs: product(x, rhs))

    @jax.jit
    def moved(flat: Any, rhs: Any) -> Any:
        return product(lax.slice(flat, (3,), (3 + m * d,)).reshape(m, d), rhs)

    expected = apart(flat[3:].reshape(m, d), rhs)
    np.testing.assert_array_equal(moved(flat, rhs), expected)

    @jax.jit
    def updated(x: Any, rhs: Any) -> Any:
        rows = lax.slice_in_dim(x, 100, 100 + m)
        return lax.dynamic_update_slice(x, product(rows, rhs), (100, 0))

    expected = x.at[100 : 100 + m].set(apart(x[100 : 100 + m], rhs))
    np.testing.assert_array_equal(updated(x, rhs), expected)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(x: Any, rhs: Any) -> Any:
        def turn(i: Any, x: Any) -> Any:
            rows = lax.dynamic_slice_in_dim(x, i * m, m)
            return lax.dynamic_update_slice(x, product(rows, rhs), (i * m, 0))

        return lax.fori_loop(0, 3, turn, x)

    expected = jnp.concatenate([apart(x[i * m :][:m], rhs) for i in range(3)])
    np.testing.assert_array_equal(loop(x, rhs), expected)


@pytest.mark.parametrize("m", [1, 16, 256])
@pytest.mark.parametrize("dtype", WEIGHTS)
def test_a_chain_in_a_captured_graph(dtype, m):
    """Eight calls, with weights computed in the same program; replayed with other values."""
    d = 1024
    weights = [quantize(normal((d, d), "bfloat16", i), WEIGHTS[dtype][0]) for i in range(8)]
    product = functools.partial(quantized_matmul, lhs_qtype=dtype)

    def chain(x: Any, weights: Any) -> Any:
        for rhs in weights:
            x = product(x, rhs._with(scale=rhs.scale * 2)) * jnp.bfloat16(0.5**6)
        return x

    program, one = jax.jit(chain), jax.jit(lambda x, rhs: chain(x, [rhs]))
    for seed in range(3):
        x = expected = normal((m, d), "bfloat16", seed + 20)
        for rhs in weights:
            expected = one(expected, rhs)
        np.testing.assert_array_equal(program(x, weights), expected)
