"""Factors of AWQ and SmoothQuant in Flax models: every kind of layer divides its inputs by them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx
from flax import linen as nn
from meshes import make_mesh

from jaxlowbit import quantize
from jaxlowbit.linen import quantize_model as quantize_linen
from jaxlowbit.nnx import EinsumParameter, quantize_model
from jaxlowbit.quantizers import Calibration, Statistics, awq

WIDTH, FORMAT = 64, "int3-g32"
RNG = np.random.default_rng(0)
SIZES = np.exp(RNG.normal(size=WIDTH)).astype(np.float32)
BATCHES = [jnp.asarray(RNG.normal(size=(96, WIDTH)) * SIZES, jnp.float32) for _ in range(2)]
X = BATCHES[0]
RAW = EinsumParameter("raw", "...k,kn->...n")


class Model(nnx.Module):
    """A layer, and a parameter of another module's code."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("a", None))
        self.linear = nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs)
        self.raw = nnx.Param(jax.random.normal(rngs(), (WIDTH, WIDTH)) / 8)

    def __call__(self, x):
        return self.linear(x) @ self.raw[...]


def quantized(quantizer, format=FORMAT, calibration: Any = BATCHES, **options) -> tuple[Any, Any]:
    with nnx.use_eager_sharding(False):
        model: Any = Model()
        options |= {"quantizer": quantizer, "layers": [RAW]}
        report = quantize_model(model, format, calibration=calibration, **options)
    return model, report


def error(found, wanted):
    return float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))


def test_awq_keeps_factors_in_layers_and_foreign_parameters(tmp_path):
    with nnx.use_eager_sharding(False):
        floats = Model()
    wanted = floats(X)
    calibration = Calibration(BATCHES, folder=tmp_path)
    model, report = quantized("awq", calibration=calibration)
    assert error(model(X), wanted) < 0.9 * error(quantized("mse", calibration=None)[0](X), wanted)
    statistics = Statistics.of(BATCHES[0], full=True) + Statistics.of(BATCHES[1], full=True)
    weight = floats.linear.kernel[...]
    factor = awq.factors([weight], [model.linear.format], statistics)
    np.testing.assert_allclose(model.linear.lhs_factor[...], factor, rtol=1e-6)
    rounded = quantize(
        weight * factor[:, None], FORMAT, quantizer="awq", statistics=statistics.divided(factor)
    )
    np.testing.assert_array_equal(model.linear.kernel.packed, rounded.packed)
    np.testing.assert_allclose(model.linear(X), X / factor[None] @ rounded, rtol=1e-5, atol=1e-5)
    effective = rounded.dequantize() / factor[:, None]
    assert report.layers[0].error == pytest.approx(error(effective, weight), rel=1e-4)
    assert report.layers[0].nbytes_after == rounded.nbytes + 4 * WIDTH

    again, _ = quantized("awq", calibration=calibration)  # reads all layers from the folder
    (tmp_path / "raw.npz").unlink()
    resumed, _ = quantized("awq", calibration=calibration)
    for other in (again, resumed):
        leaves = zip(*(jax.tree.leaves(nnx.state(x)) for x in (model, other)), strict=True)
        assert all(jnp.array_equal(*pair) for pair in leaves)


def test_smoothquant_with_8_bit_inputs():
    with nnx.use_eager_sharding(False):
        wanted = Model()(X)
    smooth, plain = (
        quantized(name, "int8", given, lhs_qtype=jnp.int8)[0]
        for name, given in (("smoothquant", BATCHES), ("absmax", None))
    )
    assert error(smooth(X), wanted) < 0.8 * error(plain(X), wanted)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_calibration_and_products_on_a_mesh(kind):
    alone, _ = quantized("awq", keep="raw", shards=(2, 1))
    mesh = make_mesh(getattr(jax.sharding.AxisType, kind))
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(Model())
    with jax.set_mesh(mesh):
        specs: Any = nnx.get_partition_spec(state)
        model: Any = nnx.merge(graph, jax.tree.map(lambda x, s: placed(mesh, x, s), state, specs))
        batches = [placed(mesh, x) for x in BATCHES]
        options = {"keep": "raw", "layers": [RAW], "shards": (2, 1), "calibration": batches}
        quantize_model(model, FORMAT, quantizer="awq", **options)
        packed: Any = nnx.get_partition_spec(nnx.state(model.linear))
        assert packed["lhs_factor"].get_value() == jax.P("a")
        assert model.linear.kernel.packed.sharding.spec == jax.P(None, "a", None)
        np.testing.assert_array_equal(model.linear.kernel.packed, alone.linear.kernel.packed)
        out = jax.P() if kind == "Explicit" else None
        run: Any = nnx.jit(lambda layer, x: layer(x, out))
        found = run(model.linear, batches[0])
    np.testing.assert_allclose(found, alone.linear(X), rtol=1e-5, atol=1e-5)


def placed(mesh, x, spec=None):
    return jax.device_put(x, jax.NamedSharding(mesh, spec or jax.P()))


class Linen(nn.Module):
    """A scanned stack, and a table that is looked up and multiplied."""

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(WIDTH, WIDTH, name="table")
        body = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": 0, "quantized": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, _ = body(nn.Dense(WIDTH, name="stack"), table(tokens) * SIZES[None, None], None)
        return table.attend(x)


def test_linen_stacks_and_tables_have_factors():
    tokens = jnp.arange(WIDTH).reshape(4, 16)
    module = Linen()
    variables = module.init(jax.random.key(0), tokens)
    options = {"quantizer": "smoothquant", "calibration": [tokens]}
    model, held, _ = quantize_linen(module, variables, {"": "int8"}, tokens, **options)
    factors = {name: x["lhs_factor"] for name, x in held["quantized"].items()}
    assert {name: x.shape for name, x in factors.items()} == {
        "stack": (2, WIDTH),
        "table": (WIDTH,),
    }
    assert all(jnp.std(x) > 0.05 for x in factors.values())
    assert error(model.apply(held, tokens), module.apply(variables, tokens)) < 0.02

    fresh = model.init(jax.random.key(1), tokens)
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, held)
    del fresh["quantized"]["table"]["lhs_factor"]
    with pytest.raises(errors.ScopeParamNotFoundError, match="table has no 'lhs_factor'"):
        model.apply(fresh, tokens)
