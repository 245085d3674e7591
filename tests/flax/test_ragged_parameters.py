"""`jax.lax.ragged_dot` of raw parameters: experts, packed in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxlowbit import INT8
from jaxlowbit.nnx import EinsumParameter, quantize_model
from jaxlowbit.quantizers import Calibration

WIDTH, HIDDEN, EXPERTS = 64, 96, 3
LAYERS = [
    EinsumParameter("gating$", "e...d,eghd->e...gh"),
    EinsumParameter("down$", "e...k,ekn->e...n"),
]


class Experts(nnx.Module):
    """Like the experts of google-tunix's Gemma 4: gate and up share a transposed parameter."""

    def __init__(self, rngs: nnx.Rngs):
        gating = jax.random.normal(rngs.params(), (EXPERTS, 2, HIDDEN, WIDTH)) / WIDTH**0.5
        down = jax.random.normal(rngs.params(), (EXPERTS, HIDDEN, WIDTH)) / HIDDEN**0.5
        self.gating, self.down = nnx.Param(gating), nnx.Param(down)

    def __call__(self, x: Any, sizes: Any) -> Any:
        gating = jnp.transpose(self.gating.get_value(), (0, 3, 1, 2))
        gating = gating.reshape(EXPERTS, WIDTH, 2 * HIDDEN).astype(x.dtype)
        both = lax.ragged_dot(x, gating, group_sizes=sizes).reshape(-1, 2, HIDDEN)
        hidden = jax.nn.gelu(both[:, 0]) * both[:, 1]
        return lax.ragged_dot(hidden, self.down.get_value().astype(x.dtype), group_sizes=sizes)


X = jax.random.normal(jax.random.key(0), (7, WIDTH))


@pytest.mark.parametrize("sizes", [(3, 0, 4), (0, 2, 1)])
def test_ragged_products_use_packed_experts(sizes):
    model: Any = nnx.Dict(experts=Experts(nnx.Rngs(0)))
    wanted = model.experts(X, jnp.array(sizes))
    report = quantize_model(model, INT8, layers=LAYERS)
    assert report.coverage == 1
    experts = model.experts
    assert experts.gating.kernel.shape == (EXPERTS, WIDTH, 2 * HIDDEN)
    found = nnx.jit(lambda experts, *arrays: experts(*arrays))(experts, X, jnp.array(sizes))
    floats = Experts(nnx.Rngs(0))
    gating = experts.gating.kernel.dequantize().reshape(EXPERTS, WIDTH, 2, HIDDEN)
    floats.gating.set_value(jnp.transpose(gating, (0, 2, 3, 1)))
    floats.down.set_value(experts.down.kernel.dequantize())
    same = floats(X, jnp.array(sizes))
    np.testing.assert_allclose(found, same, atol=1e-5 * float(jnp.abs(same).max()))
    error = jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)
    assert 0 < error < 0.02


class Model(nnx.Module):
    def __init__(self) -> None:
        self.experts = Experts(nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.experts(x, jnp.array([3, 0, 4]))


class Other(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.rows = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))

    def __call__(self, x: Any, sizes: Any) -> Any:
        return lax.ragged_dot(self.rows.get_value()[0], x, sizes)


def test_other_ragged_products_raise():
    model: Any = nnx.Dict(other=Other(nnx.Rngs(0)))
    quantize_model(model, INT8, layers=[EinsumParameter("rows$", "etd,edf->etf")])
    with pytest.raises(ValueError, match="a ragged product that is not one of rows"):
        model.other(jnp.ones((EXPERTS, HIDDEN, 4)), jnp.array([WIDTH, 0, 0]))
    options: Any = {"quantizer": "gptq", "calibration": Calibration([X])}
    with pytest.raises(ValueError, match="whose statistics are not recorded"):
        quantize_model(Model(), INT8, layers=LAYERS, **options)
