"""`backend="pallas"` beyond its results, which `test_matmul.py` holds to the error bound."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLATFORM

import jaxlowbit
from jaxlowbit import Format

K, N = 256, 192
interpreted = pytest.mark.skipif(PLATFORM != "cpu", reason="Pallas interprets on the CPU only")
product = functools.partial(jaxlowbit.quantized_matmul, backend="pallas")


def weight(format: Format, *lead: int) -> jaxlowbit.QuantizedArray:
    values = np.random.default_rng(0).normal(size=(*lead, K, N)).astype(np.float32)
    return jax.jit(jaxlowbit.quantize, static_argnums=1)(values, format)


def lowered(f, lhs, rhs, platform: str) -> str:
    program = jax.jit(lambda lhs, rhs: f(lhs, rhs)).trace(lhs, rhs)
    return program.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group_size", [128, 48, -1])
@pytest.mark.parametrize("zero", ["none", "integer", "float"])
@pytest.mark.parametrize("bits", [4, 8])
def test_one_kernel_for_tpus(bits, zero, group_size, dtype):
    """Mosaic accepts it; this says nothing about running it."""
    lhs = jax.ShapeDtypeStruct((5, K), jnp.dtype(dtype))
    text = lowered(product, lhs, weight(Format(bits, group_size, zero)), "tpu")
    assert text.count("custom_call @tpu_custom_call") == 1
    assert "dot_general" not in text  # outside of the kernel


def test_no_program_gets_it_unasked():
    lhs = jax.ShapeDtypeStruct((5, K), jnp.bfloat16)
    text = lowered(lambda lhs, rhs: lhs @ rhs, lhs, weight(Format(4, 32)), "tpu")
    assert "custom_call" not in text and "dot_general" in text


def test_other_platforms_are_refused():
    lhs = jax.ShapeDtypeStruct((5, K), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"backend='pallas', but .* compiled for cuda; use .*\.$"):
        lowered(product, lhs, weight(Format(4, 32)), "cuda")


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match=r"reads 1, 2, 4 or 8 bits, the format has 3\. Use .*\.$"):
        product(jnp.ones((5, K)), weight(Format(3, 32)))


@interpreted
def test_transformations():
    rhs = weight(Format(4, 32, "integer"), 3)
    lhs = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, K)).astype(np.float32))

    def loss(multiply, lhs, rhs):
        return jnp.sum(jnp.sin(jax.vmap(multiply)(lhs, rhs)))

    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, f)))(lhs, rhs)
        for f in (product, lambda lhs, rhs: lhs @ rhs.dequantize())
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-3, atol=1e-3)


@interpreted
def test_under_shard_map():
    """The interpreter does not track what varies along a mesh, hence `check_vma`."""
    rhs = weight(Format(4, 32))
    lhs = jnp.asarray(np.random.default_rng(1).normal(size=(4, K)).astype(np.float32))
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P("rows")
    options = {"mesh": mesh, "in_specs": (rows, jax.P()), "out_specs": rows}
    mapped = jax.shard_map(product, **options, check_vma=False)
    want = lhs @ rhs.dequantize()
    np.testing.assert_allclose(jax.jit(mapped)(lhs, rhs), want, rtol=1e-4, atol=1e-4)
    text = lowered(jax.shard_map(product, **options), lhs, rhs, "tpu")
    assert "custom_call @tpu_custom_call" in text
