"""Quantized embeddings: lookups match the dequantized table and need little memory."""

import dataclasses
import re
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
from jaxlowbit._core import layout
from jaxlowbit._core.columns import take_columns

FEATURES, VOCABULARY = 96, 150
FORMAT = Format(bits=4, group_size=32, zero="integer")
KEY = jax.random.key(0)
TOKENS = jnp.array([[0, 1, 63, 64], [70, 72, 127, 128], [149, 5, 5, 13]])
STRANGE = [-1, -VOCABULARY, -VOCABULARY - 1, VOCABULARY - 1, VOCABULARY, 2**31 - 1, -(2**31)]


def random(*shape, dtype="float32", seed=0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values, jnp.dtype(dtype))


def nnx_embed(vocabulary=VOCABULARY, **options):
    return nnx.Embed(vocabulary, FEATURES, embedding_init=initial, rngs=nnx.Rngs(1), **options)


def quantized(format=FORMAT, **options):
    return jl_nnx.QuantizedEmbed.from_embed(nnx_embed(**options), format)


def twin(layer, **options):
    """The float layer with the dequantized weights."""
    source = nnx_embed(**options)
    source.embedding.set_value(dequantized(layer.kernel).T)
    return source


# --- columns -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
def test_columns_of_the_layout(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (130, 200), np.uint8)
    packed = layout.pack(jnp.asarray(codes), bits)
    columns = jnp.asarray(np.random.default_rng(0).permutation(200))
    found = jax.jit(layout.unpack_columns, static_argnums=1)(packed, bits, columns)
    np.testing.assert_array_equal(found[:130], codes[:, columns])
    scale = random(5, 200)
    found = layout.unpack_group_columns(layout.pack_groups(scale), columns)
    np.testing.assert_array_equal(found, scale[:, columns])


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        (FORMAT, "bfloat16"),
        (FORMAT, "float16"),
        (Format(8), "float32"),
        (Format(4, 32, "float"), "bfloat16"),
        (Format(3, 48), "float16"),
        (Format(7, 64), "float32"),
    ],
    ids=str,
)
def test_columns_match_the_dequantized_matrix(format, dtype):
    array = quantize(random(FEATURES, VOCABULARY), format)
    found = take_columns(array, TOKENS, jnp.dtype(dtype))
    assert found.shape == (*TOKENS.shape, FEATURES)
    np.testing.assert_array_equal(found, np.asarray(dequantized(array, dtype)).T[TOKENS])


@pytest.mark.parametrize("shards", [(1, 3), (2, 1), (4, 5)], ids=str)
def test_columns_of_a_matrix_in_shards(shards):
    array = quantize(random(FEATURES, VOCABULARY), FORMAT, shards=shards)
    assert array.padded_shape != (FEATURES, VOCABULARY)
    columns = jnp.arange(VOCABULARY)
    found = take_columns(array, columns, jnp.dtype("float32"))
    np.testing.assert_array_equal(found, dequantized(array).T)


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "uint32", "int16"])
def test_numbers_out_of_range_match_take(dtype):
    info = jnp.iinfo(dtype)
    tokens = [x for x in [*STRANGE, 2**32 - 1, 255] if info.min <= x <= info.max]
    tokens = jnp.array(tokens, jnp.dtype(dtype))
    array = quantize(random(FEATURES, VOCABULARY), FORMAT)
    found = take_columns(array, tokens, jnp.dtype("float32"))
    table = np.asarray(dequantized(array)).T
    for token, row in zip(np.asarray(tokens, np.int64), found, strict=True):
        known = -VOCABULARY <= token < VOCABULARY
        np.testing.assert_array_equal(row, table[token] if known else np.full(FEATURES, np.nan))


def test_a_lookup_dequantizes_no_other_embedding():
    vocabulary, features, count = 2**15, 1024, 16
    table = jax.eval_shape(lambda w: quantize(w, INT4), jnp.zeros((features, vocabulary)))
    tokens = jax.ShapeDtypeStruct((count,), jnp.int32)
    look = jax.jit(lambda table, tokens: take_columns(table, tokens, jnp.dtype("bfloat16")))
    compiled = look.lower(table, tokens).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    # Less than eight floats per looked-up value; the table is 2000 times larger.
    assert memory.temp_size_in_bytes < 8 * 4 * count * features
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* (?!parameter)", compiled.as_text() or "")
    sizes = [np.prod([int(size) for size in shape.split(",")]) for shape in shapes]
    assert sizes and max(sizes) <= 4 * count * features


# --- the layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_nnx_layer_is_its_fake_quantized_twin(dtype, param_dtype):
    options: Any = {"dtype": dtype, "param_dtype": param_dtype}
    layer = quantized(**options)
    floats = twin(layer, **options)
    change = floats.embedding[...] - nnx_embed(**options).embedding[...]
    assert jnp.abs(change).max() < jnp.abs(floats.embedding[...]).max() / 7
    got = nnx.jit(lambda layer, x: layer(x))(layer, TOKENS)
    assert got.dtype == floats(TOKENS).dtype
    np.testing.assert_array_equal(got, floats(TOKENS))
    x = random(5, FEATURES, dtype=got.dtype)
    logits = nnx.jit(lambda layer, x: layer.attend(x))(layer, x)
    oracle = Oracle.of(x, dequantize(layer.kernel))
    assert logits.dtype == floats.attend(x).dtype
    assert_within(logits, oracle.exact, oracle.bound(x.dtype))


def test_linen_layer_is_its_fake_quantized_twin():
    floats: Any = nn.Embed(VOCABULARY, FEATURES)
    layer: Any = jl_linen.QuantizedEmbed(VOCABULARY, FEATURES, FORMAT)
    params, variables = floats.init(KEY, TOKENS)["params"], layer.init(KEY, TOKENS)
    table = quantize(params["embedding"].T, FORMAT)
    assert set(variables) == {"quantized"}
    np.testing.assert_array_equal(variables["quantized"]["packed"], table.packed)
    rounded = {"params": {"embedding": table.dequantize().T}}
    got = jax.jit(layer.apply)(variables, TOKENS)
    np.testing.assert_array_equal(got, floats.apply(rounded, TOKENS))
    x = random(5, FEATURES)
    logits = layer.apply(variables, x, method="attend")
    np.testing.assert_allclose(logits, floats.apply(rounded, x, method="attend"), atol=1e-4)
    with pytest.raises(ValueError, match="has no kernel in the collection 'quantized'"):
        layer.apply({}, TOKENS)


def test_a_table_of_one_embedding_serves_every_token():
    layer = quantized(vocabulary=1)
    tokens = jnp.array([0, 7, -3])
    np.testing.assert_array_equal(layer(tokens), twin(layer, vocabulary=1)(tokens))


def test_out_of_range_as_in_flax():
    layer, tokens = quantized(), jnp.array(STRANGE[:6])
    np.testing.assert_array_equal(layer(tokens), twin(layer)(tokens))


def test_initialised_abstract_and_restored(tmp_path):
    layer = jl_nnx.QuantizedEmbed(VOCABULARY, FEATURES, format=FORMAT, rngs=nnx.Rngs(1))
    floats = nnx.Embed(VOCABULARY, FEATURES, rngs=nnx.Rngs(1))
    source = jl_nnx.QuantizedEmbed.from_embed(floats, FORMAT)
    assert nnx.graphdef(layer) == nnx.graphdef(source)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), nnx.state(source))
    restored = jl_nnx.QuantizedEmbed.from_embed(nnx.eval_shape(nnx_embed), FORMAT)
    assert nnx.graphdef(restored) == nnx.graphdef(layer)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", nnx.state(layer))
        checkpointer.wait_until_finished()
        nnx.update(restored, checkpointer.restore(tmp_path / "layer", nnx.state(restored)))
    check_layout_version(restored)
    merged = nnx.merge(*nnx.split(restored))
    np.testing.assert_array_equal(merged(TOKENS), layer(TOKENS))


def test_scales_are_trained_on_request():
    layer = quantized()

    def loss(scale):
        table = dataclasses.replace(layer.kernel, scale=scale).dequantize().T
        return jnp.sum(table[TOKENS] ** 2)

    grads = nnx.grad(
        lambda layer: jnp.sum(layer(TOKENS) ** 2),
        argnums=nnx.DiffState(0, nnx.PathContains("scale")),
    )(layer)
    expected = jax.grad(loss)(layer.scale[...])
    np.testing.assert_allclose(grads["scale"][...], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_stacked_tables():
    @nnx.vmap
    def create(key):
        return nnx.Embed(VOCABULARY, FEATURES, rngs=nnx.Rngs(key))

    stack = jl_nnx.QuantizedEmbed.from_embed(create(jax.random.split(KEY, 3)), FORMAT)
    got = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stack, TOKENS)
    expected = stack.kernel.dequantize().swapaxes(1, 2)[:, TOKENS]
    np.testing.assert_array_equal(got, expected)
    with pytest.raises(ValueError, match=r"shape \(3, 96, 150\), a stack of layers"):
        stack(TOKENS)


# --- models --------------------------------------------------------------------------------------


class Tied(nnx.Module):
    def __init__(self):
        self.embed = nnx_embed()
        self.unembed = self.embed
        self.mlp = nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(0))

    def __call__(self, tokens):
        return self.unembed.attend(self.mlp(self.embed(tokens)))


def test_nnx_models_keep_embeddings_unless_a_rule_names_them():
    model: Any = Tied()
    report = jl_nnx.quantize_model(model, FORMAT)
    assert type(model.embed) is nnx.Embed
    assert [layer.path for layer in report.layers if layer.format is None] == ["embed"]
    model = Tied()
    report = jl_nnx.quantize_model(model, {"^embed$": FORMAT})
    assert isinstance(model.embed, jl_nnx.QuantizedEmbed) and model.embed is model.unembed
    (chosen,) = [layer for layer in report.layers if layer.format]
    assert chosen.shape == (VOCABULARY, FEATURES) and chosen.error is not None
    assert 0.01 < chosen.error < 0.2
    floats = Tied()
    floats.embed.embedding.set_value(model.embed.kernel.dequantize().T)
    got = nnx.jit(lambda model, x: model(x))(model, TOKENS)
    np.testing.assert_allclose(got, floats(TOKENS), atol=1e-4)


class LinenTied(nn.Module):
    def setup(self):
        self.embed = nn.Embed(VOCABULARY, FEATURES)
        self.mlp = nn.Dense(FEATURES)

    def __call__(self, tokens):
        return self.embed.attend(self.mlp(self.embed(tokens)))


def test_linen_models_keep_embeddings_unless_a_rule_names_them():
    module: Any = LinenTied()
    floats = module.init(KEY, TOKENS)
    model, variables, report = jl_linen.quantize_model(module, floats, FORMAT, TOKENS)
    assert dict(model.formats) == {("mlp",): FORMAT}
    assert [layer.path for layer in report.layers if layer.format is None] == ["embed"]
    np.testing.assert_allclose(
        model.apply(variables, TOKENS),
        module.apply(_rounded(floats, "mlp", "kernel"), TOKENS),
        atol=1e-4,
    )
    model, variables, report = jl_linen.quantize_model(module, floats, {"embed": FORMAT}, TOKENS)
    assert set(variables["params"]) == {"mlp"} and set(variables["quantized"]) == {"embed"}
    assert [layer.shape for layer in report.layers if layer.format] == [(VOCABULARY, FEATURES)]
    got = jax.jit(model.apply)(variables, TOKENS)
    expected = module.apply(_rounded(floats, "embed", "embedding"), TOKENS)
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_abstract_linen_variables_and_orbax(tmp_path):
    module: Any = LinenTied()
    rules = {"embed": FORMAT, "mlp": FORMAT}
    floats = module.init(KEY, TOKENS)
    model, variables, _ = jl_linen.quantize_model(module, floats, rules, TOKENS)
    abstract = jax.eval_shape(module.init, KEY, TOKENS)
    again, abstract, _ = jl_linen.quantize_model(module, abstract, rules, TOKENS)
    assert again == model
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", variables)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "model", abstract)
    np.testing.assert_array_equal(again.apply(restored, TOKENS), model.apply(variables, TOKENS))


def _rounded(floats, layer, name):
    weight = floats["params"][layer][name]
    weight = weight.T if name == "embedding" else weight
    weight = quantize(weight, FORMAT).dequantize()
    weight = weight.T if name == "embedding" else weight
    return {"params": {**floats["params"], layer: {**floats["params"][layer], name: weight}}}


# --- errors --------------------------------------------------------------------------------------


def test_wrong_inputs_and_layers_raise():
    with pytest.raises(ValueError, match="the inputs are float32, but tokens are integers; cast"):
        quantized()(jnp.ones(3))
    with pytest.raises(ValueError, match=r"query has shape \(5, 97\), .* \(..., 96\); pass"):
        quantized().attend(random(5, FEATURES + 1))
    with pytest.raises(TypeError, match=r"the layer is Linear, but an nnx.Embed is needed"):
        linear: Any = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        jl_nnx.QuantizedEmbed.from_embed(linear, INT4)
