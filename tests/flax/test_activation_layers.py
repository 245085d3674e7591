"""`lhs_qtype=` of layers and of `quantize_model`: results and errors."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from meshes import make_mesh

from jaxlowbit import DISABLED_EXPORT_CHECKS, INT4, INT8, quantize, quantized_matmul
from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx

K, N = 64, 128
DTYPES = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
SHAPES = {"linear": (3, K), "general": (3, 4, 16), "einsum": (2, 3, K), "embed": (3, K)}
OPTIONS: dict[str, Any] = {"format": INT4}
BIAS: dict[str, Any] = {"bias_init": nn.initializers.normal(1.0), **OPTIONS}


def random(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def of_nnx(kind: str, dtype: Any) -> Any:
    more = {"lhs_qtype": dtype, "rngs": nnx.Rngs(0)}
    if kind == "linear":
        return jl_nnx.QuantizedLinear(K, N, **BIAS, **more)
    if kind == "general":
        return jl_nnx.QuantizedLinearGeneral((4, 16), N, axis=(-2, -1), **BIAS, **more)
    if kind == "einsum":  # two experts with a matrix each
        shapes: Any = ((2, K, N), (2, 1, N))
        return jl_nnx.QuantizedEinsum("ebd,edf->ebf", *shapes, **BIAS, **more)
    return jl_nnx.QuantizedEmbed(N, K, **OPTIONS, **more)


def of_linen(kind: str, dtype: Any) -> Any:
    more = {"lhs_qtype": dtype}
    if kind == "linear":
        return jl_linen.QuantizedDense(N, **BIAS, **more)
    if kind == "general":
        return jl_linen.QuantizedDenseGeneral(N, axis=(-2, -1), **BIAS, **more)
    if kind == "einsum":
        return jl_linen.QuantizedEinsum((2, K, N), "ebd,edf->ebf", **BIAS, **more)
    return jl_linen.QuantizedEmbed(N, K, **OPTIONS, **more)


def expected(kind: str, x: Any, kernel: Any, bias: Any, dtype: Any) -> Any:
    """The product that the layer computes."""
    lhs = x.reshape(*x.shape[:-2], K) if kind == "general" else x
    bias = None if bias is None else bias.reshape(*bias.shape[: kind == "einsum"], N)
    return quantized_matmul(lhs, kernel, bias=bias, lhs_qtype=dtype)


@dtypes
@pytest.mark.parametrize("kind", SHAPES)
def test_layers_of_nnx_quantize_their_inputs(kind, dtype):
    layer, x = of_nnx(kind, dtype), random(*SHAPES[kind])
    multiply = layer.attend if kind == "embed" else layer
    bias = None if kind == "embed" else layer.bias.get_value()
    np.testing.assert_array_equal(multiply(x), expected(kind, x, layer.kernel, bias, dtype))
    assert (multiply(x) != expected(kind, x, layer.kernel, bias, None)).any()


@dtypes
@pytest.mark.parametrize("kind", SHAPES)
def test_layers_of_linen_quantize_their_inputs(kind, dtype):
    layer, x = of_linen(kind, dtype), random(*SHAPES[kind])
    method = "attend" if kind == "embed" else "__call__"
    variables = layer.init(jax.random.key(0), x, method=method)
    weight = {"linear": (K, N), "general": (K, N), "einsum": (2, K, N), "embed": (K, N)}[kind]
    held = {name: variables["quantized"][name] for name in ("packed", "scale", "version")}
    kernel = quantize(jnp.ones(weight), INT4)._with(**held)
    bias = variables.get("params", {}).get("bias")
    found = layer.apply(variables, x, method=method)
    np.testing.assert_array_equal(found, expected(kind, x, kernel, bias, dtype))
    assert (found != expected(kind, x, kernel, bias, None)).any()


WRONG = {
    "int4": (ValueError, "lhs_qtype is int4, but activations are quantized to int8 or"),
    3: (TypeError, "lhs_qtype is 3, which names no dtype"),
}


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("kind", SHAPES)
def test_other_dtypes_raise(kind, value):
    error, sentence = WRONG[value]
    with pytest.raises(error, match=rf"Quantized\w+: {sentence}"):
        of_nnx(kind, value)
    method = "attend" if kind == "embed" else "__call__"
    with pytest.raises(error, match=rf"Quantized\w+: {sentence}"):
        of_linen(kind, value).init(jax.random.key(0), random(*SHAPES[kind]), method=method)


def test_a_layer_is_stored_cloned_and_exported():
    layer, x = of_nnx("linear", "int8"), random(3, K)
    assert layer.lhs_qtype == jnp.int8
    graph, state = nnx.split(layer)
    assert hash(graph) == hash(nnx.split(of_nnx("linear", jnp.int8))[0])
    for other in (nnx.merge(graph, state), nnx.clone(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(other(x), layer(x))
    assert "lhs_qtype" in repr(layer)
    # An exported program adds int8 products in a different order than a call compiled for this CPU.
    layer = of_nnx("linear", "float8_e4m3fn")
    graph, state = nnx.split(layer)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    pure = nnx.as_pure(state)
    exported = jax.export.export(call, disabled_checks=DISABLED_EXPORT_CHECKS)(pure, x)
    np.testing.assert_array_equal(exported.call(pure, x), layer(x))


def test_a_layer_without_the_attribute_is_one_without_quantized_activations():
    layer, x = of_nnx("linear", None), random(3, K)
    del layer.lhs_qtype  # as in layers pickled by older versions
    found = pickle.loads(pickle.dumps(layer))(x)
    np.testing.assert_array_equal(found, of_nnx("linear", None)(x))


def test_derivatives_pass_the_rounding():
    layer, x = of_nnx("linear", "int8"), random(3, K)
    found = jax.grad(lambda x: layer(x).sum())(x)
    np.testing.assert_allclose(
        found, jax.grad(lambda x: (x @ layer.kernel).sum())(x), rtol=1e-2, atol=1e-2
    )


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(256, K, rngs=rngs)
        self.up = nnx.Linear(K, N, rngs=rngs)
        self.down = nnx.Linear(N, K, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        return self.embed.attend(self.down(jax.nn.relu(self.up(self.embed(tokens)))))


class Module(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(256, K, name="embed")
        x = jax.nn.relu(nn.Dense(N, name="up")(embed(tokens)))
        return embed.attend(nn.Dense(K, name="down")(x))


TOKENS = jnp.array([[3, 1, 4]])
RULES = {"embed": INT8, "": INT4}
CHOICES: list[tuple[Any, dict[str, Any]]] = [
    (None, {}),
    (jnp.int8, {"up": "int8", "down": "int8"}),
    ({"up": None, "": "float8_e4m3fn"}, {"embed": "float8_e4m3fn", "down": "float8_e4m3fn"}),
    ({"^up": jnp.int8}, {"up": "int8"}),
]


@pytest.mark.parametrize(("choice", "chosen"), CHOICES)
def test_models_quantize_the_inputs_of_layers(choice, chosen):
    """A single dtype applies to all quantized layers except embeddings; a mapping goes by path."""
    model = Model(nnx.Rngs(0))
    report = jl_nnx.quantize_model(model, RULES, lhs_qtype=choice)
    found = {layer.path: layer.lhs_qtype for layer in report.layers}
    assert found == {name: None for name in found} | chosen
    assert all(f"{dtype} activations" in str(report) for dtype in chosen.values())
    layers: dict[str, Any] = {name: getattr(model, name) for name in found}
    assert {name: layer.lhs_qtype for name, layer in layers.items()} == found

    def product(name: str, x: Any) -> Any:
        layer = layers[name]
        bias = None if name == "embed" else layer.bias.get_value()
        return quantized_matmul(x, layer.kernel, bias=bias, lhs_qtype=found[name])

    x = jax.nn.relu(product("up", model.embed(TOKENS)))
    exact = product("embed", product("down", x))
    np.testing.assert_array_equal(model(TOKENS), exact)

    module = Module()
    params = {name: {"kernel": random(K, N), "bias": jnp.ones(N)} for name in ("up",)} | {
        "down": {"kernel": random(N, K), "bias": jnp.ones(K)}
    }
    variables = {"params": {**params, "embed": {"embedding": random(256, K, seed=2)}}}
    quantized, held, report = jl_linen.quantize_model(
        module, variables, RULES, TOKENS, lhs_qtype=choice
    )
    assert {layer.path: layer.lhs_qtype for layer in report.layers} == found
    plain, _, _ = jl_linen.quantize_model(module, variables, RULES, TOKENS)
    out, floats = quantized.apply(held, TOKENS), plain.apply(held, TOKENS)
    assert bool((out == floats).all()) == (not chosen)
    assert hash(quantized) == hash(pickle.loads(pickle.dumps(quantized)))
    bound = quantized.bind(held)
    np.testing.assert_array_equal(bound(TOKENS), out)


def test_wrong_choices_of_models_raise():
    def choose(choice: Any) -> None:
        jl_nnx.quantize_model(Model(nnx.Rngs(0)), INT4, lhs_qtype=choice)

    with pytest.raises(ValueError, match="quantize_model: lhs_qtype is int4, but"):
        choose("int4")
    with pytest.raises(ValueError, match=r"'up', 'int4'.* is no rule.*or None .lhs_qtype"):
        choose({"up": "int4"})
    with pytest.raises(ValueError, match="'embed' matches no layer"):  # `embed` stays in floats
        choose({"embed": jnp.int8})


def test_raw_parameters_quantize_inputs():
    class Experts(nnx.Module):
        def __init__(self) -> None:
            self.gate = nnx.Param(random(2, K, N))

        def __call__(self, x: Any) -> Any:
            return jnp.einsum("ebk,ekn->ebn", x, self.gate[...])

    model, x = Experts(), random(2, 3, K, seed=1)
    gate = quantize(model.gate[...], INT4)
    layers = [jl_nnx.EinsumParameter("gate", "ebk,ekn->ebn")]
    jl_nnx.quantize_model(model, INT4, layers=layers, lhs_qtype=jnp.int8)
    exact = quantized_matmul(x, gate, lhs_qtype=jnp.int8)
    np.testing.assert_array_equal(model(x), exact)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes(kind):
    """Rows and columns on different axes; sharded k with a differently sharded result."""
    mesh = make_mesh(kind)
    x, rhs = random(4, 256), quantize(random(256, 256, seed=1), INT4)
    whole = quantized_matmul(x, rhs, lhs_qtype=jnp.int8)
    placed = {"rows": (("a", None), ("b", None)), "k": ((None, "a"), (None, "a"))}
    for name, (lhs_spec, (n, k)) in placed.items():
        put = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*lhs_spec)))
        leaves = {
            leaf: jax.device_put(getattr(rhs, leaf), jax.NamedSharding(mesh, jax.P(n, k)))
            for leaf in ("packed", "scale")
        }
        out = jax.P(None, "b") if kind is AxisType.Explicit else None

        def product(x: Any, rhs: Any, out: Any = out) -> Any:
            return quantized_matmul(x, rhs, lhs_qtype=jnp.int8, out_sharding=out)

        with jax.set_mesh(mesh):
            found = jax.jit(product)(put, rhs._with(**leaves))
        np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-4, err_msg=name)
