"""`jaxlowbit.qwix`: models that qwix has quantized, multiplied by packed weights."""

import importlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

qwix: Any = pytest.importorskip("qwix", reason="qwix is not installed")

from jaxlowbit.qwix import PackedProvider, pack  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
X = np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32)


class Model(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(128, 64, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(64, 32, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32)(nn.relu(nn.Dense(64)(x)))


def provider(**rule):
    return PackedProvider([qwix.QuantizationRule(weight_qtype=jnp.int4, tile_size=32, **rule)])


def products(function: Any) -> int:
    return str(jax.make_jaxpr(function)(X)).count("quantized_matmul[")


@pytest.fixture(autouse=True)
def standard():
    with jax.numpy_dtype_promotion("standard"):  # qwix depends on it
        yield


def test_nnx():
    model = qwix.quantize_model(Model(), provider(), X)
    wanted = model(X)
    assert pack(model, keep="down") is model and products(lambda x: model(x)) == 1
    np.testing.assert_allclose(model(X), wanted, rtol=1e-5, atol=1e-5)
    pack(model)
    assert products(lambda x: model(x)) == 2
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, X), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="pack: the model has no integer weight"):
        pack(model)


@pytest.mark.parametrize("act_qtype", [None, jnp.int8])
def test_linen(act_qtype):
    model = qwix.quantize_model(LinenModel(), provider(act_qtype=act_qtype))
    floats = LinenModel().init(jax.random.key(0), X)["params"]
    abstract = jax.eval_shape(model.init, jax.random.key(0), X)["params"]
    held = qwix.quantize_params(floats, abstract)
    packed = {"params": pack(held)}
    wanted = model.apply({"params": held}, X)
    assert products(lambda x: model.apply(packed, x)) == (2 if act_qtype is None else 0)
    error = np.linalg.norm(model.apply(packed, X) - wanted) / np.linalg.norm(wanted)
    assert error < (1e-5 if act_qtype is None else 0.02)  # qwix has a scale for each tile, too


def test_unsupported_products_raise():
    rules = [qwix.QuantizationRule(act_qtype=x) for x in (jnp.int8, None)]
    with pytest.raises(ValueError, match=r"act_qtype of the rules is .*int8.*, None, but all"):
        PackedProvider(rules)
    weight = pack(qwix.quantize_model(Model(), provider(), X)).up.kernel
    weight = weight.value
    with pytest.raises(ValueError, match=r"but a packed weight \(k, n\) is multiplied along k"):
        provider().dot_general(X[:, :64], weight, (((1,), (1,)), ((), ())))
    with pytest.raises(ValueError, match="einsum ab,bc->ac has a packed weight"):
        provider().einsum("ab,bc->ac", X, weight)


def test_another_qwix_raises(monkeypatch):
    """A version whose provider lacks a method fails at import, not in a product."""
    monkeypatch.setattr(qwix, "PtqProvider", type("PtqProvider", (), {"dot_general": None}))
    with pytest.raises(ImportError, match=r"qwix .* has no PtqProvider.einsum; install qwix"):
        importlib.reload(sys.modules["jaxlowbit._flax.qwix_provider"])
