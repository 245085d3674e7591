"""Linen: sizes of kernels must match inputs and layers, even though words are padded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import serialization

from jaxlowbit import INT4, Format, check_layout_version, quantize
from jaxlowbit._flax.linen_variables import variables_of
from jaxlowbit.linen import (
    QuantizedDense,
    QuantizedDenseGeneral,
    QuantizedEinsum,
    QuantizedEmbed,
    quantize_model,
)

KEY = jax.random.key(0)
FORMAT = Format(4, 32)


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))


class Dense(nn.Module):
    features: int = 24

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features, use_bias=False, name="d")(x)


class General(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.DenseGeneral((2, 12), axis=(-2, -1), use_bias=False, name="d")(x)


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes: Any = {"params": 0, "quantized": 0}
        stack: Any = nn.vmap(Dense, variable_axes=axes, split_rngs={"params": True})
        return stack(name="stack")(x)


MODELS: Any = {
    "dense": (Dense(), (3, 40), (3, 60), r"d is .* width 60 to 24 .* quantized takes width 40 to"),
    "whole blocks": (Dense(), (3, 64), (3, 60), r"d is .* width 60 to 24 .* takes width 64 to 24"),
    "general": (
        General(),
        (3, 4, 6),
        (3, 6, 4),
        r"d is .* width 6 x 4 to 2 x 12 .* width 4 x 6 to",
    ),
    "stack": (Stack(), (2, 3, 40), (2, 3, 60), r"stack\.d is .* width 60 to 24 .* width 40 to 24"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_raise_for_inputs_of_another_width(name):
    module, right, wrong, message = MODELS[name]
    floats = module.init(KEY, random(*right))
    model, variables, _ = quantize_model(module, floats, {"": FORMAT}, random(*right))
    for apply in (model.apply, jax.jit(model.apply)):
        assert apply(variables, random(*right)).shape == module.apply(floats, random(*right)).shape
        with pytest.raises(ValueError, match=message):
            apply(variables, random(*wrong))


# Layers with inputs, layers with variables of a different size, and that size.
LAYERS: Any = {
    "features": (QuantizedDense(64, FORMAT), (3, 40), QuantizedDense(24, FORMAT), (40, 24)),
    "inputs": (QuantizedDense(24, FORMAT), (3, 60), (3, 40), (40, 24)),
    "inputs of whole blocks": (QuantizedDense(64, FORMAT), (3, 60), (3, 64), (64, 64)),
    "blocks": (QuantizedDense(24, FORMAT), (3, 65), (3, 64), (64, 24)),
    "shards": (QuantizedDense(24, FORMAT, (2, 1)), (3, 100), (3, 80), (80, 24)),
    "general": (QuantizedDenseGeneral(24, FORMAT, axis=(-2, -1)), (3, 4, 9), (3, 4, 6), (24, 24)),
    "einsum": (
        QuantizedEinsum((40, 2, 12), "bk,khd->bhd", FORMAT),
        (3, 40),
        QuantizedEinsum((40, 2, 11), "bk,khd->bhd", FORMAT),
        (40, 22),
    ),
    "embed": (QuantizedEmbed(50, 40, FORMAT), None, QuantizedEmbed(50, 42, FORMAT), (42, 50)),
    "vocabulary": (QuantizedEmbed(50, 40, FORMAT), None, QuantizedEmbed(60, 40, FORMAT), (40, 60)),
}


def ones(layer: Any, x: Any) -> Any:
    """Variables of a layer, with arbitrary words."""
    return jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), jax.eval_shape(layer.init, KEY, x))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_raise_for_kernels_of_other_sizes(name):
    layer, shape, other, (k, n) = LAYERS[name]
    x = jnp.array([0, 1]) if shape is None else random(*shape)
    source, at = (layer, random(*other)) if isinstance(other, tuple) else (other, x)
    right, others = (ones(*of) for of in ((layer, x), (source, at)))
    given = {**right, "quantized": others["quantized"]}
    message = rf"the layer is to multiply inputs .* in its variables takes width {k} to {n}; pass"
    layer.apply(right, x)
    for apply in (layer.apply, jax.jit(layer.apply)):
        with pytest.raises(ValueError, match=message):
            apply(given, x)


def test_models_raise_for_variables_of_another_model():
    x = random(3, 64)
    model, _, _ = quantize_model(Dense(), Dense().init(KEY, x), FORMAT, x)
    y = x[:, :60]
    _, variables, _ = quantize_model(Dense(), Dense().init(KEY, y), FORMAT, y)
    with pytest.raises(ValueError, match=r"width 64 to 24 .* in its variables takes width 60"):
        model.apply(variables, x)
    with pytest.raises(ValueError, match=r"width 60 to 24 .* that was quantized takes width 64"):
        model.apply(variables, y)


def test_sizes_survive_stacks_boxes_and_checkpoints(tmp_path):
    def boxed(*names):
        return nn.with_partitioning(nn.initializers.lecun_normal(), names)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            init = boxed("embed", None)
            return nn.Dense(40, use_bias=False, kernel_init=init, name="d")(x), None

    axes: Any = {"params": 0, "quantized": 0}
    scan: Any = nn.scan(
        Block,
        variable_axes=axes,
        split_rngs={"params": True},
        length=3,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    module, x = scan(name="blocks"), random(3, 40)
    model: Any
    abstract: Any
    model, variables, _ = quantize_model(module, module.init(KEY, x), FORMAT, x)
    _, abstract, _ = quantize_model(module, jax.eval_shape(module.init, KEY, x), FORMAT, x)
    padding = abstract["quantized"]["d"]["padding"]
    assert padding.value.shape == (3, 1 + 24, 1 + 24)
    spec = nn.get_partition_spec(abstract)["quantized"]["d"]["padding"]
    assert spec == jax.P("layers", None, None)
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, variables)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nn.unbox(variables))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "model", nn.unbox(abstract))
    for given in (variables, restored):
        np.testing.assert_array_equal(model.apply(given, x)[0], model.apply(variables, x)[0])
        given = jax.tree.map(lambda a: a, given)
        given["quantized"]["d"].pop("padding")
        with pytest.raises(ValueError, match=r"width 40 to 40 features, .* takes width 64 to 64"):
            model.apply(given, x)


def test_kernels_without_padding_lack_the_padding_variable():
    x = random(3, 64)
    variables: Any = QuantizedDense(128, FORMAT, use_bias=False).init(KEY, x)
    assert set(variables["quantized"]) == {"packed", "scale", "version"}


def test_words_stored_without_padding_raise_with_the_missing_variable():
    layer, x = QuantizedDense(24, FORMAT, use_bias=False), random(3, 40)
    variables: Any = layer.init(KEY, x)
    want = layer.apply(variables, x)
    variables["quantized"].pop("padding")
    message = (
        r"If the kernel is \(40, 24\) .* add 'padding': jnp\.zeros\(\(25, 41\), jnp\.uint8\) next"
    )
    with pytest.raises(ValueError, match=message):
        layer.apply(variables, x)
    variables["quantized"]["padding"] = jnp.zeros((25, 41), jnp.uint8)
    np.testing.assert_array_equal(layer.apply(variables, x), want)


@pytest.mark.parametrize("shape", [(40, 24), (64, 128), (3, 40, 24)], ids=str)
def test_variables_of_an_array(shape):
    array, x = quantize(random(*shape), FORMAT), random(*shape[:-2], 5, shape[-2])
    layer: Any = QuantizedDense(shape[-1], FORMAT, use_bias=False)
    apply = layer.apply
    for _ in shape[:-2]:
        apply = jax.vmap(apply)
    variables = variables_of(array)
    got = apply({"quantized": variables}, x)
    np.testing.assert_allclose(got, x @ array.dequantize(), atol=1e-5)
    # Flax returns the same entries, without the padding.
    assert serialization.to_state_dict(array).keys() == variables.keys() - {"padding"}


# --- the version of the layout -------------------------------------------------------------------


def test_check_layout_version():
    x = random(2, 3, 40)
    module = Stack()
    _, variables, _ = quantize_model(module, module.init(KEY, x), INT4, x)
    check_layout_version(variables)
    held = variables["quantized"]["stack"]["d"]
    held["version"] = held["version"].at[1].set(2)
    message = r"check_layout_version: in quantized\.stack\.d: .* layout version \[1, 2\]"
    with pytest.raises(ValueError, match=message):
        check_layout_version(variables)
    held["version"] = nn.Partitioned(held["version"], names=("layers",))
    with pytest.raises(ValueError, match=message):
        check_layout_version(variables)
    with pytest.raises(ValueError, match=r"tree is .* no quantized weights; pass a quantized"):
        check_layout_version(variables["params"])


def test_words_of_another_version_raise_for_any_shape():
    layer, x = QuantizedDense(24, FORMAT, use_bias=False), random(3, 40)
    variables: Any = layer.init(KEY, x)
    held = variables["quantized"]
    held |= {"version": jnp.uint32(2), "packed": held["packed"].reshape(1, 2, -1)}
    with pytest.raises(ValueError, match=r"layout version \[2\]"):
        layer.apply(variables, x)
