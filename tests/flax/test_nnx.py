"""`jaxlowbit.nnx`: layers match `nnx.Linear`, also under NNX's transformations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers import Oracle, assert_within, dequantize, initial

from jaxlowbit import INT4, Format, check_layout_version, quantize, quantized_matmul
from jaxlowbit.nnx import (
    QuantizedLinear,
    QuantizedVariable,
)

K, N = 96, 80
FORMAT = Format(bits=4, group_size=32, zero="integer")
FORMATS = [FORMAT, Format(8), Format(4, 32, "float"), Format(3, 48)]


def random(*shape, dtype="float32", seed=0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values, jnp.dtype(dtype))


def linear(**options):
    """A linear layer; its bias, if any, is nonzero."""
    options = {"bias_init": initial, "kernel_init": initial, **options}
    return nnx.Linear(K, N, rngs=nnx.Rngs(1), **options)


def quantized(format=FORMAT, **options):
    return QuantizedLinear.from_linear(linear(**options), format)


def bias(layer):
    assert layer.bias is not None
    return layer.bias[...].reshape(1, N)


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = QuantizedLinear(K, N, format=FORMAT, rngs=rngs)
        self.down = QuantizedLinear(N, K, format=FORMAT, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


# --- the product ---------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_layer_is_the_product_with_the_dequantized_kernel(dtype, format):
    layer = quantized(format, param_dtype=jnp.dtype(dtype), use_bias=False)
    x = random(5, K, dtype=dtype)
    got = layer(x)
    oracle = Oracle.of(x, dequantize(layer.kernel))
    assert got.dtype == x.dtype
    assert_within(got, oracle.exact, oracle.bound(x.dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias_is_added_before_the_product_is_rounded(dtype):
    layer = quantized(param_dtype=jnp.dtype(dtype))
    x = random(5, K, dtype=dtype)
    product = quantized_matmul(x, layer.kernel, preferred_element_type=jnp.float32)
    exact = product + bias(layer).astype(jnp.float32)
    np.testing.assert_array_equal(layer(x), exact.astype(dtype))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (0,)], ids=str)
def test_any_leading_axes(lead):
    layer, x = quantized(), random(*lead, K)
    rows = [layer(row) for row in x.reshape(-1, K)]
    assert layer(x).shape == (*lead, N)
    np.testing.assert_allclose(layer(x).reshape(-1, N), np.array(rows).reshape(-1, N), atol=1e-5)


def test_numpy_inputs():
    layer, x = quantized(), random(5, K)
    np.testing.assert_array_equal(layer(np.asarray(x)), layer(x))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("inputs", ["float32", "bfloat16"])
@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_dtypes_match_linear(inputs, dtype, preferred):
    options = {"dtype": dtype, "param_dtype": jnp.bfloat16, "preferred_element_type": preferred}
    x = random(5, K, dtype=inputs)
    with jax.numpy_dtype_promotion("standard"):
        assert quantized(**options)(x).dtype == linear(**options)(x).dtype


def test_custom_promotion_is_preserved():
    def promote(arrays, *, dtype):
        del dtype
        return tuple(None if x is None else jnp.asarray(x, jnp.bfloat16) for x in arrays)

    assert quantized(promote_dtype=promote)(random(5, K)).dtype == jnp.bfloat16


# --- construction --------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_from_linear_quantizes_the_kernel_and_shares_the_bias(format):
    source = linear()
    layer = QuantizedLinear.from_linear(source, format)
    jax.tree.map(np.testing.assert_array_equal, layer.kernel, quantize(source.kernel[...], format))
    assert layer.bias is source.bias
    assert layer.kernel.shape == (layer.in_features, layer.out_features) == (K, N)
    assert layer.kernel.format == layer.format == format


def test_initialised_as_linear_is():
    layer = QuantizedLinear(K, N, format=FORMAT, rngs=nnx.Rngs(3))
    source = QuantizedLinear.from_linear(nnx.Linear(K, N, rngs=nnx.Rngs(3)), FORMAT)
    assert nnx.graphdef(layer) == nnx.graphdef(source)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), nnx.state(source))


def test_each_array_is_a_variable():
    layer = quantized()
    assert set(nnx.state(layer, nnx.Param)) == {"bias"}
    assert set(nnx.state(layer, QuantizedVariable)) == {"packed", "scale", "zero", "version"}


def test_absent_arrays_are_none():
    layer = quantized(INT4, use_bias=False)
    assert layer.zero is None and layer.bias is None
    assert set(nnx.state(layer)) == {"packed", "scale", "version"}


def test_abstract_layers():
    abstract = QuantizedLinear.from_linear(nnx.eval_shape(linear), FORMAT)
    direct = nnx.eval_shape(quantized)
    layer = quantized()
    assert nnx.graphdef(abstract) == nnx.graphdef(direct) == nnx.graphdef(layer)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.state(layer))
    assert jax.tree.leaves(nnx.state(abstract)) == jax.tree.leaves(shapes)
    assert jax.tree.leaves(nnx.state(direct)) == jax.tree.leaves(shapes)
    assert abstract.kernel.shape == (K, N)
    nnx.update(abstract, nnx.state(layer))
    np.testing.assert_array_equal(abstract(random(5, K)), layer(random(5, K)))


def test_layers_are_replaced_and_stay_tied():
    class Tied(nnx.Module):
        def __init__(self):
            self.first = linear()
            self.again = self.first
            self.head = nnx.Linear(N, 3, rngs=nnx.Rngs(2))

    def replace(path, node):
        chosen = isinstance(node, nnx.Linear) and path[-1] != "head"
        return QuantizedLinear.from_linear(node, FORMAT) if chosen else node

    model = nnx.recursive_map(replace, Tied())
    assert isinstance(model.first, QuantizedLinear) and model.first is model.again
    assert isinstance(model.head, nnx.Linear)
    merged = nnx.merge(*nnx.split(model))
    assert merged.first is merged.again
    assert len(jax.tree.leaves(nnx.state(model))) == 7  # five of the tied layer, two of the head


# --- transformations -----------------------------------------------------------------------------


def test_jit_split_and_merge():
    model, x = Mlp(nnx.Rngs(0)), random(5, K)
    expected = np.asarray(model(x))
    graphdef, variables = nnx.split(model)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    assert hash(graphdef) == hash(nnx.graphdef(model))
    for got in (
        nnx.jit(lambda model, x: model(x))(model, x),
        jax.jit(lambda variables, x: nnx.merge(graphdef, variables)(x))(variables, x),
        nnx.merge(graphdef, params, rest)(x),
    ):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_grad_matches_the_bias():
    model, x = Mlp(nnx.Rngs(0)), random(5, K)

    def loss(bias):
        h = jax.nn.relu(x @ model.up.kernel.dequantize() + bias)
        return jnp.sum((h @ model.down.kernel.dequantize()) ** 2)

    expected = jax.grad(loss)(bias(model.up))[0]
    for grad in (nnx.grad, lambda f: nnx.jit(nnx.grad(f))):
        found = nnx.to_flat_state(grad(lambda model: jnp.sum(model(x) ** 2))(model))
        assert [path for path, _ in found] == [("up", "bias")]
        np.testing.assert_allclose(found[0][1][...], expected, rtol=1e-4, atol=1e-3)


def test_scales_are_trained_on_request():
    layer, x = quantized(), random(5, K)
    scales = nnx.All(QuantizedVariable, nnx.PathContains("scale"))
    grads = nnx.grad(lambda layer: jnp.sum(layer(x) ** 2), argnums=nnx.DiffState(0, scales))(layer)

    def loss(scale):
        kernel = dataclasses.replace(layer.kernel, scale=scale).dequantize()
        return jnp.sum((x @ kernel + bias(layer)) ** 2)

    assert set(grads) == {"scale"}
    expected = jax.grad(loss)(layer.scale[...])
    np.testing.assert_allclose(grads["scale"][...], expected, rtol=1e-4, atol=1e-2)


def test_stacked_layers():
    @nnx.vmap
    def create(key):
        return QuantizedLinear(K, K, format=FORMAT, rngs=nnx.Rngs(key))

    stack, x = create(jax.random.split(jax.random.key(0), 3)), random(5, K)
    assert stack.kernel.shape == (3, K, K) and stack.version.shape == (3,)
    graphdef, variables = nnx.split(stack)
    layers = [nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], variables)) for i in range(3)]

    mapped = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stack, x)
    np.testing.assert_allclose(mapped, [layer(x) for layer in layers], atol=1e-5)

    scanned = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    expected = layers[2](layers[1](layers[0](x)))
    np.testing.assert_allclose(scanned(x, stack), expected, atol=1e-4)

    with pytest.raises(ValueError, match=r"shape \(3, 96, 96\), a stack .* nnx.vmap or nnx.scan"):
        stack(x)


# --- checkpoints ---------------------------------------------------------------------------------


def test_orbax_round_trip(tmp_path):
    model, x = Mlp(nnx.Rngs(0)), random(5, K)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.state(model))
        checkpointer.wait_until_finished()
        restored = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0)))
        state = checkpointer.restore(tmp_path / "model", nnx.state(restored))
    nnx.update(restored, state)
    check_layout_version(restored)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(restored), nnx.state(model))
    np.testing.assert_array_equal(restored(x), model(x))


def test_another_layout_version_raises(tmp_path):
    model, x = Mlp(nnx.Rngs(0)), random(5, K)
    check_layout_version(model)
    model.down.version.set_value(jnp.uint32(2))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.state(model))
        checkpointer.wait_until_finished()
        restored = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0)))
        nnx.update(restored, checkpointer.restore(tmp_path / "model", nnx.state(restored)))
    with pytest.raises(ValueError, match=r"layout version \[2\], but this library reads version 1"):
        restored(x)
    with pytest.raises(ValueError, match=r"in down: .* layout version \[2\]"):
        check_layout_version(restored)


# --- errors --------------------------------------------------------------------------------------


def test_layers_other_than_plain_linear_raise():
    with pytest.raises(TypeError, match=r"the layer is Embed, but an nnx.Linear is needed"):
        QuantizedLinear.from_linear(nnx.Embed(4, 4, rngs=nnx.Rngs(0)), INT4)  # pyright: ignore
    with pytest.raises(ValueError, match=r"has dot_general=.*; build the layer without"):
        quantized(dot_general=lambda *args, **options: jax.lax.dot_general(*args, **options))
    with pytest.raises(ValueError, match="has precision='highest', but a quantized product"):
        quantized(precision="highest")


def test_wrong_inputs_raise():
    with pytest.raises(ValueError, match=r"inputs has shape \(5, 97\), .* \(..., 96\); pass"):
        quantized()(random(5, K + 1))
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        zeros = nnx.initializers.zeros_init()
        QuantizedLinear(
            K, N, format=INT4, param_dtype=jnp.int8, kernel_init=zeros, rngs=nnx.Rngs(0)
        )
