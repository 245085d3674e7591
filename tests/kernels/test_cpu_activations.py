"""int8 activations on the CPU, multiplied by VNNI, compared with float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLATFORM, Oracle, Weight, calls, dequantize, from_codes

from jaxlowbit import (
    DISABLED_EXPORT_CHECKS,
    INT4,
    Format,
    QuantizedActivations,
    QuantizedArray,
    quantize,
    quantized_matmul,
)
from jaxlowbit._backends import extension
from jaxlowbit._core.format import Zero

pytestmark = pytest.mark.skipif(PLATFORM != "cpu", reason="the kernels of the CPU")

K, N = 333, 70
ROWS = (1, 2, 3, 4, 9, 40)  # single rows, and panels with full and partial row tiles
ZEROS = ("none", "integer", "float")
ISA = extension.BUILD["cpu_isa"][0]
product = jax.jit(lambda lhs, rhs: lhs @ rhs)
# One program for all inputs, to compile once.
products = jax.jit(lambda inputs, rhs: [lhs @ rhs for lhs in inputs])


def rows(m: int, k: int = K, seed: int = 0) -> QuantizedActivations:
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.01, 2, (m, 1)).astype(np.float32)
    values = rng.integers(-128, 128, (m, k), np.int8)
    return QuantizedActivations(jnp.asarray(values), jnp.asarray(scale), jnp.float32)


def weight(bits: int, group_size: int, zero: Zero, k: int = K) -> QuantizedArray:
    rng = np.random.default_rng(bits)
    groups = 1 if group_size < 0 else -(-k // group_size)
    scale = rng.uniform(-1, 1, (groups, N)).astype(np.float16)
    zeros = {
        "none": None,
        "integer": rng.integers(0, 2**bits, (groups, N)).astype(np.uint8),
        "float": rng.uniform(-4, 4, (groups, N)).astype(np.float16),
    }
    codes = rng.integers(0, 2**bits, (k, N))
    return from_codes(codes, scale, zeros[zero], Format(bits, group_size, zero))


def assert_right(got: Any, lhs: QuantizedActivations, weight: Weight) -> None:
    """Error bound: values are exact in bfloat16, and scales round twice in float32."""
    oracle = Oracle.of(np.asarray(lhs.values).astype(jnp.bfloat16), weight)
    scale = np.asarray(lhs.scale).astype(np.float64)
    exact, bound = oracle.exact * scale, oracle.bound(jnp.float32) * scale
    bound += float(jnp.finfo("float32").eps) * (np.abs(exact) + bound)
    error = np.abs(np.asarray(got).astype(np.float64) - exact)
    assert (error <= bound).all(), (error / bound).max()


# Several groups per block of 64, boundaries inside some blocks, and one, two, four or more blocks.
@pytest.mark.parametrize("group_size", [16, 48, 32, 96, 64, 128, 256, -1])
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_way_is_within_its_error_bound(bits, group_size):
    rhs = weight(bits, group_size, ZEROS[(bits + group_size // 16) % 3])
    inputs, floats = [rows(m) for m in ROWS], dequantize(rhs)
    for got, lhs in zip(products(inputs, rhs), inputs, strict=True):
        assert_right(got, lhs, floats)


@pytest.mark.parametrize("m", [2, 500])
def test_the_largest_sums_are_exact(m):
    """Codes and values are maximal; several tasks of rows, and many blocks of k."""
    codes = jnp.full((2000, 1), 255, jnp.uint8)
    scale, zero = jnp.ones((1, 1)), jnp.zeros((1, 1), jnp.uint8)
    rhs = QuantizedArray.from_integers(codes, scale, zero, format=Format(8, -1, "integer"))
    values = jnp.full((m, 2000), -128, jnp.int8)
    lhs = QuantizedActivations(values, jnp.ones((m, 1)), jnp.float32)
    np.testing.assert_array_equal(product(lhs, rhs), -128.0 * 255 * 2000)


@pytest.mark.parametrize("m", [2, 7])
def test_nan_and_infinity_stay_in_their_row_and_group(m):
    lhs = rows(m)
    alone = QuantizedActivations(lhs.values, lhs.scale.at[1].set(jnp.nan), jnp.float32)
    rhs = weight(4, 32, "none")
    found, expected = np.asarray(product(alone, rhs)), np.asarray(product(lhs, rhs))
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(np.delete(found, 1, 0), np.delete(expected, 1, 0))
    found = np.asarray(product(lhs, rhs._with(scale=rhs.scale.at[0, 0, 3].set(jnp.inf))))
    changed = ~np.isfinite(found).all(0)
    assert changed.sum() == 1
    # With an infinite scale the bfloat16 kernel runs, which rounds weights.
    rounding = 2.0**-7 * float(np.abs(expected).max())
    np.testing.assert_allclose(found[:, ~changed], expected[:, ~changed], rtol=0, atol=rounding)


@pytest.mark.parametrize("m", [1, 6])
def test_a_matrix_of_a_stack_and_an_identity(m):
    values = np.random.default_rng(0).integers(-8, 8, (3, 64, 70), np.int8)
    stack = QuantizedArray.from_integers(values, jnp.full((3, 1, 70), 0.25), format=Format(4))
    lhs = QuantizedActivations(jnp.eye(m, 64, dtype=jnp.int8), jnp.full((m, 1), 0.5), jnp.float32)
    for i in (0, 2, -2):
        found = product(lhs, stack.select(jnp.int32(i)))
        np.testing.assert_array_equal(found, 0.125 * values[i, :m])


def test_conditions_for_one_call():
    """Only if it is faster than bfloat16; exported programs do not know their CPU."""

    def found(lhs: Any, rhs: Any) -> list[str]:
        return calls(lambda lhs, rhs: lhs @ rhs, lhs, rhs, platform="cpu")

    one, others = ["quantized_activations"], ["quantized_matmul"]
    rhs = weight(4, 64, "none")
    assert found(rows(1), rhs) == (one if ISA in ("vnni", "amx") else others)
    assert found(rows(64), rhs) == (one if ISA == "vnni" else others)
    floats = jnp.ones((1, K))
    product_of_floats = functools.partial(quantized_matmul, lhs_qtype=jnp.int8)
    rounding = calls(product_of_floats, floats, rhs, platform="cpu")
    assert rounding == found(rows(1), rhs)
    float8 = QuantizedActivations(jnp.ones((1, K), jnp.float8_e4m3fn), jnp.ones((1, 1)))
    assert found(float8, rhs) == others
    assert found(rows(1), quantize(jnp.ones((K, N)), "nf4")) == others
    assert found(rows(1), quantize(jnp.ones((K, N)), "int4-g32-e4m3")) == others
    assert found(rows(0), rhs) == []
    exported = jax.export.export(product, disabled_checks=DISABLED_EXPORT_CHECKS)(rows(1), rhs)
    assert "quantized_activations" not in exported.mlir_module()


def test_rows_of_float16_and_bfloat16_are_rounded_once():
    lhs, rhs = rows(5), quantize(jnp.asarray(np.eye(K, N)), INT4)
    wide = np.asarray(product(lhs, rhs))
    for dtype in (jnp.float16, jnp.bfloat16):
        narrow = QuantizedActivations(lhs.values, lhs.scale, dtype)
        np.testing.assert_array_equal(product(narrow, rhs), wide.astype(dtype))
