"""`EinsumLayer` in Linen: raw parameters of other libraries, by the equations of their calls."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxlowbit import INT4, INT8, check_layout_version
from jaxlowbit.linen import EinsumLayer, quantize_model

WIDTH, HEADS, SIZE, HIDDEN = 64, 4, 32, 128
KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, WIDTH), np.float32))


@pytest.fixture(autouse=True)
def flax_promotes_dtypes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Einsum(nn.Module):
    """Like the layer of gemma: each call passes the equation; the parameter's name is arbitrary."""

    shape: tuple[int, ...]
    weight_name: str = "w"

    @nn.compact
    def __call__(self, eqn, x):
        return jnp.einsum(
            eqn, x, self.param(self.weight_name, nn.initializers.normal(), self.shape)
        )


class FlaxConv1D(nn.Module):
    """Like the layer of GPT-2 in transformers: a kernel (features, inputs)."""

    features: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        shape = (self.features, x.shape[-1])
        kernel = self.param("kernel", nn.initializers.normal(), shape)
        bias = self.param("bias", nn.initializers.ones, (self.features,))
        x, kernel, bias = (jnp.asarray(a, self.dtype) for a in (x, kernel, bias))
        return x @ kernel.T + bias


class Block(nn.Module):
    """Two layers share the scope of the block, as in gemma's MLP."""

    equation: str = "BTD,NDH->BTNH"

    @nn.compact
    def __call__(self, x, _=None):
        heads = Einsum((HEADS, WIDTH, SIZE), name="q")(self.equation, x)
        x = x + Einsum((HEADS, SIZE, WIDTH), name="out")("BTNH,NHD->BTD", heads)
        gating = Einsum((2, HIDDEN, WIDTH), "gating_einsum")
        nn.share_scope(self, gating)
        gate = gating("...F,NHF->...NH", x)
        linear = Einsum((HIDDEN, WIDTH), "linear")
        nn.share_scope(self, linear)
        x = x + linear("...H,HF->...F", nn.gelu(gate[..., 0, :]) * gate[..., 1, :])
        return x + FlaxConv1D(WIDTH, jnp.bfloat16, name="conv")(x), None


class Model(nn.Module):
    lifted: bool = False
    equation: str = "BTD,NDH->BTNH"

    @nn.compact
    def __call__(self, x):
        if not self.lifted:
            return Block(self.equation, name="block")(x)[0]
        axes: Any = {"params": 0, "quantized": 0}
        scan = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=2)
        return scan(name="block")(x, None)[0]


EINSUM = EinsumLayer(Einsum, lambda layer: layer.weight_name, lambda layer, eqn, x: eqn, inputs=1)
CONV = EinsumLayer(r".*\.FlaxConv1D", "kernel", "...k,nk->...n", bias="bias")
LAYERS = [EINSUM, CONV]
NAMES = ["q.w", "out.w", "gating_einsum", "linear", "conv.kernel"]


def near(found: Any, expected: Any, tolerance: float) -> bool:
    return jnp.linalg.norm(found - expected) < tolerance * jnp.linalg.norm(expected)


@pytest.mark.parametrize("lifted", [False, True], ids=["plain", "scanned"])
def test_layers_are_quantized_by_the_equations_of_their_calls(lifted):
    module = Model(lifted)
    floats = module.init(KEY, X)
    model, variables, report = quantize_model(module, floats, INT8, X, layers=LAYERS)
    paths = [layer.path for layer in report.layers if layer.format]
    assert paths == [f"block.{name}" for name in NAMES]
    assert report.uncovered == () and set(variables["params"]["block"]) == {"conv"}
    expected = module.apply(floats, X)
    assert near(model.apply(variables, X), expected, 0.02)
    np.testing.assert_allclose(
        jax.jit(model.apply)(variables, X), model.apply(variables, X), rtol=0.02, atol=0.02
    )
    check_layout_version(variables)


def test_arrays_are_under_the_names_of_their_parameters():
    module = Model()
    floats = module.init(KEY, X)
    model, variables, _ = quantize_model(module, floats, {"linear|out": INT4}, X, layers=LAYERS)
    assert dict(model.formats) == {("block", "linear"): INT4, ("block", "out", "w"): INT4}

    def weight(*path):
        held = variables["quantized"]
        for name in path:
            held = held[name]
        return held

    assert set(weight("block", "linear")) == {"packed", "scale", "version"}
    abstract = jax.eval_shape(module.init, KEY, X)
    _, shapes, _ = quantize_model(module, abstract, {"linear|out": INT4}, X, layers=LAYERS)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, variables)


@pytest.mark.filterwarnings("ignore:quantize_model")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Einsum, "gemma.gm.nn._layers"),
        (Einsum, "gemma.gm.nn.gemma3n._layers"),
        (FlaxConv1D, "transformers.models.gpt2.modeling_flax_gpt2"),
    ],
)
def test_layers_of_other_packages_are_known(kind, name, monkeypatch):
    monkeypatch.setattr(kind, "__module__", name)
    module = Model()
    _, _, report = quantize_model(module, module.init(KEY, X), INT8, X)
    known = NAMES[:4] if kind is Einsum else NAMES[4:]
    assert [layer.path for layer in report.layers] == [f"block.{name}" for name in known]


def test_known_layers_with_other_equations_stay_floats(monkeypatch):
    monkeypatch.setattr(Einsum, "__module__", "gemma.gm.nn._layers")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4 * WIDTH, name="up")(x)
            return Einsum((4 * WIDTH, 4), name="last")(eqn="btd,df->btf", x=x)

    module = Model()
    floats = module.init(KEY, X)
    model, variables, report = quantize_model(module, floats, INT8, X)
    assert [found.path for found in report.uncovered] == ["last.w"]
    assert near(model.apply(variables, X), module.apply(floats, X), 0.02)


def test_another_equation_raises():
    """It has the same sizes, but contracts a different axis."""

    class Square(nn.Module):
        equation: str

        @nn.compact
        def __call__(self, x):
            return Einsum((WIDTH, WIDTH), name="square")(self.equation, x)

    module = Square("btd,df->btf")
    floats = module.init(KEY, X)
    model, variables, _ = quantize_model(module, floats, INT4, X, layers=[EINSUM])
    other = dataclasses.replace(model, module=Square("btd,fd->btf"))
    with pytest.raises(ValueError, match=r"square was quantized for the equation 'btd,df"):
        other.apply(variables, X)


@pytest.mark.filterwarnings("ignore:quantize_model")
def test_wrong_descriptions_raise():
    module = Model()
    floats = module.init(KEY, X)
    number: Any = lambda *_: 3  # noqa: E731
    for layer, message in (
        (EinsumLayer(FlaxConv1D, "kernel", lambda *_: "...k,...k->k"), "is not of the form"),
        (EinsumLayer(FlaxConv1D, "weight", "...k,nk->...n"), "has no weight of its own path"),
        (EinsumLayer(FlaxConv1D, "kernel", lambda layer: "..."), "equation of .* raises TypeError"),
        (
            EinsumLayer(FlaxConv1D, "kernel", number),
            "equation of .* is 3, but it must be a",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_model(module, floats, {"": INT4}, X, layers=[layer])
    wrong: Any = [FlaxConv1D]
    with pytest.raises(
        TypeError,
        match=r"^quantize_model: layers is .*, but it must be a list of "
        r"E",
    ):
        quantize_model(module, floats, INT4, X, layers=wrong)
    behind = EinsumLayer(FlaxConv1D, "kernel", "...k,nk->...n", inputs=1, bias="bias")
    model, variables, _ = quantize_model(module, floats, {"conv": INT4}, X, layers=[behind])
    with pytest.raises(ValueError, match="FlaxConv1D is called with 1 arguments by position"):
        model.apply(variables, X)
