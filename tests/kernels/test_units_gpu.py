"""Tensor scales in multi-product calls and epilogues on a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_problems import normal
from helpers import Oracle, assert_within, calls, dequantize, quantize, scaled_matrices

from jaxlowbit import (
    NVFP4,
    Format,
    quantized_block,
    quantized_glu,
    quantized_matmul,
    quantized_matmuls,
    quantized_mlp,
)

pytestmark = pytest.mark.gpu
ROWS = (1, 16, 40, 256)
# The groups of the last format are whole columns.
FORMATS = [NVFP4, Format(4, 64, scale="int8"), Format(3, 32, scale="int8"), Format(4, scale="int8")]
K, F, N = 512, 768, 200
each_format = pytest.mark.parametrize("format", FORMATS, ids=str)


def stack_of(format, k, n, factors, seed):
    """Weights (len(factors), k, n), with tensor scales multiplied by `factors`."""
    return scaled_matrices(quantize(normal(len(factors), k, n, seed=seed), format), factors)


def one_call(f, target, *operands) -> Any:
    """Results of a program that is one custom call, and of its reference."""
    assert calls(f, *operands) == [target]
    zeros = jax.tree.map(jnp.zeros_like, operands)
    return jax.jit(f)(*operands), jax.jit(lambda *x: jax.jvp(f, x, zeros)[0])(*operands)


def assert_near(found, expected):
    """Compares bfloat16 results within a few units in the last place of the maximum."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.isfinite(y).all() and x.shape == y.shape
        assert np.abs(x - y).max() <= 8 * 2.0**-8 * np.abs(y).max()


@pytest.mark.parametrize("rows", ROWS)
@each_format
def test_products_of_one_lhs(format, rows):
    """More weights than fit one launch, including views of a stack."""
    stack = stack_of(format, K, N, [2.0**100, -3, 2.0**-100], seed=1)
    weights = [stack.select(2), stack.select(1), stack.select(-3)]
    weights += [quantize(normal(K, n, seed=n), format) for n in (64, 130)]
    matmuls = functools.partial(quantized_matmuls, preferred_element_type="float32")
    lhs = normal(rows, K)
    found = jax.jit(lambda x: matmuls(x, weights))(lhs)
    assert calls(lambda x: matmuls(x, weights), lhs) == ["quantized_matmuls"]
    plain = [dequantize(stack[i]) for i in (2, 1, 0)] + [dequantize(x) for x in weights[3:]]
    for got, weight in zip(found, plain, strict=True):
        oracle = Oracle.of(lhs, weight)
        assert_within(got, oracle.exact, oracle.scaled(1).bound(got.dtype))


@pytest.mark.parametrize("rows", ROWS)
@each_format
def test_epilogue_of_a_stack(format, rows):
    """A batch of weights, each with a bias, an activation and a residual."""
    stack = stack_of(format, K, N, [1, 8, -0.5], seed=2)
    lhs, bias = normal(3, rows, K), normal(3, N, seed=3).astype(jnp.float32)
    residual = normal(3, rows, N, seed=4)

    def f(lhs, residual):
        return quantized_matmul(lhs, stack, bias=bias, activation="gelu", residual=residual)

    assert_near(*one_call(f, "quantized_matmul_fused", lhs, residual))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", ["silu", "relu"])  # via registers, via shared memory
@each_format
def test_gate_and_up(format, activation, rows):
    """Different tensor scales, in order and selected from a longer stack."""
    stack = stack_of(format, K, F, [2.0**-100, 1, 2.0**100, 16], seed=5)
    bias = normal(2, F, seed=6).astype(jnp.float32)
    glu = functools.partial(quantized_glu, activation=activation)
    for pair, own in (([1, 3], bias), ([3, 1], None), ([-2, 0], None)):
        f = functools.partial(lambda x, weight, own: glu(x, weight, bias=own), own=own)
        got, want = one_call(
            lambda x, f=f, pair=pair: f(x, stack.select(jnp.array(pair))),
            "quantized_matmul_fused",
            normal(rows, K),
        )
        assert_near(got, want)
        in_order = jax.tree.map(lambda leaf, pair=pair: leaf[jnp.array(pair)], stack)
        np.testing.assert_array_equal(jax.jit(f)(normal(rows, K), in_order), got)


@pytest.mark.parametrize("rows", ROWS)
@each_format
def test_mlp_and_block(format, rows):
    """Stacked layers; the output projection before the first norm has a tensor scale."""
    pairs = stack_of(format, K, F, [1, 1, 4, 0.25], seed=7)
    downs = stack_of(format, F, K, [1, -2], seed=8)
    out, q = quantize(normal(F, K, seed=9), format), stack_of(format, K, N, [1, 2.0**-60], seed=10)
    norm = 1 + normal(K, seed=11).astype(jnp.float32)

    def mlp(x, layer):
        return quantized_mlp(
            x, gate_up=pairs.select(jnp.array([2 * layer, 2 * layer + 1])), down=downs.select(layer)
        )

    def block(attended, x, layer):
        gate_up = pairs.select(jnp.array([2 * layer, 2 * layer + 1]))
        following = norm, (q.select(layer), q.select(1 - layer))
        return quantized_block(
            attended,
            x,
            out=out,
            norm=norm,
            gate_up=gate_up,
            down=downs.select(layer),
            following=following,
        )

    for layer in range(2):
        x, attended = normal(rows, K, seed=layer), normal(rows, F, seed=layer)
        assert_near(*one_call(functools.partial(mlp, layer=layer), "quantized_mlp", x))
        both = one_call(functools.partial(block, layer=layer), "quantized_block", attended, x)
        assert_near(*both)


@pytest.mark.parametrize("rows", ROWS)
@each_format
def test_the_largest_units_neither_overflow_nor_vanish(format, rows):
    """Powers of two in tensor scales and lhs are exact, in any order of multiplication."""
    pair, lhs = quantize(normal(2, K, F, seed=12), format), normal(rows, K)
    lhs = (lhs.astype(jnp.float32) * 2.0**-96).astype(jnp.bfloat16)
    unit = np.asarray(pair.tensor_scale)
    largest = 126 - int(np.ceil(np.log2(unit.max())))

    def f(lhs, unit):
        weights = pair._with(tensor_scale=unit)
        return *quantized_matmuls(lhs, [weights[0], weights[1]]), quantized_glu(lhs, weights)

    found = jax.jit(f)(lhs, np.ldexp(unit, largest))
    lhs = (lhs.astype(jnp.float32) * 2.0**96).astype(jnp.bfloat16)
    expected = jax.jit(f)(lhs, np.ldexp(unit, largest - 96))
    for got, want in zip(found, expected, strict=True):
        want = np.asarray(want, np.float32)
        assert np.isfinite(want).all() and want.any()
        np.testing.assert_array_equal(np.asarray(got, np.float32), want)
