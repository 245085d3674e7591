"""`jax.experimental.jet`: Taylor coefficients match dense products."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

import jaxlowbit as jl

K, N = 64, 32
RNG = np.random.default_rng(0)
X, *TERMS = map(jnp.asarray, RNG.standard_normal((4, 3, K), np.float32))
WEIGHT = jnp.asarray(RNG.standard_normal((K, N), np.float32) / 8)
UP = jnp.asarray(RNG.standard_normal((2, K, K), np.float32) / 8)


def matrix(weight, format):
    return jl.quantize(weight, format)


def agrees(quantized, dense, primals=(X,), series=(TERMS,)):
    found, wanted = (jet(f, primals, series) for f in (quantized, dense))
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)
    moved = jax.tree.leaves(found[1])
    assert all(np.abs(term).max() > 0.01 for term in moved[:2])


@pytest.mark.parametrize("format", ["int4", "int4-g32-float", "mxfp4", "int4-int8"])
def test_a_product(format):
    rhs = matrix(WEIGHT, format)
    agrees(lambda x: jnp.sin(x) @ rhs, lambda x: jnp.sin(x) @ rhs.dequantize(jnp.float32))


@pytest.mark.parametrize("format", ["int4", "int4-g32-float"])
def test_scales_and_float_zeros_have_coefficients(format):
    rhs = matrix(WEIGHT, format)

    def moved(scale, zero):
        return dataclasses.replace(rhs, scale=scale, zero=zero)

    zero = rhs.zero if "float" in format else None
    primals = (X, rhs.scale) + (() if zero is None else (zero,))
    series = [[jnp.cos(x), jnp.sin(x), x / 2] for x in primals]

    def quantized(x, scale, zero=None):
        return x @ moved(scale, zero)

    def dense(x, scale, zero=None):
        return x @ moved(scale, zero).dequantize(jnp.float32)

    agrees(quantized, dense, primals, series)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, up, down: jl.quantized_mlp(x, gate_up=up, down=down),
        lambda x, up, down: jl.quantized_glu(x, up),
        lambda x, up, down: jl.quantized_matmuls(x, (down, down)),
        lambda x, up, down: jl.quantized_matmul(x, down, activation="silu"),
    ],
    ids=["mlp", "glu", "matmuls", "epilogue"],
)
def test_calls_of_several_operations_raise_a_sentence(function):
    """JAX's jet fails inside functions with a custom JVP, such as `jax.nn.relu`."""
    up, down = matrix(UP, "int4"), matrix(WEIGHT, "int4")
    with pytest.raises(NotImplementedError, match=r"jet: a call of several .*; compute it from"):
        jet(lambda x: function(x, up, down), (X,), (TERMS,))


def test_under_jit():
    rhs = matrix(WEIGHT, "int4")
    agrees(jax.jit(lambda x: (x @ rhs) ** 2), lambda x: (x @ rhs.dequantize(jnp.float32)) ** 2)
