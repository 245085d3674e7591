"""Failed quantization leaves models unchanged and reports all reasons."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxlowbit import INT4, Format
from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx
from jaxlowbit._flax.weights import has_scales
from jaxlowbit.nnx import QuantizedLinear

WIDTH = 64
KEY = jax.random.key(0)
X = jnp.ones((2, WIDTH))


def infinite(kernel):
    return kernel.at[3, 4].set(jnp.inf)


def integers(kernel):
    return kernel.astype(jnp.int32)


def wide(kernel):
    """Finite weights with groups whose range exceeds float16."""
    return kernel.astype(jnp.float16).at[0, 0].set(6e4).at[1, 0].set(-6e4)


# Change of a middle layer's weights, rules, shards, and the expected reason.
UNUSABLE: Any = {
    "values": (infinite, INT4, (1, 1), r"values that are NaN or infinite, the first at \(3, 4\)"),
    "dtype": (integers, INT4, (1, 1), r"weight is int32, but it must be float32"),
    "scales": (
        wide,
        Format(1, 32, "float"),
        (1, 1),
        "span a range larger than that of float16 scales",
    ),
    "format": (None, {"1": Format(1), "": INT4}, (1, 1), "a 1-bit code without a zero"),
    "shards": (None, INT4, {"1": (7, 1)}, r"cuts k=64 into 7 parts"),
}


def nnx_model(change: Any = None) -> Any:
    model = nnx.Sequential(*[nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(3)])
    if change is not None:
        layer: Any = model.layers[1]
        layer.kernel.set_value(change(layer.kernel.get_value()))
    return model


def linen_model(change: Any = None) -> tuple[Any, Any]:
    module = nn.Sequential([nn.Dense(WIDTH) for _ in range(3)])
    variables = module.init(KEY, X)
    if change is not None:
        layer = variables["params"]["layers_1"]
        layer["kernel"] = change(layer["kernel"])
    return module, variables


@pytest.mark.parametrize("name", UNUSABLE)
def test_nnx_models_stay_as_they_are(name):
    change, rules, shards, reason = UNUSABLE[name]
    model = nnx_model(change)
    before = [layer.kernel for layer in model.layers]
    with pytest.raises(ValueError, match=rf"^quantize_model: in layers\.1: .*{reason}"):
        jl_nnx.quantize_model(model, rules, shards=shards)
    assert all(type(layer) is nnx.Linear for layer in model.layers)
    assert all(layer.kernel is kernel for layer, kernel in zip(model.layers, before, strict=True))


@pytest.mark.parametrize("name", UNUSABLE)
def test_linen_variables_stay_as_they_are(name):
    change, rules, shards, reason = UNUSABLE[name]
    module, variables = linen_model(change)
    before = jax.tree.map(np.asarray, variables)
    options: Any = {"shards": shards, "donate": True}
    message = rf"^quantize_model: in layers_1: .*{reason}"
    with jax.numpy_dtype_promotion("standard"), pytest.raises(ValueError, match=message):
        jl_linen.quantize_model(module, variables, rules, X, **options)
    jax.tree.map(np.testing.assert_array_equal, variables, before)


def test_all_reasons_are_given_at_once():
    message = (
        r"2 layers cannot be quantized, and none was: .*\n"
        r"- .*layers.0'?:? .*has precision='highest'.*\n"
        r"- in layers.1: weight has 1 values that are NaN"
    )
    model: Any = nnx_model(infinite)
    model.layers[0].precision = "highest"
    with pytest.raises(ValueError, match=message):
        jl_nnx.quantize_model(model, INT4)
    module, variables = linen_model(infinite)
    module.layers[0].precision = "highest"
    with pytest.raises(ValueError, match=message):
        jl_linen.quantize_model(module, variables, INT4, X)


def test_long_lists_are_cut():
    layers = [nnx.Linear(WIDTH, WIDTH, precision="high", rngs=nnx.Rngs(0)) for _ in range(11)]
    with pytest.raises(
        ValueError,
        match=r"11 layers cannot .*(\n- in layers.*){8}\n- and 3 more: layers\.8, lay.*10$",
    ):
        jl_nnx.quantize_model(nnx.Sequential(*layers), INT4)


def test_values_at_the_ends_of_a_dtype_do_not_raise():
    def large(kernel):
        return kernel.astype(jnp.float16).at[0, 0].set(65504).at[1, 0].set(-65504)

    model = nnx_model(large)
    jl_nnx.quantize_model(model, INT4)
    assert all(isinstance(layer, QuantizedLinear) for layer in model.layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_only_weights_that_scales_certainly_represent_skip_the_full_check(dtype):
    ordinary = jax.random.normal(KEY, (4, 8)).at[0].set(0).astype(dtype)
    assert has_scales(ordinary)
    least, largest = float(jnp.finfo(dtype).tiny), float(jnp.finfo(dtype).max)
    for values in ([jnp.nan, 1], [jnp.inf, 1], [-jnp.inf, 1], [-largest, largest], [4 * least, 1]):
        expected = dtype == "float16" and values[0] == 4 * least
        assert has_scales(ordinary.at[1, :2].set(jnp.array(values, dtype))) == expected


# --- NNX modules that update weights of other modules --------------------------------------------


class Wrapped(nnx.Module):
    def __init__(self, wrapper: Any):
        self.plain = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        inner = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1)))
        self.wrapped = wrapper(inner, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.wrapped(self.plain(x))


@pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
def test_nnx_layers_with_rewritten_weights_raise_unless_kept_in_floats(wrapper):
    model, float_model = Wrapped(wrapper), Wrapped(wrapper)
    path = r"wrapped\.layer_instance\.layers\.0"
    message = rf"{path} is inside nnx\.{wrapper.__name__}, which computes its kernel anew in each c"
    with pytest.raises(ValueError, match=message):
        jl_nnx.quantize_model(model, INT4)
    assert type(model.plain) is nnx.Linear
    jl_nnx.quantize_model(model, {"wrapped": None, "": INT4})
    assert isinstance(model.plain, QuantizedLinear)
    float_model.plain.kernel.set_value(model.plain.kernel.dequantize())
    np.testing.assert_allclose(model(X), float_model(X), atol=1e-4)


def test_a_layer_inside_and_outside_a_wrapper_raises():
    model = Wrapped(nnx.WeightNorm)
    model.plain = model.wrapped.layer_instance.layers[0]
    with pytest.raises(ValueError, match=r"plain is inside nnx\.WeightNorm"):
        jl_nnx.quantize_model(model, {"plain": INT4})
