"""`EinsumLayer`: quantizes layers of other libraries by a declared equation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import dequantized

from jaxlowbit import INT4, INT8
from jaxlowbit.nnx import EinsumLayer, QuantizedEinsum, quantize_model

WIDTH, HEADS, SIZE = 64, 4, 32
X = np.random.default_rng(0).normal(size=(2, 3, WIDTH)).astype(np.float32)


@pytest.fixture(autouse=True)
def flax_promotes_dtypes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Einsum(nnx.Module):
    """Like the layer of google-tunix."""

    def __init__(self, einsum_str: str, shape: tuple[int, ...], *, rngs: nnx.Rngs):
        self.einsum_str = einsum_str
        self.shape = shape
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), shape))

    def __call__(self, x: Any) -> Any:
        return jnp.einsum(self.einsum_str, x, self.w[...])


class Projection(nnx.Module):
    """A kernel (features, inputs) with a bias, and a dtype for the product."""

    def __init__(self, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (96, WIDTH)))
        self.offset = nnx.Param(jax.random.normal(rngs.params(), (96,)))
        self.dtype = jnp.bfloat16

    def __call__(self, x: Any) -> Any:
        product = jnp.einsum(
            "...k,nk->...n", x.astype(self.dtype), self.weight[...].astype(self.dtype)
        )
        return product + self.offset[...].astype(self.dtype)


class Attention(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.q = Einsum("BTD,NDH->BTNH", (HEADS, WIDTH, SIZE), rngs=rngs)
        self.kv = Einsum("BSD,CKDH->CBSKH", (2, 1, WIDTH, SIZE), rngs=rngs)
        self.out = Einsum("BTNH,NHD->BTD", (HEADS, SIZE, WIDTH), rngs=rngs)
        self.last = Projection(rngs)

    def __call__(self, x: Any) -> Any:
        keys, values = self.kv(x)
        heads = self.q(x) * keys + values
        assert self.q.shape == (HEADS, WIDTH, SIZE)  # callers read attributes of layers
        return self.last(self.out(heads))


EINSUM = EinsumLayer(Einsum, "w", lambda layer: layer.einsum_str)
PROJECTION = EinsumLayer(r".*\.Projection", "weight", "...k,nk->...n", bias="offset")


def rounded(model: Any, quantized: Any) -> Any:
    """The float model with the dequantized weights."""
    for name in ("q", "kv", "out", "last"):
        layer, new = getattr(model, name), getattr(quantized, name)
        weight = layer.w if hasattr(layer, "w") else layer.weight
        axes = new._equation
        sizes = (*axes.batch, *axes.contracted, *axes.features)
        weight.set_value(dequantized(new.kernel).reshape(sizes).transpose(np.argsort(axes.order)))
    return model


def test_layers_are_quantized_by_their_equations():
    model = Attention()
    report = quantize_model(model, INT4, layers=[EINSUM, PROJECTION])
    assert [layer.path for layer in report.layers if layer.format] == ["q", "kv", "out", "last"]
    assert report.uncovered == ()
    assert all(isinstance(x, QuantizedEinsum) for x in (model.q, model.kv, model.out, model.last))
    twin = rounded(Attention(), model)
    found, expected = model(X), twin(X)
    assert found.dtype == expected.dtype == jnp.bfloat16
    assert jnp.linalg.norm(found - expected) < 0.02 * jnp.linalg.norm(expected)
    np.testing.assert_allclose(model.q(X), twin.q(X), atol=1e-5)
    np.testing.assert_allclose(model.kv(X), twin.kv(X), atol=1e-5)
    jitted = nnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(jitted(model, X), jax.block_until_ready(found))


def test_rules_and_abstract_models():
    model: Any = nnx.eval_shape(Attention)
    rules = {"^q$": INT8, "kv|out|last": None}
    report = quantize_model(model, rules, layers=[EINSUM, PROJECTION])
    formats = {layer.path: layer.format for layer in report.layers}
    assert formats == {"q": INT8, "kv": None, "out": None, "last": None}
    assert isinstance(model.q.packed.get_value(), jax.ShapeDtypeStruct)
    assert type(model.kv) is Einsum


def test_layers_of_tunix_are_known(monkeypatch):
    monkeypatch.setattr(Einsum, "__module__", "tunix.models.llama3.model")
    model = Attention()
    report = quantize_model(model, INT8, keep="last")
    assert [layer.path for layer in report.layers] == ["q", "kv", "out"]
    assert [found.path for found in report.uncovered] == ["last.weight"]


def test_without_a_description_they_are_not_covered():
    with pytest.raises(ValueError, match="there is none of nnx"):
        quantize_model(Attention(), INT4)
    message = r"the largest .*weight .* in Projection\..* an EinsumLayer says it of a class"
    with pytest.warns(UserWarning, match=message):
        quantize_model(Attention(), INT4, layers=[EINSUM])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (EinsumLayer(Einsum, "kernel", "btd,dnh->btnh"), "Einsum has kernel=None, but the weight"),
        (
            EinsumLayer(Einsum, "w", lambda _: "btd->bt"),
            "The equation 'btd->bt' is not of the form",
        ),
        (EinsumLayer(Einsum, "w", "btd,dn->btn"), "has 2 letters for a kernel of shape"),
        (
            EinsumLayer(Einsum, "w", lambda layer: layer.typo),
            "equation of Einsum raises AttributeError: .*typo",
        ),
    ],
)
def test_wrong_descriptions_raise(layer, message):
    model = Attention()
    with pytest.raises(ValueError, match=message):
        quantize_model(model, {"": INT4}, layers=[layer])
    assert type(model.q) is Einsum


def test_invalid_descriptions_raise():
    for layers in (Einsum, [Einsum], EINSUM, "w"):
        with pytest.raises(
            TypeError, match=r"^quantize_model: layers is .*, but it must be a list of E"
        ):
            quantize_model(Attention(), INT4, layers=layers)  # pyright: ignore
    for arguments in ((3, "w", "ab,bc->ac"), (Einsum, None, "ab,bc->ac"), (Einsum, "w", 3)):
        with pytest.raises(TypeError, match=r"^EinsumLayer: "):
            EinsumLayer(*arguments)  # pyright: ignore
    with pytest.raises(ValueError, match=r"^EinsumLayer: module='\(' is no regular expression"):
        EinsumLayer("(", "w", "ab,bc->ac")
    with pytest.raises(ValueError, match=r"^EinsumLayer: The equation 'btd->bt' is not of the"):
        EinsumLayer(Einsum, "w", "btd->bt")
    with pytest.raises(
        ValueError,
        match=r"^EinsumLayer: inputs is -1, but it must be the "
        r"position",
    ):
        EinsumLayer(Einsum, "w", "ab,bc->ac", inputs=-1)
