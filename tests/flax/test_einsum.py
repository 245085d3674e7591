"""Quantized einsum layers: supported equations, and results of the fake-quantized twin."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from helpers import dequantized

from jaxlowbit import INT4, Format
from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx
from jaxlowbit._flax.equation import Equation

FORMAT = Format(bits=4, group_size=32, zero="integer")
KEY = jax.random.key(0)


def bias_init(key, shape, dtype):
    return random(*shape, dtype=dtype, seed=3)


# The shapes of the inputs, the kernel, its bias and the packed matrix.
EQUATIONS: dict[str, tuple[Any, ...]] = {
    "btd,dnh->btnh": ((2, 3, 96), (96, 4, 20), (4, 20), (96, 80)),
    "btnh,nhd->btd": ((2, 3, 4, 24), (4, 24, 80), (80,), (96, 80)),
    "...d,df->...f": ((2, 1, 3, 96), (96, 80), (80,), (96, 80)),
    "bti,eio->bteo": ((2, 3, 96), (4, 96, 20), (4, 20), (96, 80)),
    "bte,fe->btf": ((2, 3, 96), (80, 96), (80,), (96, 80)),
    "bei,eio->beo": ((5, 3, 96), (3, 96, 80), (3, 80), (3, 96, 80)),
    "bi...e,oei->b...eo": ((5, 96, 2, 3), (80, 3, 96), (3, 80), (3, 96, 80)),
    "abik,kjbi->kbaj": ((7, 2, 96, 3), (3, 80, 2, 96), (3, 2, 80), (3, 2, 96, 80)),
    "tnh,ndh->tnd": ((7, 3, 96), (3, 80, 96), (3, 80), (3, 96, 80)),
    "bd,d->b": ((5, 96), (96,), (), (96, 1)),
    "d,df->f": ((96,), (96, 80), (80,), (96, 80)),
}


def random(*shape, dtype="float32", seed=0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values, jnp.dtype(dtype))


def normal(key, shape, dtype):
    return random(*shape, dtype=dtype, seed=2) / 10


def nnx_einsum(equation, **options) -> nnx.Einsum:
    _, kernel, bias, _ = EQUATIONS[equation]
    options = {"bias_init": bias_init, "kernel_init": normal, **options}
    return nnx.Einsum(equation, kernel, bias, rngs=nnx.Rngs(1), **options)


def quantized(equation, **options):
    return jl_nnx.QuantizedEinsum.from_einsum(nnx_einsum(equation, **options), FORMAT)


def float_kernel(equation, matrix):
    """Reshapes a matrix (*batch, k, n) to the kernel of the equation, by its letters."""
    inputs, kernel = equation.split("->")[0].split(",")
    out = equation.split("->")[1]
    groups = ("".join(x for x in kernel if x in inputs and x in out),)
    groups += ("".join(x for x in kernel if x not in out),)
    groups += ("".join(x for x in kernel if x not in inputs),)
    letters = "".join(groups)
    sizes = dict(zip(kernel, EQUATIONS[equation][1], strict=True))
    matrix = matrix.reshape([sizes[x] for x in letters])
    return jnp.einsum(f"{letters}->{kernel}", matrix)


# --- the product ---------------------------------------------------------------------------------


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.slow
def test_nnx_layer_is_its_fake_quantized_twin(equation):
    source, x = nnx_einsum(equation), random(*EQUATIONS[equation][0])
    layer = jl_nnx.QuantizedEinsum.from_einsum(source, FORMAT)
    before = source(x)
    assert layer.bias is source.bias
    assert layer.kernel.shape == EQUATIONS[equation][3]
    rounded = float_kernel(equation, dequantized(layer.kernel))
    assert jnp.abs(rounded - source.kernel[...]).max() < 0.04  # half the scale of the widest group
    source.kernel.set_value(rounded)
    got = nnx.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(got, source(x), atol=1e-5)
    assert jnp.abs(got - before).max() > 1e-3  # quantization changes the result


@pytest.mark.parametrize("equation", EQUATIONS)
def test_linen_layer_is_its_fake_quantized_twin(equation):
    shape, kernel, bias, _ = EQUATIONS[equation]
    x = random(*shape)
    options: Any = {"bias_init": bias_init, "kernel_init": normal}
    floats: Any = nn.Einsum(kernel, equation, **options)
    layer: Any = jl_linen.QuantizedEinsum(kernel, equation, FORMAT, **options)
    params, variables = floats.init(KEY, x)["params"], layer.init(KEY, x)
    assert set(variables["params"]) == {"bias"} and params["bias"].shape == bias
    np.testing.assert_array_equal(variables["params"]["bias"], params["bias"])
    same = nnx_einsum(equation)
    same.kernel.set_value(params["kernel"])
    same = jl_nnx.QuantizedEinsum.from_einsum(same, FORMAT)
    np.testing.assert_array_equal(variables["quantized"]["packed"], same.kernel.packed)
    params["kernel"] = float_kernel(equation, dequantized(same.kernel))
    got = jax.jit(layer.apply)(variables, x)
    np.testing.assert_allclose(got, floats.apply({"params": params}, x), atol=1e-5)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_dtypes_match_the_float_layer(dtype, preferred):
    equation = "btd,dnh->btnh"
    options: Any = {"dtype": dtype, "param_dtype": jnp.bfloat16}
    options["preferred_element_type"] = preferred
    x = random(*EQUATIONS[equation][0], dtype="bfloat16")
    with jax.numpy_dtype_promotion("standard"):
        assert quantized(equation, **options)(x).dtype == nnx_einsum(equation, **options)(x).dtype


def test_gradient_of_the_inputs():
    equation = "abik,kjbi->kbaj"
    layer, source = quantized(equation), nnx_einsum(equation)
    source.kernel.set_value(float_kernel(equation, dequantized(layer.kernel)))
    x = random(*EQUATIONS[equation][0])
    got = jax.jit(jax.grad(lambda x: jnp.sum(layer(x) ** 2)))(x)
    twin = jax.grad(lambda x: jnp.sum(source(x) ** 2))(x)
    np.testing.assert_allclose(got, twin, rtol=1e-4, atol=1e-3)


def test_initialised_abstract_and_restored(tmp_path):
    equation = "btnh,nhd->btd"
    x, kernel, bias, _ = EQUATIONS[equation]
    layer = jl_nnx.QuantizedEinsum(
        "btnh, nhd -> btd",
        kernel,
        bias,
        format=FORMAT,
        kernel_init=normal,
        bias_init=bias_init,
        rngs=nnx.Rngs(1),
    )
    source = quantized(equation)
    assert nnx.graphdef(layer) == nnx.graphdef(source)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), nnx.state(source))
    restored = nnx.eval_shape(lambda: nnx_einsum(equation))
    restored = jl_nnx.QuantizedEinsum.from_einsum(restored, FORMAT)
    assert nnx.graphdef(restored) == nnx.graphdef(layer)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", nnx.state(layer))
        checkpointer.wait_until_finished()
        nnx.update(restored, checkpointer.restore(tmp_path / "layer", nnx.state(restored)))
    merged = nnx.merge(*nnx.split(restored))
    np.testing.assert_array_equal(merged(random(*x)), layer(random(*x)))


def test_the_equation_of_a_call_names_other_axes_only():
    layer, x = quantized("btd,dnh->btnh"), random(3, 96)
    expected = layer(x[None])[0]
    np.testing.assert_allclose(layer(x, "td,dnh->tnh"), expected, atol=1e-6)
    np.testing.assert_allclose(layer(x, "td,dnh->nth"), expected.swapaxes(0, 1), atol=1e-6)
    with pytest.raises(ValueError, match=r"packed for the equation 'btd,dnh->btnh', and 'btn,dnh"):
        layer(random(2, 3, 4), "btn,dnh->btdh")


# --- models --------------------------------------------------------------------------------------


def test_nnx_models_quantize_einsum_layers():
    equation = "btd,dnh->btnh"
    model: Any = nnx.Dict(query=nnx_einsum(equation))
    report = jl_nnx.quantize_model(model, FORMAT)
    assert isinstance(model.query, jl_nnx.QuantizedEinsum)
    (layer,) = report.layers
    assert layer.shape == (96, 4, 20) and layer.error is not None and 0.01 < layer.error < 0.2
    x = random(2, 3, 96)
    np.testing.assert_array_equal(model.query(x), quantized(equation)(x))

    @nnx.vmap
    def create(key):
        return nnx.Einsum("bd,fd->bf", (80, 96), kernel_init=normal, rngs=nnx.Rngs(key))

    stack = nnx.Dict(up=create(jax.random.split(KEY, 3)))
    kernel = stack.up.kernel[...]
    (layer,) = jl_nnx.quantize_model(stack, FORMAT).layers
    assert layer.error is not None and layer.error < 0.2
    change = stack.up.kernel.dequantize().swapaxes(1, 2) - kernel
    assert jnp.linalg.norm(change) / jnp.linalg.norm(kernel) == pytest.approx(layer.error, rel=1e-4)


class Model(nn.Module):
    equation: str | None = "bd,fd->bf"

    @nn.compact
    def __call__(self, x, _=None):
        layer = nn.Einsum(
            (96, 96), self.equation, kernel_init=normal, bias_init=bias_init, name="up"
        )
        return (layer(x) if self.equation else layer(x, "bd,fd->bf")), None


@pytest.mark.parametrize("scanned", [False, True])
def test_linen_models_quantize_einsum_layers(scanned):
    axes: Any = {"params": 0, "quantized": 0}
    scan = nn.scan(Model, variable_axes=axes, split_rngs={"params": True}, length=2)
    module, x = scan() if scanned else Model(), random(5, 96)
    floats = module.init(KEY, x, None)
    model, variables, report = jl_linen.quantize_model(module, floats, FORMAT, x, None)
    (layer,) = report.layers
    assert layer.format == FORMAT and layer.error is not None and 0.01 < layer.error < 0.2
    got = jax.jit(model.apply)(variables, x, None)[0]
    floats: Any = floats["params"]["up"]
    layers = [jax.tree.map(lambda a, i=i: a[i], floats) for i in range(2)] if scanned else [floats]
    for params in layers:
        single = nnx.Einsum("bd,fd->bf", (96, 96), (96,), rngs=nnx.Rngs(0))
        single.kernel.set_value(params["kernel"])
        assert single.bias is not None
        single.bias.set_value(params["bias"])
        x = jl_nnx.QuantizedEinsum.from_einsum(single, FORMAT)(x)
    np.testing.assert_allclose(got, x, atol=1e-4)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("equation", "shape", "message"),
    [
        ("bd,df", (4, 4), r"'bd,df' is not of the form 'inputs,kernel->out', in letters"),
        ("bd,df,fg->bg", (4, 4), "is not of the form"),
        ("bd,...df->b...f", (4, 4), "is not of the form"),
        ("bb,bf->bf", (4, 4), "repeats a letter within 'bb', so that it is no product"),
        ("bd,df->bf", (4, 4, 4), r"has 2 letters for a kernel of shape \(4, 4, 4\)"),
        ("bd,df->bfz", (4, 4), "has 'z' only in the result"),
        ("bd,df->...bf", (4, 4), r"has '\.\.\.' only in the result"),
        ("bd,dfg->bf", (4, 4, 4), "sums 'g' of the kernel, which the inputs lack"),
        ("btd,df->bf", (4, 4), "sums 't' of the inputs, which the kernel lacks"),
        ("...bd,df->bf", (4, 4), r"sums '\.\.\.' of the inputs, which the kernel lacks"),
        ("bd,f->bdf", (4,), "sums over no letter of both"),
        ("bd,df->bdf", (4, 4), "sums over no letter of both, .* keep such a layer in floats"),
    ],
)
def test_equations_other_than_products_raise(equation, shape, message):
    with pytest.raises(ValueError, match=message):
        Equation.parse(equation, shape)
    with pytest.raises(ValueError, match=message):
        jl_nnx.QuantizedEinsum(equation, shape, format=INT4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        layer: Any = jl_linen.QuantizedEinsum(shape, equation, INT4)
        layer.init(KEY, random(2, 4))


def test_models_with_other_equations_raise():
    layer = nnx.Einsum("bd,df->bdf", (64, 64), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"in up: The equation .* Or keep the layer, with a rule"):
        jl_nnx.quantize_model(nnx.Dict(up=layer), INT4)
    x = random(5, 96)
    for module, message in (
        (Model(None), r"in up: The layer is given its equation in each call, .* Or keep"),
        (Model("bd,df->bdf"), r"in up: The equation 'bd,df->bdf' sums over no letter"),
    ):
        floats = module.init(KEY, x)
        with pytest.raises(ValueError, match=message):
            jl_linen.quantize_model(module, floats, INT4, x)


def test_wrong_inputs_and_layers_raise():
    layer = quantized("btd,dnh->btnh")
    with pytest.raises(ValueError, match=r"have shape \(3, 96\), but the equation names .* 'btd'"):
        layer(random(3, 96))
    with pytest.raises(ValueError, match=r"is \(95,\) along the contracted axes \(2,\), but"):
        layer(random(2, 3, 95))
    with pytest.raises(TypeError, match=r"the layer is Linear, but an nnx.Einsum is needed"):
        linear: Any = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        jl_nnx.QuantizedEinsum.from_einsum(linear, INT4)
    with pytest.raises(ValueError, match="the layer has precision='highest'"):
        quantized("btd,dnh->btnh", precision="highest")
