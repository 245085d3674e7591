"""`QuantizedModel` used like its Linen module: results and errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors
from flax import linen as nn

from jaxlowbit import Format
from jaxlowbit.linen import quantize_model

KEY = jax.random.key(0)
WIDTH = 40
X = np.random.default_rng(0).normal(size=(3, WIDTH)).astype(np.float32)
FORMAT = Format(8, 16)  # close to the float model


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(name="norm")(nn.Dense(WIDTH, name="up")(x))


class Model(nn.Module):
    """Submodules, a list of submodules, a method, and mutable variables."""

    def setup(self):
        self.encoder = Encoder()
        self.blocks = [nn.Dense(WIDTH) for _ in range(2)]
        self.norm = nn.BatchNorm(use_running_average=False)

    def __call__(self, x):
        return self.decode(self.encoder(x))

    def decode(self, x):
        for block in self.blocks:
            x = nn.tanh(block(x))
        return self.norm(x)


MODULE = Model()
MUTABLE = ["batch_stats"]


@functools.cache
def float_variables() -> Any:
    return MODULE.init(KEY, X)


@functools.cache
def quantized() -> tuple[Any, Any]:
    """The quantized `MODULE`, and its variables."""
    model, variables, _ = quantize_model(MODULE, float_variables(), FORMAT, X, mutable=MUTABLE)
    return model, variables


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, atol=0.1)


# --- initialization -------------------------------------------------------------------------------


@pytest.mark.parametrize("rngs", [KEY, {"params": KEY, "dropout": KEY}], ids=["key", "keys"])
def test_init_quantizes_the_initial_values_of_the_module(rngs):
    model, want = quantized()
    variables = model.init(rngs, X)
    assert jax.tree.structure(variables) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, variables, want)


def test_init_under_jit_and_abstract():
    model, quantized_variables = quantized()
    variables = jax.jit(model.init)(KEY, X)
    want, _ = model.apply(quantized_variables, X, mutable=MUTABLE)
    close(model.apply(variables, X, mutable=MUTABLE)[0], want)
    abstract = jax.eval_shape(model.init, KEY, X)
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, quantized_variables)


def test_init_of_a_method_leaves_the_rest_out():
    variables = quantized()[0].init(KEY, X, method="decode")
    want = MODULE.init(KEY, X, method="decode")
    assert set(want["params"]) == set(variables["params"]) | {"blocks_0", "blocks_1"}
    assert set(variables["quantized"]) == {"blocks_0", "blocks_1"}


@pytest.mark.parametrize("box", [True, False], ids=["boxed", "plain"])
def test_init_of_stacks(box):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            init = nn.initializers.lecun_normal()
            init = nn.with_partitioning(init, ("in", "out")) if box else init
            return nn.Dense(WIDTH, kernel_init=init)(x), None

    axes: Any = {"params": 0, "quantized": 0}
    options: Any = {"metadata_params": {nn.PARTITION_NAME: "layers"}} if box else {}
    scan: Any = nn.scan(Block, axes, split_rngs={"params": True}, length=2, **options)
    model, variables, _ = quantize_model(scan(), scan().init(KEY, X), FORMAT, X)
    again = model.init(KEY, X)
    assert jax.tree.structure(again) == jax.tree.structure(variables)
    jax.tree.map(np.testing.assert_array_equal, again, variables)


# --- bound modules and calls ----------------------------------------------------------------------


def test_bound_models_are_called_and_have_methods_and_submodules():
    model, variables = quantized()
    bound = model.bind(variables, mutable=MUTABLE)
    module = MODULE.bind(float_variables(), mutable=MUTABLE)
    want, _ = model.apply(variables, X, mutable=MUTABLE)
    np.testing.assert_array_equal(bound(X), want)
    close(bound.encoder(X), module.encoder(X))
    close(bound.decode(X), module.decode(X))
    close(bound.blocks[1](X), module.blocks[1](X))
    assert bound.blocks[1].features == module.blocks[1].features == WIDTH
    assert jax.tree.structure(bound.variables) == jax.tree.structure(variables)
    assert "up" in bound.encoder.variables["params"]
    for called in (bound, module):
        with pytest.raises(AttributeError):
            _ = called.missing


def test_submodules_are_unbound():
    model, given = quantized()
    bound = model.bind(given, mutable=MUTABLE)
    unbound, variables = bound.unbind()
    assert unbound == model
    jax.tree.map(np.testing.assert_array_equal, variables, given)
    encoder, variables = bound.encoder.unbind()
    assert set(variables["quantized"]) == {"up"}
    np.testing.assert_array_equal(encoder.apply(variables, X), bound.encoder(X))
    block, variables = bound.blocks[0].unbind()
    np.testing.assert_array_equal(jax.jit(block.apply)(variables, X), bound.blocks[0](X))


# --- manually tied heads --------------------------------------------------------------------------


def by_apply(table: jax.Array, x: jax.Array) -> Any:
    return nn.Dense(50, use_bias=False, parent=None).apply({"params": {"kernel": table.T}}, x)


def by_bind(table: jax.Array, x: jax.Array) -> Any:
    return nn.Dense(50, use_bias=False, parent=None).bind({"params": {"kernel": table.T}})(x)


@pytest.mark.parametrize("head", [by_apply, by_bind, lambda table, x: x @ table.T])
def test_manually_tied_heads_stay_tied(head):
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(50, WIDTH, name="embed")
            return head(embed.embedding, nn.Dense(WIDTH, name="up")(embed(tokens)))

    tokens = jnp.array([3, 1, 4])
    floats: Any = Tied().init(KEY, tokens)
    model, variables, report = quantize_model(Tied(), floats, {"up": FORMAT}, tokens)
    assert [layer.path for layer in report.layers if layer.format] == ["up"]
    assert "embed" in variables["params"]
    for apply in (model.apply, jax.jit(model.apply)):
        close(apply(variables, tokens), Tied().apply(floats, tokens))
    close(model.bind(variables)(tokens), Tied().apply(floats, tokens))


# --- errors ---------------------------------------------------------------------------------------


def raised(call: Any) -> Exception:
    with pytest.raises(Exception) as info:
        call()
    return info.value


class General(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.DenseGeneral(8, axis=(-2, -1), name="layer")(x)


class Einsum(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Einsum((WIDTH, 2, 8), "bk,khd->bhd", name="layer")(x)


class Attend(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Embed(50, WIDTH, name="layer").attend(x)


def around(lift: Any) -> Any:
    class Around(nn.Module):
        @nn.compact
        def __call__(self, x):
            return lift(nn.Dense)(WIDTH, name="layer")(x)

    return Around()


def scan(layer: Any) -> Any:
    class Step(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x, _=None):
            return layer(self.features)(x), None

    axes: Any = {"params": 0, "quantized": 0}
    lifted: Any = nn.scan(Step, axes, split_rngs={"params": True}, length=2)
    return lambda *args, **kwargs: lambda x: lifted(*args, **kwargs)(x)[0]


MODULES: Any = {
    "dense": (Encoder(), (3, WIDTH), (3, WIDTH + 1)),
    "general": (General(), (3, 4, 6), (3, 6, 5)),
    "einsum": (Einsum(), (3, WIDTH), (3, WIDTH + 1)),
    "attend": (Attend(), (3, WIDTH), (3, WIDTH + 1)),
    "jit": (around(nn.jit), (3, WIDTH), (3, WIDTH + 1)),
    "remat": (around(nn.remat), (3, WIDTH), (3, WIDTH + 1)),
    "scan": (around(scan), (3, WIDTH), (3, WIDTH + 1)),
    "weight norm of biases": (
        around(
            lambda layer: (
                lambda *args, name: nn.WeightNorm(layer(*args, name=name), variable_filter={"bias"})
            )
        ),
        (3, WIDTH),
        (3, WIDTH + 1),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_shapes_and_errors_match_the_module(name):
    module, right, wrong = MODULES[name]
    x = jnp.ones(right)
    floats = jax.tree.map(lambda a: jnp.ones(a.shape), jax.eval_shape(module.init, KEY, x))
    model, variables, _ = quantize_model(module, floats, {"": FORMAT}, x)
    got = jax.eval_shape(model.apply, variables, x)
    assert got == jax.eval_shape(module.apply, floats, x)
    got = jax.eval_shape(model.init, KEY, x)
    assert jax.tree.structure(got) == jax.tree.structure(variables)
    for wrap in (lambda f: f, jax.jit):
        want = raised(lambda wrap=wrap: wrap(module.apply)(floats, jnp.ones(wrong)))
        found = raised(lambda wrap=wrap: wrap(model.apply)(variables, jnp.ones(wrong)))
        assert isinstance(found, type(want)), want


@pytest.mark.parametrize(
    "without",
    [
        lambda held: {},
        lambda held: {name: held[name] for name in held if name not in ("params", "quantized")},
        lambda held: held | {"params": {}, "quantized": {}},
    ],
    ids=["nothing", "no params", "empty"],
)
def test_missing_variables_raise_the_error_of_the_module(without):
    floats = Encoder().init(KEY, X)
    model, variables, _ = quantize_model(Encoder(), floats, FORMAT, X)
    want = raised(lambda: Encoder().apply(without(floats), X))
    found = raised(lambda: model.apply(without(variables), X))
    assert isinstance(found, errors.FlaxError) and isinstance(want, errors.FlaxError)


def test_unbound_models_raise_the_error_of_the_module():
    model, _, _ = quantize_model(Encoder(), Encoder().init(KEY, X), FORMAT, X)
    want = raised(lambda: Encoder()(X))
    found = raised(lambda: model(X))
    assert type(found) is type(want) and str(found) == str(want)


def test_other_arguments_raise_the_error_of_the_module():
    for call in (
        lambda model, held: model.apply(held, X, method="missing"),
        lambda model, held: model.apply(held, X, X, X, mutable=MUTABLE),
        lambda model, held: model.init("no key", X),
        lambda model, held: model.apply(held, X),  # batch_stats are not mutable
    ):
        want = raised(lambda call=call: call(MODULE, float_variables()))
        found = raised(lambda call=call: call(*quantized()))
        assert type(found) is type(want)
