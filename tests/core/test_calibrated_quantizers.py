"""GPTQ against a plain loop, and the errors and factors of quantizers that read statistics."""

import functools
import json
from pathlib import Path

import gptq_problems
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowbit import Format, quantize
from jaxlowbit._core import layout
from jaxlowbit.quantizers import Statistics, awq, distill, gptq, smoothing_factor, smoothquant

K, N = 96, 24


def problem(seed=0):
    """A weight and correlated inputs, whose features differ in size."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(400, 8)) @ rng.normal(size=(8, K)) / 2 + rng.normal(size=(400, K))
    inputs = (mixed * np.exp(0.7 * rng.normal(size=K))).astype(np.float32)
    return rng.standard_t(4, size=(K, N)).astype(np.float32), inputs


def error(weight, array, inputs):
    return np.linalg.norm(inputs @ (np.asarray(array.dequantize(jnp.float32)) - weight))


def plain_gptq(weight, inputs, scale, zero, levels, group, damping=0.01):
    """The algorithm of the paper, row by row in float64, rows with the largest inputs first."""
    values, moments = weight.astype(np.float64), inputs.T.astype(np.float64) @ inputs / len(inputs)
    moments += damping * np.diag(moments).mean() * np.eye(K)
    order = np.argsort(-np.diag(moments), kind="stable")
    inverse = np.linalg.inv(moments[np.ix_(order, order)])
    found = np.zeros_like(values)
    for place, row in enumerate(order):
        s, z = scale[row // group].astype(np.float64), zero[row // group].astype(np.float64)
        steps = np.clip(np.round(values[row] / s), -z, levels - z)
        found[row] = steps * s
        missed = (values[row] - found[row]) / inverse[place, place]
        later = order[place + 1 :]
        values[later] -= inverse[place + 1 :, place][:, None] * missed
        column = inverse[:, place : place + 1]
        inverse = inverse - column @ column.T / inverse[place, place]
    return found


@pytest.mark.parametrize("zero", ["none", "integer"])
def test_gptq_is_the_plain_loop(zero):
    weight, inputs = problem()
    format = Format(3, 32, zero)
    statistics = Statistics.of(inputs, full=True)
    quantizer = functools.partial(gptq.quantize, clip=False)
    array = quantize(weight, format, quantizer=quantizer, statistics=statistics)
    plain = quantize(weight, format, quantizer="absmax")  # the same scales and zeros
    scale = np.asarray(plain_scale(plain))
    zeros = np.full_like(scale, 4) if zero == "none" else plain_zero(weight, scale)
    wanted = plain_gptq(weight, inputs, scale, zeros, 7, 32)
    found = np.asarray(array.dequantize(jnp.float32))
    same = np.isclose(found, wanted, atol=1e-4)
    assert same.mean() > 0.97  # a tie may go the other way, and change the rows after it
    assert abs(error(weight, array, inputs) - np.linalg.norm(inputs @ (wanted - weight))) < 0.02 * (
        error(weight, plain, inputs)
    )


@pytest.mark.parametrize("name", gptq_problems.FORMATS)
def test_gptq_is_better_than_llm_compressor(name):
    """On the same moments; with the ranges of llm-compressor the errors are equal."""
    found = json.loads((Path(__file__).parents[1] / "data/gptq.json").read_text())
    k, n = gptq_problems.SIZE
    weight, moments = gptq_problems.problem(k, n)
    statistics = Statistics(jnp.asarray(moments), jnp.ones(k), jnp.int32(4 * k))

    def relative(quantizer):
        array = quantize(weight, name, quantizer=quantizer, statistics=statistics)
        rounded = np.asarray(array.dequantize(jnp.float32))
        return gptq_problems.output_error(weight, rounded, moments) / found["errors"][name]

    assert relative("gptq") < 0.95
    if name.endswith("integer"):  # symmetric ranges of llm-compressor are half a step wider
        exact = functools.partial(gptq.quantize, clip=False)
        assert relative(exact) == pytest.approx(1, abs=0.005)


def plain_scale(array):
    """The scales (groups, n) of a matrix."""
    groups = -(-K // array.format.group_size)
    return layout.unpack_groups(array.scale)[:groups, :N]


def plain_zero(weight, scale):
    low = np.minimum(weight.reshape(-1, 32, N).min(axis=1), 0)
    return np.clip(np.round(-low / scale), 0, 7)


@pytest.mark.parametrize("format", ["uint4", "mxfp4", "nvfp4", "int3-g32-float-two_level"])
def test_gptq_is_better_than_rounding(format):
    weight, inputs = problem()
    statistics = Statistics.of(inputs, full=True)
    errors = [
        error(weight, quantize(weight, format, quantizer=name, statistics=statistics), inputs)
        for name in ("mse", "gptq")
    ]
    assert errors[1] < 0.75 * errors[0]


def test_shards_and_permutations_move_the_moments():
    weight, inputs = problem()
    statistics = Statistics.of(inputs, full=True)
    order = np.random.default_rng(1).permutation(K)
    found = quantize(weight, "int3-g32", quantizer="gptq", statistics=statistics, permutation=order)
    moved = Statistics.of(inputs[:, order], full=True)
    wanted = quantize(weight[order], "int3-g32", quantizer="gptq", statistics=moved)
    np.testing.assert_array_equal(found.dequantize()[order], wanted.dequantize())
    parts = quantize(weight, "int3-g32", quantizer="gptq", statistics=statistics, shards=(3, 1))
    assert error(weight, parts, inputs) < 1.1 * error(weight, found, inputs)


def test_factors_keep_products_and_lower_errors():
    weight, inputs = problem()
    statistics = Statistics.of(inputs, full=True)
    factor = np.asarray(awq.factors([jnp.asarray(weight)], [Format(3, 32)], statistics))
    assert factor.shape == (K,) and (factor > 0).all()
    options = {"format": Format(3, 32), "quantizer": "absmax"}
    scaled = quantize(weight * factor[:, None], **options)
    errors = [
        error(weight * f[:, None], array, inputs / f)
        for f, array in ((factor, scaled), (np.ones_like(factor), quantize(weight, **options)))
    ]
    assert errors[0] < 0.95 * errors[1]
    found = smoothquant.factors(
        [*map(jnp.asarray, (weight[:, :10], weight[:, 10:]))], [], statistics
    )
    np.testing.assert_allclose(found, smoothing_factor(statistics.absmax, weight), rtol=1e-6)


def test_hqq_is_better_than_absmax_without_data():
    weight, _ = problem()
    for format in ("int3-g32-float", "uint4", "int3-g32"):
        norms = [
            np.abs(np.asarray(quantize(weight, format, quantizer=x).dequantize()) - weight).mean()
            for x in ("hqq", "absmax")
        ]
        assert norms[0] < 0.99 * norms[1]


def test_learned_scales_lower_the_error_of_gptq():
    weight, inputs = problem()
    options = {"format": "int2-g32-float", "statistics": Statistics.of(inputs, full=True)}
    arrays = [quantize(weight, quantizer=name, **options) for name in ("gptq", "distill")]
    errors = [error(weight, array, inputs) for array in arrays]
    assert errors[1] < 0.997 * errors[0]
    first, last = (layout.unpack(array.packed, 2)[:K, :N] for array in arrays)
    np.testing.assert_array_equal(first, last)
    again = quantize(weight, quantizer="distill", **options)
    np.testing.assert_array_equal(again.scale, arrays[1].scale)


def test_learned_words_of_8_bit_scales():
    """Steps that increase the error are dropped."""
    weight, inputs = problem()
    options = {"format": "mxfp4", "statistics": Statistics.of(inputs, full=True)}
    wanted = error(weight, quantize(weight, quantizer="gptq", **options), inputs)
    for rate in (1e-3, 1.0):
        learned = functools.partial(distill.quantize, rounding_rate=rate, steps=20)
        found = error(weight, quantize(weight, quantizer=learned, **options), inputs)
        assert found <= wanted * (1 + 1e-6)
    with pytest.raises(ValueError, match=r"'distill' does not support .* e8m0 scales, which are"):
        quantize(weight, quantizer="distill", **options)


def test_gptq_without_moments():
    weight, inputs = problem()
    with pytest.raises(ValueError, match=r"gptq' needs full second moments .* have none"):
        quantize(weight, "int4", quantizer="gptq")
    with pytest.raises(ValueError, match="have their diagonal; pass calibration="):
        quantize(weight, "int4", quantizer="gptq", statistics=Statistics.of(inputs))
