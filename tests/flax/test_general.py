"""Layers with several contracted, batch and output axes, compared with fake quantization."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from helpers import Oracle, assert_within, dequantize, dequantized, initial

from jaxlowbit import INT4, Format, check_layout_version, quantize
from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx
from jaxlowbit.linen import QuantizedDenseGeneral
from jaxlowbit.nnx import QuantizedLinearGeneral

FORMAT = Format(bits=4, group_size=32, zero="integer")
KEY = jax.random.key(0)

# The shape of the inputs, the contracted axes, the number of batch axes, the features.
LAYERS: dict[str, tuple[Any, ...]] = {
    "one to many": ((2, 3, 96), -1, 0, (4, 20)),
    "many to one": ((2, 3, 4, 24), (-2, -1), 0, 80),
    "axes apart": ((5, 48, 3, 2), (1, -1), 0, (8, 10)),
    "axes in another order": ((3, 48, 2), (-1, 1), 0, 80),
    "one row": ((96,), 0, 0, (4, 20)),
    "batch": ((3, 5, 96), -1, 1, 80),
    "two batch axes": ((2, 3, 5, 4, 24), (-2, -1), 2, (4, 20)),
    "batch without rows": ((3, 96), -1, 1, 80),
    "no inputs": ((0, 96), -1, 0, 80),
}


def random(*shape, dtype="float32", seed=0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values, jnp.dtype(dtype))


def in_order(shape, axis):
    """The contracted axes in ascending order, like Flax."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    return sorted(a % len(shape) for a in axes)


def nnx_layer(name, **options) -> nnx.LinearGeneral:
    shape, axis, batch, features = LAYERS[name]
    return nnx.LinearGeneral(
        [shape[a] for a in in_order(shape, axis)],
        features,
        axis=axis,
        batch_axis={i: shape[i] for i in range(batch)},
        rngs=nnx.Rngs(1),
        **{"bias_init": initial, "kernel_init": initial, **options},
    )


def linen_options(name):
    _, axis, batch, features = LAYERS[name]
    return {"features": features, "axis": axis, "batch_dims": tuple(range(batch))}


def quantized(name, format=FORMAT, **options):
    return QuantizedLinearGeneral.from_linear_general(nnx_layer(name, **options), format)


def expected(name, x, kernel, bias):
    """The exact result and the error bound."""
    shape, axis, batch, features = LAYERS[name]
    contracted = in_order(shape, axis)
    rows = [a for a in range(batch, len(shape)) if a not in contracted]
    lhs = x.transpose(*range(batch), *rows, *contracted)
    sizes = lhs.shape[: batch + len(rows)]
    lhs = lhs.reshape(*shape[:batch], -1, kernel.k) if lhs.size else lhs.reshape(0, kernel.k)
    oracle = Oracle.of(lhs, dequantize(kernel))
    features = features if isinstance(features, tuple) else (features,)
    bias = np.asarray(bias, np.float64).reshape(*shape[:batch], *[1] * len(rows), *features)
    exact = oracle.exact.reshape(*sizes, *features)
    bound = oracle.bound(x.dtype).reshape(exact.shape)
    return exact + bias, bound + np.finfo(np.float32).eps * np.abs(exact + bias)


# --- the product ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_nnx_layer_is_the_product_with_the_dequantized_kernel(name):
    source, x = nnx_layer(name), random(*LAYERS[name][0])
    layer = QuantizedLinearGeneral.from_linear_general(source, FORMAT)
    assert layer.bias is source.bias and layer.bias is not None
    got = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert_within(got, *expected(name, x, layer.kernel, layer.bias[...]))
    # The float layer with dequantized weights has the same axes in the same order.
    rounded = dequantized(layer.kernel).reshape(source.kernel.shape)
    assert jnp.abs(rounded - source.kernel[...]).max() < jnp.abs(source.kernel[...]).max() / 7
    source.kernel.set_value(rounded)
    np.testing.assert_allclose(got, source(x), atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_linen_layer_is_the_product_with_the_dequantized_kernel(name):
    x = random(*LAYERS[name][0])
    floats: Any = nn.DenseGeneral(**linen_options(name), bias_init=initial)
    layer: Any = QuantizedDenseGeneral(format=FORMAT, **linen_options(name), bias_init=initial)
    params, variables = floats.init(KEY, x)["params"], layer.init(KEY, x)
    source = nnx_layer(name)
    assert params["kernel"].shape == source.kernel.shape
    matrix = params["kernel"].reshape(quantized(name).kernel.shape)
    kernel = quantize(matrix, FORMAT)
    np.testing.assert_array_equal(variables["quantized"]["packed"], kernel.packed)
    np.testing.assert_array_equal(variables["params"]["bias"], params["bias"])
    assert set(variables["params"]) == {"bias"}
    got = jax.jit(layer.apply)(variables, x)
    assert_within(got, *expected(name, x, kernel, params["bias"]))
    abstract = jax.eval_shape(layer.init, KEY, x)
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, variables)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_dtypes_match_the_float_layer(dtype, preferred):
    name = "many to one"
    options = {"dtype": dtype, "param_dtype": jnp.bfloat16}
    x = random(*LAYERS[name][0], dtype="bfloat16")
    with jax.numpy_dtype_promotion("standard"):
        both = {"preferred_element_type": preferred, **options}
        assert quantized(name, **both)(x).dtype == nnx_layer(name, **both)(x).dtype
        layers: Any = (
            nn.DenseGeneral(**linen_options(name), **options),
            QuantizedDenseGeneral(format=FORMAT, **linen_options(name), **options),
        )
        first, second = (layer.init_with_output(KEY, x)[0].dtype for layer in layers)
        assert first == second


def test_gradient_of_the_inputs():
    name = "two batch axes"
    layer, source, x = quantized(name), nnx_layer(name), random(*LAYERS[name][0])
    source.kernel.set_value(dequantized(layer.kernel).reshape(source.kernel.shape))
    got = jax.jit(jax.grad(lambda x: jnp.sum(layer(x) ** 2)))(x)
    twin = jax.grad(lambda x: jnp.sum(source(x) ** 2))(x)
    np.testing.assert_allclose(got, twin, rtol=1e-4, atol=1e-3)


# --- construction --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["axes apart", "two batch axes"])
def test_initialised_as_the_float_layer_is(name):
    shape, axis, batch, features = LAYERS[name]
    layer = QuantizedLinearGeneral(
        [shape[a] for a in in_order(shape, axis)],
        features,
        format=FORMAT,
        axis=axis,
        batch_axis={i: shape[i] for i in range(batch)},
        bias_init=initial,
        rngs=nnx.Rngs(1),
    )
    source = quantized(name, kernel_init=nnx.initializers.lecun_normal())
    assert nnx.graphdef(layer) == nnx.graphdef(source)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), nnx.state(source))


def test_abstract_layers_split_and_merge_and_orbax(tmp_path):
    name = "two batch axes"
    layer, x = quantized(name), random(*LAYERS[name][0])
    restored = QuantizedLinearGeneral.from_linear_general(
        nnx.eval_shape(lambda: nnx_layer(name)), FORMAT
    )
    assert nnx.graphdef(restored) == nnx.graphdef(layer)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", nnx.state(layer))
        checkpointer.wait_until_finished()
        nnx.update(restored, checkpointer.restore(tmp_path / "layer", nnx.state(restored)))
    check_layout_version(restored)
    merged = nnx.merge(*nnx.split(restored))
    np.testing.assert_array_equal(merged(x), layer(x))
    restored.version.set_value(jnp.full((2, 3), 2, jnp.uint32))
    with pytest.raises(ValueError, match=r"^check_layout_version: Quant.* layout version \[2\]"):
        check_layout_version(restored)


def test_lora_on_a_quantized_base():
    base = QuantizedLinearGeneral(96, 80, format=FORMAT, rngs=nnx.Rngs(0))
    ones = nnx.initializers.ones
    lora = nnx.LoRA(96, 4, 80, base_module=base, b_initializer=ones, rngs=nnx.Rngs(1))
    x = random(5, 96)
    adapter = x @ lora.lora_a[...] @ lora.lora_b[...]
    np.testing.assert_allclose(lora(x), base(x) + adapter, atol=1e-4)


def test_stacked_layers():
    @nnx.vmap
    def create(key):
        return nnx.LinearGeneral((4, 24), (4, 24), axis=(-2, -1), rngs=nnx.Rngs(key))

    floats, x = create(jax.random.split(KEY, 3)), random(5, 4, 24)
    stack = QuantizedLinearGeneral.from_linear_general(floats, FORMAT)
    assert stack.kernel.shape == (3, 96, 96)
    graphdef, variables = nnx.split(stack)
    layers = [nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], variables)) for i in range(3)]
    mapped = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stack, x)
    np.testing.assert_allclose(mapped, [layer(x) for layer in layers], atol=1e-5)
    with pytest.raises(ValueError, match=r"shape \(3, 96, 96\), a stack of layers"):
        stack(x)


# --- attention -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_nnx_attention_is_its_fake_quantized_twin():
    def attention():
        return nnx.MultiHeadAttention(4, 64, qkv_features=128, rngs=nnx.Rngs(0), decode=False)

    model: Any = nnx.Dict(attention=attention())
    twin, x = attention(), random(2, 7, 64)
    before = twin(x)
    report = jl_nnx.quantize_model(model, FORMAT)
    names = ["query", "key", "value", "out"]
    assert {layer.path for layer in report.layers if layer.format} == {
        f"attention.{name}" for name in names
    }
    shapes = {layer.path: layer.shape for layer in report.layers}
    assert (shapes["attention.query"], shapes["attention.out"]) == ((64, 4, 32), (4, 32, 64))
    for name in names:
        kernel = getattr(twin, name).kernel
        kernel.set_value(dequantized(getattr(model.attention, name).kernel).reshape(kernel.shape))
    got = nnx.jit(lambda model, x: model(x))(model.attention, x)
    np.testing.assert_allclose(got, twin(x), atol=1e-5)
    assert jnp.abs(got - before).max() > 1e-3  # quantization changes the result
    errors = [layer.error for layer in report.layers]
    assert all(error is not None and 0.01 < error < 0.2 for error in errors)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.MultiHeadDotProductAttention(4, name="attention")(x), None


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.slow
def test_linen_attention_is_its_fake_quantized_twin(scanned):
    axes: Any = {"params": 0, "quantized": 0}
    scan = nn.scan(Attention, variable_axes=axes, split_rngs={"params": True}, length=2)
    module, x = scan() if scanned else Attention(), random(2, 7, 64)
    floats = module.init(KEY, x, None)
    model, variables, report = jl_linen.quantize_model(module, floats, FORMAT, x, None)
    assert [layer.path for layer in report.layers if layer.format] == [
        f"attention.{name}" for name in ("query", "key", "value", "out")
    ]
    twin = jax.tree.map(lambda leaf: leaf, floats)
    for name in ("query", "key", "value", "out"):
        kernel = twin["params"]["attention"][name]["kernel"]
        shape = (*kernel.shape[:scanned], 64, 64)
        twin["params"]["attention"][name]["kernel"] = (
            quantize(kernel.reshape(shape), FORMAT).dequantize().reshape(kernel.shape)
        )
        assert set(variables["params"]["attention"][name]) == {"bias"}
    got, _ = jax.jit(model.apply)(variables, x, None)
    np.testing.assert_allclose(got, module.apply(twin, x, None)[0], atol=1e-5)
    assert jnp.abs(got - module.apply(floats, x, None)[0]).max() > 1e-3


# --- errors --------------------------------------------------------------------------------------


def test_inputs_of_other_shapes_raise():
    layer = quantized("many to one")
    with pytest.raises(ValueError, match=r"is \(2, 48\) along the contracted axes \(2, 3\), but"):
        layer(random(2, 3, 2, 48))  # the number of values matches the kernel
    with pytest.raises(ValueError, match=r"have 1 axes, but the layer contracts the axes \(-2, -1"):
        layer(random(96))
    with pytest.raises(ValueError, match=r"is \(2,\) along the batch axes \(0,\), but .* \(3,\)"):
        quantized("batch")(random(2, 5, 96))
    linen: Any = QuantizedDenseGeneral(8, FORMAT, axis=(-2, -1))
    with pytest.raises(ValueError, match=r"have 1 axes, but the layer contracts"):
        linen.init(KEY, random(96))


def test_invalid_axes_raise():
    with pytest.raises(ValueError, match=r"in_features is \(4, 24\) and axis \(-1,\), but each"):
        QuantizedLinearGeneral((4, 24), 8, format=INT4, rngs=nnx.Rngs(0))
    message = r"The batch axes are \(1,\), but they must be the first axes of the inputs"
    with pytest.raises(ValueError, match=message):
        QuantizedLinearGeneral(96, 8, format=INT4, batch_axis={1: 3}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        linen: Any = QuantizedDenseGeneral(8, FORMAT, batch_dims=(1,))
        linen.init(KEY, random(2, 3, 96))


def test_layers_that_cannot_be_replaced_raise():
    with pytest.raises(TypeError, match=r"the layer is Linear, but an nnx.LinearGeneral is needed"):
        QuantizedLinearGeneral.from_linear_general(
            nnx.Linear(4, 4, rngs=nnx.Rngs(0)),  # pyright: ignore
            INT4,
        )
    refused: Any = ({"precision": "highest"}, {"dot_general": jax.lax.dot_general})
    for options in refused:
        (name,) = options
        with pytest.raises(ValueError, match=f"the layer has {name}=.*; build the layer without"):
            quantized("batch", **options)
    module = nn.Sequential([nn.DenseGeneral(8, precision="highest")])
    x = random(2, 96)
    with pytest.raises(
        ValueError, match=r"'layers_0' has precision='highest', but quantized layers lack it"
    ):
        jl_linen.quantize_model(module, module.init(KEY, x), {"": INT4}, x)
