"""`quantized_block` as one custom call of the CPU, compared with its composition."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import calls, quantize, scaled_matrices

from jaxlowbit import INT4, MXFP4, MXFP8, NF4, NVFP4, Format, quantized_block

D, F = 72, 200  # not multiples of the strip of 64 channels
KINDS = [
    (Format(4, 32, "float"), "float32"),
    (Format(8, 32), "float32"),
    (Format(4, 128, "integer"), "bfloat16"),
    (Format(3, 16), "float16"),
    (NF4, "bfloat16"),
    (MXFP4, "bfloat16"),
    (NVFP4, "bfloat16"),
    (Format(4, 64, scale="int8"), "bfloat16"),
]


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def normal(*shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values / (np.sqrt(shape[-2]) if len(shape) > 1 else 1), jnp.float32)


def weights(format):
    """Weights in one format, but with NF4 the down projection is INT4; scales are float16."""
    shapes = {"out": (40, D), "pair": (2, D, F), "down": (F, D), "q": (D, 64), "k": (D, 24)}
    return {
        name: quantize(
            normal(*shape, seed=i),
            INT4 if name == "down" and format == NF4 else format,
            scale_dtype=None if format.scale else "float16",
        )
        for i, (name, shape) in enumerate(shapes.items())
    }


def block(rows, dtype, format, *, one_call, activation: Any = "silu", follows=True):
    w, norm = weights(format), 1 + normal(D, seed=9) / 8
    attended = normal(rows, 40, seed=7).astype(dtype) * rows**0.5
    residual = normal(rows, D, seed=8).astype(dtype) * rows**0.5

    def run(attended, residual):
        following = (norm, (w["q"], w["k"])) if follows else None
        return quantized_block(
            attended,
            residual,
            out=w["out"],
            norm=norm,
            gate_up=w["pair"],
            down=w["down"],
            following=following,
            activation=activation,
        )

    if not one_call:  # `jvp` runs the composition, also for the value
        zeros = jnp.zeros_like(attended), jnp.zeros_like(residual)
        return jax.jit(lambda *x: jax.jvp(run, x, zeros)[0])(attended, residual)
    expected = ["quantized_block"] if rows else []
    assert calls(run, attended, residual, platform="cpu") == expected
    return jax.jit(run)(attended, residual)


def assert_near(found, expected, dtype):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype == dtype and x.shape == y.shape
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.abs(x - y).max(initial=0) <= 16 * float(jnp.finfo(dtype).eps) * np.abs(y).max(
            initial=0
        )


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 50])
@pytest.mark.parametrize(("format", "dtype"), KINDS[:1] + KINDS[2:3], ids=str)
def test_one_call_is_its_composition(rows, format, dtype):
    found = block(rows, dtype, format, one_call=True)
    assert_near(found, block(rows, dtype, format, one_call=False), dtype)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_every_activation(activation):
    format, dtype = KINDS[1]
    found = block(3, dtype, format, one_call=True, activation=activation, follows=False)
    expected = block(3, dtype, format, one_call=False, activation=activation, follows=False)
    assert_near(found, expected, dtype)


def test_float16_and_odd_widths():
    format, dtype = KINDS[3]
    found = block(2, dtype, format, one_call=True)
    assert_near(found, block(2, dtype, format, one_call=False), dtype)


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize(("format", "dtype"), KINDS[4:], ids=["nf4", "mxfp4", "nvfp4", "int8"])
def test_codebooks_with_integers_and_8_bit_scales(format, dtype, rows):
    found = block(rows, dtype, format, one_call=True)
    assert_near(found, block(rows, dtype, format, one_call=False), dtype)


@pytest.mark.parametrize("format", [NVFP4, Format(4, 64, scale="int8")], ids=str)
def test_tensor_scales_of_gate_and_up_from_a_stack(format):
    """Each matrix has a separate tensor scale, selected by the index; some are extreme."""
    stack = quantize(normal(6, D, F), format)
    stack = scaled_matrices(stack, [3e-38, 1, 0.5, -40, 1e30, 7])
    w, norm = weights(NVFP4), 1 + normal(D, seed=9) / 8

    def run(attended, residual, pair):
        gate_up = stack.select(pair)
        return quantized_block(
            attended, residual, out=w["out"], norm=norm, gate_up=gate_up, down=w["down"]
        )

    attended, residual = normal(3, 40, seed=7), normal(3, D, seed=8)
    operands = attended.astype(jnp.bfloat16), residual.astype(jnp.bfloat16)
    zeros = jax.tree.map(jnp.zeros_like, operands)
    for pair in ([2, 3], [3, 2], [-1, 1], [0, 4]):
        one = functools.partial(run, pair=jnp.array(pair))
        assert calls(one, *operands, platform="cpu") == ["quantized_block"]
        expected = jax.jit(lambda *x, one=one: jax.jvp(one, x, zeros)[0])(*operands)
        assert np.isfinite(np.asarray(expected, np.float32)).all()
        assert_near(jax.jit(one)(*operands), expected, jnp.bfloat16)


# Products of one lhs with different paths: table lookups of sums, 8-bit floats, and others.
def test_following_products_of_several_widths():
    norm, rows = 1 + normal(D, seed=9) / 8, normal(1, D, seed=8)
    w = weights(Format(4, 32))
    formats = [Format(bits, 32, "float") for bits in (2, 4, 2, 1)]
    formats[2:2] = [MXFP8, Format(8, 32), MXFP8]
    following = tuple(quantize(normal(D, 64, seed=i), f) for i, f in enumerate(formats))

    def run(attended, residual):
        return quantized_block(
            attended,
            residual,
            out=w["out"],
            norm=norm,
            gate_up=w["pair"],
            down=w["down"],
            following=(norm, following),
        )

    operands = normal(1, 40, seed=7), rows
    zeros = jax.tree.map(jnp.zeros_like, operands)
    assert calls(run, *operands, platform="cpu") == ["quantized_block"]
    expected = jax.jit(lambda *x: jax.jvp(run, x, zeros)[0])(*operands)
    assert_near(jax.jit(run)(*operands), expected, jnp.float32)


def test_bits_do_not_depend_on_threads():
    format, dtype = KINDS[0]
    one, *others = (block(40, dtype, format, one_call=True) for _ in range(10))
    for other in others:
        assert jax.tree.all(jax.tree.map(jnp.array_equal, one, other))
