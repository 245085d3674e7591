"""`jax.lax.ragged_dot` of raw parameters: experts, packed in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxlowbit import INT8, quantize
from jaxlowbit.nnx import EinsumParameter, quantize_model
from jaxlowbit.quantizers import Statistics, _registry, awq

WIDTH, HIDDEN, EXPERTS = 64, 96, 3
FORMAT = "int3-g32"
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
    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.experts, self.sizes = Experts(nnx.Rngs(0)), sizes

    def __call__(self, x: Any) -> Any:
        return self.experts(x, jnp.array(self.sizes))


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


def test_calibration_has_the_rows_of_each_expert():
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(size=(2, WIDTH)))
    x = jnp.asarray(rng.normal(size=(400, WIDTH)) * sizes[(np.arange(400) > 149) * 1], jnp.float32)
    model, floats = Model((150, 0, 250)), Model((150, 0, 250))
    with pytest.warns(UserWarning, match=r"reaches 1 of the stack experts.(gating|down); each"):
        quantize_model(model, FORMAT, layers=LAYERS, quantizer="awq", calibration=[x])
    gating = np.asarray(floats.experts.gating.get_value()).transpose(0, 3, 1, 2)
    gating = jnp.asarray(gating.reshape(EXPERTS, WIDTH, -1))
    found = model.experts.gating.kernel
    for expert, rows in ((0, x[:150]), (2, x[150:])):
        statistics = Statistics.of(rows, full=True)
        weight = gating[expert]
        factor = awq.factors([weight], [found.format], statistics)
        own = model.experts.gating.lhs_factor[...][expert]
        np.testing.assert_allclose(own, factor, rtol=1e-5)
        statistics, weight = statistics.divided(factor), weight * factor[:, None]
        options = {"quantizer": "awq", "statistics": statistics}
        wanted = quantize(weight, FORMAT, **options).dequantize()
        same = jnp.isclose(found[expert].dequantize(), wanted, rtol=1e-4, atol=1e-6)
        assert same.mean() > 0.99  # sums in another order may change a tie
    plain = quantize(gating[1], FORMAT, quantizer="mse").dequantize()
    np.testing.assert_allclose(found[1].dequantize(), plain, rtol=1e-5)
    error = jnp.linalg.norm(model(x) - floats(x)) / jnp.linalg.norm(floats(x))
    rounded = Model((150, 0, 250))
    quantize_model(rounded, FORMAT, layers=LAYERS, quantizer="mse")
    assert error < 0.9 * jnp.linalg.norm(rounded(x) - floats(x)) / jnp.linalg.norm(floats(x))


@pytest.mark.parametrize("method", _registry.NAMES)
def test_an_expert_that_is_not_finite(method):
    """The error names the stack and the place."""
    model: Any = Model((3, 3, 3))
    model.experts.down.set_value(model.experts.down.get_value().at[2, 3, 5].set(jnp.nan))
    calibration = [X] if _registry.statistics_of(method) else None
    message = r"in experts.down: weight has 1 values that are NaN .* the first at \(2, 3, 5\)"
    with pytest.raises(ValueError, match=f"(?s)quantize_model: .*{message}"):
        options: Any = {"layers": LAYERS, "quantizer": method, "calibration": calibration}
        quantize_model(model, FORMAT, **options)


@pytest.mark.parametrize("method", ["gptq", "smoothquant"])  # full moments, and their diagonal
def test_inputs_of_an_expert_that_are_not_finite(method):
    options: Any = {"layers": LAYERS, "quantizer": method, "calibration": [X.at[4].set(jnp.nan)]}
    message = "the inputs of experts.gating in the calibration are NaN or infinite"
    with pytest.raises(ValueError, match=f"quantize_model: {message}"):
        quantize_model(Model((2, 2, 3)), FORMAT, **options)
