"""Quantizers by name and as functions, their statistics, and the functions that take them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxlowbit import INT4, INT8, Format, quantize
from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx
from jaxlowbit.quantizers import Groups, Statistics, _registry

K, N = 192, 80


def heavy(*shape, seed=0):
    """Weights with a few outliers, as in language models."""
    return jnp.asarray(np.random.default_rng(seed).standard_t(3, size=shape), jnp.float32)


def inputs(rows=256, seed=1):
    """Activations whose features differ in magnitude."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(rows, K)) * np.exp(rng.normal(size=K)), jnp.float32)


def narrow(weight, format, statistics, **options):
    """A user-defined quantizer."""
    groups = Groups.of(weight, format, **options)
    low, high = groups.extremes()
    return groups.pack(*groups.fit(0.9 * low, 0.9 * high))


def refuses(message):
    return pytest.raises((TypeError, ValueError), match=message)


def assert_equal(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert leaf.dtype == other.dtype
        np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize("format", ["int3-g64", "nf4", "mxfp4", "mxfp8", "nvfp4"])
def test_each_quantizer_is_better_than_the_one_before(format):
    """The error of the product decreases from absmax to mse to mse with input statistics."""
    weight, x = heavy(K, N), inputs()
    arrays = [quantize(weight, format, quantizer=name) for name in ("absmax", "mse")]
    arrays += [quantize(weight, format, quantizer="mse", statistics=Statistics.of(x))]
    errors = [float(jnp.linalg.norm(x @ (q.dequantize(jnp.float32) - weight))) for q in arrays]
    gain = 1 if format == "mxfp8" else 1.02  # mxfp8 has three ranges, powers of two
    assert errors[0] > errors[1] >= gain * errors[2]


@pytest.mark.parametrize("name", _registry.NAMES)
def test_a_module_is_a_quantizer(name):
    assert "absmax" in _registry.NAMES and "mse" in _registry.NAMES
    assert _registry.find("test", name, INT4, {"shards": (1, 1)}).__module__.endswith(f".{name}")


@pytest.mark.parametrize("quantizer", [*_registry.NAMES, narrow])
def test_stacks_are_their_matrices_under_jit_and_x64(quantizer):
    stack, statistics = heavy(2, K, N), Statistics.of(inputs(), full=True)
    with jax.enable_x64(True):
        run = jax.jit(lambda w, s: quantize(w, INT4, quantizer=quantizer, statistics=s))
        found = run(stack, statistics)
    for i, matrix in enumerate(stack):
        wanted = quantize(matrix, INT4, quantizer=quantizer, statistics=statistics)
        assert_equal(found[i], wanted)


@pytest.mark.parametrize("shards", [(1, 1), (2, 2)])
def test_statistics_follow_the_order_of_the_rows(shards):
    """Statistics (k,) and per matrix of a stack; padding of shards cuts some groups."""
    weight, statistics = heavy(2, K, N), Statistics.of(inputs())
    order = np.concatenate([np.random.default_rng(i).permutation(K // 2) for i in range(2)])
    rows = order + np.repeat([0, K // 2], K // 2)
    order = jnp.asarray(order if shards == (2, 2) else rows)
    options = {"quantizer": "mse", "shards": shards}
    format = Format(3, 64, "integer")
    found = quantize(weight, format, statistics=statistics, permutation=order, **options)
    moved = Statistics(statistics.second_moments[rows], statistics.absmax[rows], statistics.rows)
    moved = jax.tree.map(lambda x: jnp.stack([x, x]), moved)
    wanted = quantize(weight[:, rows], format, statistics=moved, **options)
    np.testing.assert_array_equal(found.dequantize()[:, rows], wanted.dequantize())


@pytest.mark.parametrize("full", [False, True])
def test_statistics_of_batches_add_up(full):
    x = np.asarray(inputs(), np.float64)
    first, second = (jnp.asarray(part, jnp.float32) for part in np.split(x, [100]))
    found = Statistics.of(first, full=full) + Statistics.of(second, full=full)
    moments = x.T @ x / len(x)
    wanted = moments if full else np.diag(moments)
    np.testing.assert_allclose(found.second_moments, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.mean_squares, np.diag(moments), rtol=1e-5)
    np.testing.assert_array_equal(found.absmax, np.abs(x).max(axis=0).astype(np.float32))
    assert found.rows == len(x)


def test_functions_get_the_options_that_are_given():
    seen = []

    def record(weight, format, statistics, **options):
        seen.append((weight.shape, format, statistics, {name: options[name] for name in options}))
        return narrow(weight, format, statistics, **options)

    weight = heavy(K, N)
    quantize(weight, INT8, quantizer=record)
    found = quantize(weight, INT4, quantizer=record, shards=(3, 1), scale_dtype=jnp.bfloat16)
    assert seen[0] == ((K, N), INT8, None, {})
    assert seen[1][3] == {"shards": (3, 1), "scale_dtype": jnp.bfloat16}
    assert found.shards == (3, 1) and found.scale.dtype == jnp.bfloat16


def test_memory_is_one_float_copy():
    weight = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16)
    run = jax.jit(quantize, static_argnames=("format", "quantizer"))
    memory = run.lower(weight, INT4, quantizer="absmax").compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes <= 1.1 * 4 * weight.size


WRONG = {
    "quantizer='nothing' is unknown; it is one of 'absmax', ": "nothing",
    "quantizer=4 is unknown": 4,
    "quantizer=<class 'float'> is unknown": float,
    r"cannot be called with \(weight, format, statistics\): too many": lambda weight: weight,
    "the result of the quantizer is 3, but it must be a QuantizedArray": lambda *_: 3,
    r"returns a matrix with shape=\(80, 192\), but \(192, 80\)": (
        lambda weight, format, _: quantize(weight.T, format)
    ),
    "returns a matrix with format=.*bits=8.* was requested": (
        lambda weight, *_: quantize(weight, INT8)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_quantizers(message):
    with refuses(f"quantize: .*{message}"):
        quantize(heavy(K, N), INT4, quantizer=WRONG[message])


def test_wrong_options_and_statistics():
    weight, statistics = heavy(K, N), Statistics.of(inputs()[:, :8])
    with refuses(r"statistics, shards=\): got an unexpected keyword argument 'shards'"):
        quantize(weight, INT4, quantizer=lambda w, f, _: quantize(w, f), shards=(3, 1))
    with refuses("the quantizer 'mse' does not support this format: a 1-bit code without a zero"):
        quantize(weight, Format(1), quantizer="mse")
    with refuses(r"statistics has \(8,\) input features, but .* takes \(192,\)"):
        quantize(weight, INT4, statistics=statistics)
    with refuses("statistics is 3, but it must be a Statistics"):
        quantize(weight, INT4, statistics=3)  # pyright: ignore[reportArgumentType]
    with refuses("Statistics.of: inputs is int32"):
        Statistics.of(jnp.ones((2, 3), jnp.int32))


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(K)(nn.Dense(N)(x))


def test_models_of_flax_accept_functions():
    x = inputs(2)
    model = nnx.List([nnx.Linear(K, N, rngs=nnx.Rngs(0))])
    variables = Pair().init(jax.random.key(0), x)
    kernels = model[0].kernel[...], variables["params"]["Dense_1"]["kernel"]
    jl_nnx.quantize_model(model, INT4, quantizer=narrow)
    held = jl_linen.quantize_model(Pair(), variables, INT4, x, quantizer=narrow)[1]
    found = model[0].kernel, held["quantized"]["Dense_1"]
    for weight, layer in zip(kernels, found, strict=True):
        wanted = quantize(weight, INT4, quantizer=narrow)
        scale = layer["scale"] if isinstance(layer, dict) else layer.scale
        np.testing.assert_array_equal(scale, wanted.scale)
        assert not jnp.array_equal(scale, quantize(weight, INT4).scale)


def test_models_of_flax_are_untouched_by_wrong_ones():
    model = nnx.List([nnx.Linear(K, N, rngs=nnx.Rngs(0)), nnx.Linear(K, N, rngs=nnx.Rngs(0))])
    with refuses("quantize_model: quantizer='nothing' is unknown"):
        jl_nnx.quantize_model(model, INT4, quantizer="nothing")

    def picky(weight, format, statistics, **options):
        raise ValueError("picky takes no int4; choose int8.")

    with refuses("(?s)quantize_model: .*in 0: picky takes no int4.*in 1: picky"):
        jl_nnx.quantize_model(model, INT4, quantizer=picky)
    assert all(type(layer) is nnx.Linear for layer in model)
