"""`EinsumParameter` and tied tables in Linen, and models that contain module and parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util
from pretrained import IDS, VOCABULARY, WIDTH, Pretrained, Tied

from jaxlowbit import INT8, QuantizedArray, check_layout_version
from jaxlowbit.linen import (
    EinsumParameter,
    quantize_model,
    quantize_pretrained,
)

HIDDEN = 96
X = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, WIDTH), np.float32))
EVERYTHING = {"": INT8}


@pytest.fixture(autouse=True)
def flax_promotes_dtypes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Embedder(nn.Module):
    """Like the embedder of gemma."""

    def setup(self) -> None:
        self.table = self.param("table", nn.initializers.normal(1), (VOCABULARY, WIDTH))

    def encode(self, ids: Any) -> Any:
        return self.table[(ids,)]

    def decode(self, x: Any) -> Any:
        return jnp.dot(x, self.table.T)


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        up = self.param("up", nn.initializers.normal(0.1), (2, WIDTH, HIDDEN))
        down = self.param("down", nn.initializers.normal(0.1), (2, HIDDEN, WIDTH))
        hidden = jnp.tanh(jnp.einsum("btd,edf->ebtf", x, up))
        calls = self.variable("state", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing() and self.is_mutable_collection("state"):
            calls.value += 1
        return nn.Dense(WIDTH)(jnp.einsum("ebtf,efd->btd", hidden, down))


class Model(nn.Module):
    def setup(self) -> None:
        self.embedder, self.experts = Embedder(), Experts()

    def __call__(self, ids: Any, scale: float = 1.0) -> Any:
        x = self.embedder.encode(ids)
        return self.embedder.decode(x + scale * self.experts(x))

    def hidden(self, ids: Any) -> Any:
        return self.experts(self.embedder.encode(ids))


TABLE = EinsumParameter(r"embedder\.table$", "...d,vd->...v", embedding=True)
EXPERTS = EinsumParameter(r"(up|down)$", "e...k,ekn->e...n", module=Experts)


@pytest.fixture(scope="module")
def model() -> Any:
    variables = Model().init(jax.random.key(0), IDS)
    return variables, *quantize_model(Model(), variables, EVERYTHING, IDS, layers=[TABLE, EXPERTS])


def floats(variables: Any, quantized: Any) -> Any:
    """The float variables with the dequantized weights."""
    params: Any = traverse_util.flatten_dict(variables["params"])
    for key, weight in params.items():
        held = quantized["quantized"]
        for name in key:
            held = held.get(name, {}) if name not in ("kernel", "embedding") else held
        if "packed" in held:
            *_, k, n = weight.shape[::-1] if key[-1] in ("table", "embedding") else weight.shape
            arrays = {name: held.get(name) for name in ("packed", "scale", "zero", "version")}
            matrix = QuantizedArray(index=None, format=INT8, k=k, n=n, **arrays).dequantize()
            params[key] = matrix.T if matrix.shape != weight.shape else matrix
    return {**variables, "params": traverse_util.unflatten_dict(params)}


def test_a_model_runs_on_packed_parameters(model):
    variables, quantized, stored, report = model
    paths = ["experts.Dense_0", "embedder.table", "experts.up", "experts.down"]
    assert sorted(layer.path for layer in report.layers) == sorted(paths)
    assert report.coverage == 1 and not report.uncovered
    assert set(stored["params"]) == {"experts"} and set(stored["quantized"]["embedder"]["table"])
    check_layout_version(stored)
    wanted = floats(variables, stored)
    exact: Any = Model().apply(wanted, IDS)
    np.testing.assert_allclose(quantized.apply(stored, IDS), exact, atol=1e-3)
    applied = jax.jit(quantized.apply, static_argnames="method")
    found = applied(stored, IDS, method="hidden")
    exact = Model().apply(wanted, IDS, method="hidden")
    np.testing.assert_allclose(found, exact, atol=1e-3)
    text = str(jax.make_jaxpr(quantized.apply)(stored, IDS))
    assert text.count("= quantized_matmul") == 3  # the product of the dense layer includes its bias


def test_changed_variables_are_returned(model):
    _, quantized, stored, _ = model
    out, changed = quantized.apply(stored, IDS, mutable=["state"])
    assert out.shape == (2, 3, VOCABULARY) and changed["state"]["experts"]["calls"] == 1
    _, changed = quantized.apply(stored, IDS, mutable=True)
    assert set(changed["params"]) == {"experts"} and "packing" not in str(changed)


def test_gradients_with_packed_words(model):
    variables, quantized, stored, _ = model
    wanted = floats(variables, stored)

    def loss(params: Any, apply: Any, others: Any) -> Any:
        return jnp.sin(apply({**others, "params": params}, IDS)).mean()

    found = jax.grad(loss)(stored["params"], quantized.apply, stored)
    exact = jax.grad(loss)(wanted["params"], Model().apply, wanted)
    one, other = (x["experts"]["Dense_0"]["bias"] for x in (found, exact))
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_init_and_abstract_variables(model):
    _, quantized, stored, _ = model
    made = quantized.init(jax.random.key(0), IDS)
    jax.tree.map(np.testing.assert_array_equal, made, stored)
    shapes = jax.eval_shape(Model().init, jax.random.key(0), IDS)
    _, abstract, _ = quantize_model(Model(), shapes, EVERYTHING, IDS, layers=[TABLE, EXPERTS])
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, stored)


def test_a_single_format_leaves_embeddings_in_floats():
    variables = Model().init(jax.random.key(0), IDS)
    _, _, report = quantize_model(Model(), variables, "int8", IDS, 1.0, layers=[TABLE, EXPERTS])
    kept = {layer.path: layer.backend for layer in report.layers if layer.format is None}
    assert kept == {"embedder.table": "kept by default: an embedding"}


def test_bind_raises(model):
    _, quantized, stored, _ = model
    with pytest.raises(ValueError, match=r"^QuantizedModel\.bind: .* is packed, .* use apply"):
        quantized.bind(stored)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        block = nn.scan(
            Block,
            variable_axes={"params": 0, "quantized": 0},
            split_rngs={"params": True},
            length=3,
        )
        return block()(x, None)[0]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        w = self.param("w", nn.initializers.normal(0.1), (WIDTH, WIDTH))
        return jnp.tanh(x @ w), None


def test_stacks_of_parameters():
    variables = Scanned().init(jax.random.key(0), X)
    square = EinsumParameter("w$", "...k,kn->...n")
    model, stored, report = quantize_model(Scanned(), variables, EVERYTHING, X, layers=[square])
    assert report.layers[0].shape == (3, WIDTH, WIDTH)
    wanted: Any = Scanned().apply(floats(variables, stored), X)
    np.testing.assert_allclose(jax.jit(model.apply)(stored, X), wanted, atol=1e-4)


def test_a_table_that_other_code_reads_is_quantized():
    variables = Tied().init(jax.random.key(0), IDS)
    model, stored, report = quantize_model(Tied(), variables, EVERYTHING, IDS, False)
    assert [layer.path for layer in report.layers] == ["embed", "up"] and report.coverage == 1
    wanted: Any = Tied().apply(floats(variables, stored), IDS)
    np.testing.assert_allclose(model.apply(stored, IDS), wanted, atol=1e-3)
    # A head that calls `attend` uses an intercepted method of the layer.
    plain, stored, _ = quantize_model(Tied(), variables, EVERYTHING, IDS, True)
    np.testing.assert_allclose(plain.apply(stored, IDS, True), wanted, atol=1e-3)


def test_descriptions_without_a_match_raise():
    variables = Model().init(jax.random.key(0), IDS)

    def refused(words: str, *layers: Any) -> None:
        with pytest.raises(ValueError, match=words):
            quantize_model(Model(), variables, EVERYTHING, IDS, layers=layers)

    refused(
        r"EinsumParameter\('gate'\) matches no parameter; .* are .*embedder\.table",
        EinsumParameter("gate", "a,ab->b"),
    )
    refused(
        r"in embedder\.table: .* has 3 letters for a kernel of shape \(128, 64\)",
        EinsumParameter("table", "d,avd->av"),
    )


def test_code_with_an_unsupported_use_raises_when_it_runs():
    class Careless(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x @ (2 * self.param("w", nn.initializers.normal(), (WIDTH, WIDTH)))

    variables = Careless().init(jax.random.key(0), X)
    wrong = EinsumParameter("w", "...k,kn->...n")
    model, stored, _ = quantize_model(Careless(), variables, EVERYTHING, X, layers=[wrong])
    with pytest.raises(ValueError, match="applies mul to it: w is a packed weight"):
        model.apply(stored, X)


# --- models that contain a module and its parameters ----------------------------------------------


def test_a_pretrained_model_is_quantized_in_place():
    model = Pretrained()
    variables = {"params": model.params}
    report = quantize_pretrained(model, EVERYTHING, IDS)
    assert report.coverage == 1
    wanted: Any = Tied().apply(floats(variables, {"quantized": model.params["quantized"]}), IDS)
    np.testing.assert_allclose(model(IDS), wanted, atol=1e-3)
    found = jax.jit(lambda params: model(IDS, params=params))(model.params)
    np.testing.assert_allclose(found, wanted, atol=1e-3)
    with pytest.raises(ValueError, match=r"^quantize_pretrained: the model is quantized already"):
        quantize_pretrained(model, EVERYTHING, IDS)


def test_values_other_than_pretrained_models_raise():
    with pytest.raises(TypeError, match=r"^quantize_pretrained: the model is of class Tied, but"):
        quantize_pretrained(Tied(), EVERYTHING, IDS)
    model = Pretrained()
    with pytest.raises(ValueError, match="matches no layer"):
        quantize_pretrained(model, {"nothing": INT8}, IDS)
    assert isinstance(model.module, Tied) and "quantized" not in model.params
