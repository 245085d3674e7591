"""Calibration of NNX and Linen models: order, stacks, foreign parameters, errors and resuming."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxlowbit import quantize
from jaxlowbit.linen import quantize_model as quantize_linen
from jaxlowbit.nnx import EinsumParameter, quantize_model
from jaxlowbit.quantizers import Calibration, Statistics

WIDTH, FORMAT = 64, "int3-g32"
RNG = np.random.default_rng(0)
BATCHES = [
    jnp.asarray(RNG.normal(size=(48, WIDTH)) * np.exp(RNG.normal(size=WIDTH)), jnp.float32)
    for _ in range(2)
]


class Model(nnx.Module):
    """A layer, one called through a jitted function, and a parameter that code multiplies by."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.raw = nnx.Param(jax.random.normal(rngs(), (WIDTH, WIDTH)) / 8)

    def __call__(self, x):
        x = nnx.relu(nnx.jit(lambda layer, x: layer(x))(self.first, x))
        return self.last(x @ self.raw[...])


RAW = EinsumParameter("raw", "...k,kn->...n")


def kernels(model):
    return {name: getattr(model, name).kernel.dequantize() for name in ("first", "raw", "last")}


def test_nnx_layers_see_quantized_layers_before_them(tmp_path):
    float_model, model, other = Model(), Model(), Model()
    options = {"quantizer": "gptq", "layers": [RAW]}
    calibration = Calibration(BATCHES, folder=tmp_path)
    report = quantize_model(model, FORMAT, calibration=calibration, **options)
    assert len([x for x in report.layers if x.format]) == 3
    # The first layer reads the inputs of the model, the parameter the quantized outputs.
    statistics = sum_of(BATCHES)
    wanted = quantize(
        float_model.first.kernel[...], FORMAT, quantizer="gptq", statistics=statistics
    )
    np.testing.assert_array_equal(model.first.kernel.dequantize(), wanted.dequantize())
    hidden = [nnx.relu(model.first(x)) for x in BATCHES]
    wanted = quantize(
        float_model.raw[...], FORMAT, quantizer="gptq", statistics=sum_of(hidden)
    ).dequantize()
    np.testing.assert_allclose(model.raw.kernel.dequantize(), wanted, atol=1e-5)

    # A run that was interrupted before the last layer gives the same words.
    (tmp_path / "last.npz").unlink()
    quantize_model(other, FORMAT, calibration=calibration, **options)
    for found, again in zip(kernels(model).values(), kernels(other).values(), strict=True):
        np.testing.assert_array_equal(found, again)
    with pytest.raises(ValueError, match=r"has results of another calibration .layers differ"):
        quantize_model(Model(), "int4-g32", calibration=calibration, **options)


def sum_of(inputs):
    first, second = (Statistics.of(x, full=True) for x in inputs)
    return first + second


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            lambda layer, x, _: (nn.tanh(layer(x)), None),
            variable_axes={"params": 0, "quantized": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, _ = body(nn.Dense(WIDTH, name="stack"), x, None)
        return nn.Dense(WIDTH, name="last")(x)


def test_linen_stacks_have_statistics_of_each_matrix():
    variables = Scanned().init(jax.random.key(0), BATCHES[0])
    model, held, _ = quantize_linen(
        Scanned(), variables, FORMAT, BATCHES[0], quantizer="gptq", calibration=BATCHES
    )
    plain = quantize_linen(Scanned(), variables, FORMAT, BATCHES[0])
    errors = [
        jnp.linalg.norm(found.apply(given, BATCHES[0]) - Scanned().apply(variables, BATCHES[0]))
        for found, given in ((model, held), plain[:2])
    ]
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantizer": "gptq"}, "needs statistics of the inputs of each layer; pass calibration="),
        ({"quantizer": "hqq", "calibration": BATCHES}, "'hqq' reads no statistics"),
        ({"quantizer": "awq"}, "'awq' needs statistics of the inputs of each layer"),
        ({"quantizer": "gptq", "calibration": []}, "the calibration has no batch"),
        ({"quantizer": "gptq", "calibration": 3}, "calibration is 3, but it must be an iterable"),
    ],
)
def test_wrong_calibrations(options, message):
    with pytest.raises((TypeError, ValueError), match=f"quantize_model: .*{message}"):
        quantize_model(Model(), FORMAT, keep="raw", **options)
