"""Quantized activations on a GPU: one custom call, which multiplies 8 bits on Hopper."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Oracle, dequantize, dequantized

from jaxlowbit import (
    FP8,
    INT4,
    INT8,
    Format,
    QuantizedActivations,
    QuantizedArray,
    quantize,
    quantize_activations,
    quantized_matmul,
)

pytestmark = pytest.mark.gpu
TARGET = "jaxlowbit_quantized_activations"
WEIGHTS = {
    "int8": (
        *(INT4, Format(4, 64), Format(4, 256), Format(4), INT8, Format(8, 128)),
        *(Format(4, size, scale="int8") for size in (64, 128, 384, -1)),
    ),
    "float8_e4m3fn": (FP8, Format(8, 64, codebook="e4m3"), Format(8, 128, codebook="e4m3")),
}
KINDS = [(dtype, format) for dtype, formats in WEIGHTS.items() for format in formats]
kinds = pytest.mark.parametrize(("dtype", "format"), KINDS, ids=str)


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def is_one_call(function: Any, *operands: Any) -> bool:
    return TARGET in jax.jit(function).lower(*operands).as_text()


@kinds
@pytest.mark.parametrize("m", [31, 45, 192, 301, 1000])
@pytest.mark.parametrize("out", ["bfloat16", "float32", "float16"])
def test_products_are_within_the_bound(dtype, format, m, out):
    n, k = 200, 1000  # neither fills tiles, and k is no multiple of 16
    lhs = quantize_activations(normal((m, k), out, 0), dtype)
    rhs = quantize(normal((k, n), "bfloat16", 1), format)
    one_sum = dtype == "int8" and (format.group_size == -1 or format.scale == "int8")
    in_8_bits = m >= (32 if one_sum else 192)
    assert is_one_call(quantized_matmul, lhs, rhs) == in_8_bits
    result = jax.jit(quantized_matmul)(lhs, rhs)
    assert result.dtype == out
    found = np.asarray(result).astype(np.float64)
    # Its share for the rounding of weights covers the 13 bits that sums of float8 products keep.
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


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_tokens_of_zeros_and_of_no_numbers(dtype):
    x = normal((256, 512), "bfloat16", 0)
    x = x.at[3].set(0).at[5, 7].set(jnp.nan).at[9, 1].set(jnp.inf)
    rhs = quantize(normal((512, 128), "bfloat16", 1), WEIGHTS[dtype][0])
    product = functools.partial(quantized_matmul, activation_dtype=dtype)
    assert is_one_call(product, x, rhs)
    found = np.asarray(jax.jit(product)(x, rhs)).astype(np.float64)
    np.testing.assert_array_equal(found[3], 0)
    assert np.isnan(found[[5, 9]]).all()
    assert np.isfinite(np.delete(found, [5, 9], 0)).all()


def test_what_its_kernels_lack_is_a_composition():
    for m, format, dtype in [
        (64, INT4, jnp.int8),
        (256, Format(4, 32), jnp.int8),
        (256, Format(4, 128, "integer"), jnp.int8),
        (256, FP8, jnp.int8),
        (256, INT4, jnp.float8_e4m3fn),
    ]:
        lhs = quantize_activations(normal((m, 512), "bfloat16", 0), dtype)
        rhs = quantize(normal((512, 128), "bfloat16", 1), format)
        assert not is_one_call(quantized_matmul, lhs, rhs)


def test_derivatives_are_those_of_the_composition():
    x, rhs = normal((256, 512), "float32", 0), quantize(normal((512, 128), "float32", 1), INT4)

    def loss(x: Any, backend: Any) -> Any:
        out = quantized_matmul(x, rhs, activation_dtype=jnp.int8, backend=backend)
        return jnp.sum(out**2)

    found, expected = (
        jax.jit(jax.grad(loss), static_argnums=1)(x, backend) for backend in ("cuda", "xla")
    )
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2 * float(jnp.abs(found).max()))
