"""Integer scales with a float scale per channel: values, products and sharding."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import PLATFORM, dequantize, dequantized
from jax.sharding import AxisType
from meshes import assert_close, assert_divides, make_mesh, product

from jaxlowbit import (
    INT4,
    Format,
    QuantizedArray,
    quantize,
    quantized_matmul,
    scan,
    supported_backends,
)
from jaxlowbit import nnx as jl_nnx
from jaxlowbit._backends import cuda
from jaxlowbit._core import layout
from jaxlowbit._core.format import format_name, parse_format

FORMAT = Format(4, 64, scale="int8")
FORMATS = [FORMAT, Format(3, 32, scale="int8"), Format(2, 128, scale="int8")]
BACKENDS = ["cpu", "xla"] if PLATFORM == "cpu" else ["xla"]
formats = pytest.mark.parametrize("format", FORMATS, ids=format_name)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def shape_of(array: Any) -> tuple[int, ...]:
    return tuple(array.shape)


@formats
def test_weights_are_integers_of_8_bits(format):
    """The largest group of a channel has the largest scale; the format's name round-trips."""
    assert parse_format(format_name(format)) == format
    array = quantize(random(256, 40), format, quantizer="absmax")
    assert array.scale.dtype == jnp.int8 and shape_of(array.tensor_scale) == (40,)
    scale = np.asarray(layout.unpack_groups(array.scale))[:, :40]
    assert scale.min() >= 1 and scale.max() == format.max_scale
    integers = np.asarray(dequantized(array, jnp.float32)) / np.asarray(array.unit)[0]
    np.testing.assert_allclose(integers, np.round(integers), atol=1e-4)
    assert np.abs(integers).max() < 128.5


def test_a_coarser_scale_costs_little():
    weight = random(512, 64)
    errors = [
        float(jnp.linalg.norm(dequantized(quantize(weight, own), jnp.float32) - weight))
        for own in (INT4.replace(group_size=64), FORMAT)
    ]
    assert errors[0] < errors[1] < 1.1 * errors[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_scale(backend, dtype):
    """Multiplies rows of an identity and random rows; scales include 0 and the maximum."""
    rng = np.random.default_rng(0)
    values = rng.integers(-8, 8, (128, 70), np.int8)
    scale = np.arange(140, dtype=np.int8).reshape(2, 70) % 17
    unit = rng.uniform(0.5, 1, 70).astype(np.float32)
    array = QuantizedArray.from_integers(values, scale, tensor_scale=unit, format=FORMAT)
    expected = values * scale.repeat(64, 0).astype(np.float32) * unit
    np.testing.assert_array_equal(dequantized(array, jnp.float32), expected)
    multiply = jax.jit(functools.partial(quantized_matmul, backend=backend))
    found = multiply(jnp.eye(128, dtype=dtype), array)
    np.testing.assert_array_equal(found, expected.astype(dtype))
    rows = jnp.asarray(rng.normal(size=(19, 128))).astype(dtype)
    want = np.asarray(rows).astype(np.float64) @ dequantize(array).value
    np.testing.assert_allclose(
        np.asarray(multiply(rows, array)).astype(np.float64), want, rtol=0.01, atol=0.5
    )


def test_transformations():
    stack = quantize(random(2, 64, 64), FORMAT)
    x = jnp.asarray(random(2, 3, 64, seed=1))
    whole = x @ stack
    assert_close(whole, x @ dequantized(stack, jnp.float32))
    assert_close(jax.vmap(product)(x, stack), whole)
    assert_close(jax.vmap(lambda i: x[0] @ stack.select(i))(jnp.arange(2)), x[0] @ stack)
    both = x[0] @ stack[0] @ stack[1]
    assert_close(scan(lambda h, layer: (h @ layer, None), x[0], stack)[0], both)
    found = jax.grad(lambda x: jnp.sum(jnp.sin(x @ stack)))(x)
    floats = dequantized(stack, jnp.float32)
    assert_close(found, jax.grad(lambda x: jnp.sum(jnp.sin(x @ floats)))(x))
    rounded = quantized_matmul(x, stack, lhs_qtype=jnp.int8)
    np.testing.assert_allclose(rounded, whole, atol=0.05 * float(jnp.abs(whole).max()))

    def loss(unit: Any) -> Any:
        return jnp.sum(x @ stack._with(tensor_scale=unit))

    slope = jax.grad(loss)(stack.tensor_scale)
    assert slope.shape == (2, 64)
    assert_close(jnp.sum(slope * stack.tensor_scale), loss(stack.tensor_scale))


def test_parts_of_n_that_are_padded():
    """Channel scales skip the padding of each shard of n, in products and in lookups."""
    whole = quantize(random(64, 160), FORMAT)
    array = quantize(random(64, 160), FORMAT, shards=(1, 2))
    assert array.padded_shape == (64, 256) and shape_of(array.tensor_scale) == (160,)
    np.testing.assert_array_equal(array.dequantize(), whole.dequantize())
    x = jnp.asarray(random(3, 64, seed=1))
    assert_close(x @ array, x @ whole)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes(kind):
    """Channel scales are sharded with the columns."""
    mesh, x = make_mesh(kind), jnp.asarray(random(4, 256, seed=1))
    for name, shards in (("n", (1, 1)), ("k", (4, 1))):
        array = quantize(random(256, 512), FORMAT, shards=shards)
        specs = array.partition_spec(mesh, **{name: "b"})
        assert specs.tensor_scale == (jax.P("b") if name == "n" else jax.P(None))
        assert_divides(mesh, kind, name, specs, x, array)


def test_layers():
    """Each matrix of a stack has separate scales; activations may be quantized."""

    @nnx.vmap
    def make(key: Any) -> Any:
        rngs = nnx.Rngs(key)
        return jl_nnx.QuantizedLinear(64, 64, format=FORMAT, lhs_qtype=jnp.int8, rngs=rngs)

    layers = make(jax.random.split(jax.random.key(0), 3))
    assert layers.kernel.tensor_scale.shape == (3, 64)
    x = jnp.asarray(random(3, 2, 64))
    found = nnx.vmap(lambda layer, x: layer(x))(layers, x)
    assert_close(found, quantized_matmul(x, layers.kernel, lhs_qtype=jnp.int8))


def test_kernels_that_read_two_levels():
    array = quantize(random(64, 70), FORMAT)
    reasons = supported_backends(jnp.ones((2, 64)), array)
    assert reasons["cpu"] is None and "8-bit ones" in str(reasons["pallas"])
    taken = functools.partial(cuda.unsupported_activations, jnp.dtype("int8"))
    assert taken(FORMAT) is None
    assert "4-bit integers also with int8 scales" in str(taken(Format(8, 64, scale="e8m0")))
    assert "integers of 4 and 8 bits" in str(taken(Format(3, 64, scale="int8")))


def test_unsupported_files_raise():
    with pytest.raises(ValueError, match="scale='int8' with bits=8, but integer scales are for"):
        Format(8, 64, scale="int8")
    with pytest.raises(ValueError, match="scale='int8' with a codebook"):
        Format(4, 64, codebook="nf4", scale="int8")
    values, scale = jnp.zeros((64, 8), jnp.int4), jnp.full((1, 8), 17, jnp.int8)
    pack = functools.partial(QuantizedArray.from_integers, values, format=FORMAT)
    with pytest.raises(ValueError, match=r"scale reaches from 17 to 17, but .* from 0 to 16; use"):
        pack(scale, tensor_scale=1.0)
    with pytest.raises(ValueError, match=r"floats of shape \(8,\), one for each channel"):
        pack(scale - 1, tensor_scale=jnp.ones(7))
    with pytest.raises(ValueError, match="scale is float32, but the format has int8 scales"):
        pack(jnp.ones((1, 8)), tensor_scale=1.0)
    clipped = jax.jit(lambda scale: pack(scale, tensor_scale=1.0))(scale)
    assert np.asarray(clipped.scale).max() == 16
    weight = np.full((256, 8), 1e-3, np.float32)
    weight[0] = 1e3
    with pytest.raises(ValueError, match="the largest weight, 1000, is so far from the others"):
        quantize(weight, FORMAT)
