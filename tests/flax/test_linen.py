"""`jaxlowbit.linen`: layers match `nn.Dense`, and models match fake quantization."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import traverse_util
from helpers import dequantized

from jaxlowbit import INT4, INT8, Format, QuantizedArray, quantize
from jaxlowbit.linen import QuantizedDense, quantize_model

K, N, VOCABULARY = 64, 80, 96
FORMAT = Format(bits=4, group_size=32, zero="integer")
KEY = jax.random.key(0)
TOKENS = jnp.arange(2 * 7).reshape(2, 7) * 5 % VOCABULARY


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.RMSNorm(name="norm")(x)
        q, k, v = jnp.split(nn.Dense(3 * K, use_bias=False, name="qkv")(h), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:-1], 2, -1) for a in (q, k, v))
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + nn.Dense(K, name="out_proj")(h)
        h = jax.nn.gelu(nn.Dense(2 * K, name="up")(x))
        return x + nn.Dense(K, name="down")(h), None


class Transformer(nn.Module):
    """Two blocks, called in sequence or by scan; `repeat` applies each several times."""

    lifted: tuple[str, ...] = ()
    repeat: int = 1

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, K, name="embed")(tokens)
        if self.lifted:
            axes: Any = dict.fromkeys(self.lifted, 0)
            scan = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=2)
            x, _ = scan(name="blocks")(x, None)
        else:
            blocks = [nn.remat(Block)(name=f"block_{i}") for i in range(2)]
            for block in blocks * self.repeat:
                x, _ = block(x)
        return nn.Dense(VOCABULARY, name="head")(x)


MODELS = {
    "tied": Transformer(repeat=2),
    "scanned": Transformer(lifted=("params", "quantized")),
}


@functools.cache
def _initialised(module):
    """Variables as Flax makes them, without running its initializer."""
    rng = np.random.default_rng(0)

    def leaf(path: Any, of: Any) -> jax.Array:
        if path[-1].key in ("kernel", "embedding"):
            return jnp.asarray(rng.standard_normal(of.shape, np.float32) / 8)
        return jnp.full(of.shape, float(path[-1].key == "scale"))

    return jax.tree.map_with_path(leaf, jax.eval_shape(module.init, KEY, TOKENS))


def initialised(module):
    """Variables of the float model, in new dicts."""
    return jax.tree.map(lambda leaf: leaf, _initialised(module))


def flat(tree) -> dict[tuple[str, ...], Any]:
    """`flatten_dict` with a narrower return type."""
    leaves: Any = traverse_util.flatten_dict(tree)
    return leaves


def kernels(model, variables):
    """Quantized kernels by path."""
    leaves = flat(variables["quantized"])
    found = {}
    for path, format in model.formats:
        arrays: Any = {
            name: leaves.get((*path, name)) for name in ("packed", "scale", "zero", "version")
        }
        n = {"qkv": 3 * K, "up": 2 * K, "head": VOCABULARY}.get(path[-1], K)
        k = 2 * K if path[-1] == "down" else K
        found[path] = QuantizedArray(**arrays, index=None, format=format, k=k, n=n)
    return found


def rounded(model, variables, floats):
    """The float variables with the dequantized weights."""
    params = flat(floats["params"])
    params |= {(*p, "kernel"): dequantized(q) for p, q in kernels(model, variables).items()}
    return {"params": traverse_util.unflatten_dict(params)}


# --- QuantizedDense ------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [FORMAT, INT8, Format(4, 32, "float")], ids=str)
def test_layer_is_initialised_as_dense_is_and_multiplies_by_its_kernel(format):
    x = jax.random.normal(KEY, (2, 3, K))
    bias_init = nn.initializers.normal(1.0)
    floats: Any = nn.Dense(N, bias_init=bias_init).init(KEY, x)["params"]
    layer = QuantizedDense(N, format, bias_init=bias_init)
    variables = layer.init(KEY, x)
    kernel = quantize(floats["kernel"], format)
    assert set(variables["params"]) == {"bias"}
    np.testing.assert_array_equal(variables["params"]["bias"], floats["bias"])
    np.testing.assert_array_equal(variables["quantized"]["packed"], kernel.packed)
    expected = x @ kernel.dequantize() + floats["bias"].reshape(1, 1, N)
    np.testing.assert_allclose(jax.jit(layer.apply)(variables, x), expected, atol=1e-4)
    abstract = jax.eval_shape(layer.init, KEY, x)
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, variables)


def test_layer_under_vmap_and_grad():
    lifted: Any = nn.vmap(
        QuantizedDense,
        variable_axes={"params": 0, "quantized": 0},
        split_rngs={"params": True},
    )(N, INT4)
    x = jax.random.normal(KEY, (3, 5, K))
    variables = lifted.init(KEY, x)
    assert variables["quantized"]["version"].shape == (3,)
    layer: Any = QuantizedDense(N, INT4)
    layers = [jax.tree.map(lambda a, i=i: a[i], variables) for i in range(3)]
    expected = [layer.apply(v, a) for v, a in zip(layers, x, strict=True)]
    np.testing.assert_allclose(lifted.apply(variables, x), expected, atol=1e-5)

    def loss(params):
        return jnp.sum(lifted.apply({**variables, "params": params}, x))

    grads = jax.grad(loss)(variables["params"])
    np.testing.assert_allclose(grads["bias"], np.full((3, N), 5.0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_dtypes_match_dense(dtype):
    x = jnp.ones((2, K), jnp.bfloat16)
    options: Any = {"dtype": dtype, "param_dtype": jnp.bfloat16}
    layers: Any = (nn.Dense(N, **options), QuantizedDense(N, FORMAT, **options))
    for layer in layers:
        assert layer.apply(layer.init(KEY, x), x).dtype == jnp.bfloat16


# --- quantize_model ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_model_equals_its_fake_quantized_twin(name):
    module = MODELS[name]
    floats = initialised(module)
    before = jax.jit(module.apply)(floats, TOKENS)
    model, variables, report = quantize_model(module, floats, FORMAT, TOKENS)
    got = jax.jit(model.apply)(variables, TOKENS)
    expected = jax.jit(module.apply)(rounded(model, variables, floats), TOKENS)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert jnp.abs(got - before).max() > 1e-2  # quantization changes the result
    blocks = ["blocks"] if name == "scanned" else ["block_0", "block_1"]
    layers = ["qkv", "out_proj", "up", "down"]
    assert [layer.path for layer in report.layers if layer.format] == [
        f"{block}.{layer}" for block in blocks for layer in layers
    ]
    assert "kernel" in variables["params"]["head"] and "kernel" in floats["params"][blocks[0]]["up"]


@pytest.mark.slow
def test_only_params_are_differentiated():
    module = MODELS["tied"]
    floats = initialised(module)
    model, variables, _ = quantize_model(module, floats, FORMAT, TOKENS)

    def loss(apply, variables):
        return lambda params: jnp.sum(apply({**variables, "params": params}, TOKENS) ** 2)

    grads = jax.jit(jax.grad(loss(model.apply, variables)))(variables["params"])
    twin = rounded(model, variables, floats)
    expected = jax.jit(jax.grad(loss(module.apply, twin)))(twin["params"])
    for path, grad in flat(grads).items():
        tolerance = 1e-3 * float(jnp.abs(grad).max())
        np.testing.assert_allclose(grad, flat(expected)[path], rtol=1e-3, atol=tolerance)


@pytest.mark.slow
def test_abstract_variables_and_orbax_round_trip(tmp_path):
    module = MODELS["scanned"]
    model, variables, _ = quantize_model(module, initialised(module), FORMAT, TOKENS)
    abstract = jax.eval_shape(module.init, KEY, TOKENS)
    inputs = jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype)
    again, abstract, report = quantize_model(module, abstract, FORMAT, inputs)
    assert again == model and hash(again) == hash(model)
    assert all(layer.error is None for layer in report.layers)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", variables)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "model", abstract)
    jax.tree.map(np.testing.assert_array_equal, restored, variables)
    np.testing.assert_array_equal(again.apply(restored, TOKENS), model.apply(variables, TOKENS))


def test_rules_and_report():
    module = MODELS["tied"]
    floats = initialised(module)
    rules = {r"block_0\.": None, "up$": INT8, "head": FORMAT}
    model, variables, report = quantize_model(module, floats, rules, TOKENS)
    assert dict(model.formats) == {("block_1", "up"): INT8, ("head",): FORMAT}
    up = next(layer for layer in report.layers if layer.path == "block_1.up")
    kernel = floats["params"]["block_1"]["up"]["kernel"]
    packed = kernels(model, variables)["block_1", "up"]
    change = np.linalg.norm(packed.dequantize() - kernel) / np.linalg.norm(kernel)
    assert up.error == pytest.approx(float(change), rel=1e-4)
    assert (up.shape, up.nbytes_before, up.nbytes_after) == (
        (K, 2 * K),
        kernel.nbytes,
        packed.nbytes,
    )
    assert "2 of 10 layers quantized" in str(report)


# --- errors --------------------------------------------------------------------------------------


def test_models_that_cannot_be_quantized_raise():
    x = jnp.ones((2, K))

    class Special(nn.Dense):
        pass

    for layer, message in (
        (nn.Dense(N, precision="highest"), r"'layers_0' has precision='highest', but quant"),
        (Special(N), r"'layers_0' is Special, and a subclass .* Keep it, with a rule"),
    ):
        module = nn.Sequential([layer])
        with pytest.raises(ValueError, match=message):
            quantize_model(module, module.init(KEY, x), INT4, x)
    with pytest.raises(ValueError, match="is the model itself; use QuantizedDense"):
        quantize_model(nn.Dense(N), nn.Dense(N).init(KEY, x), INT4, x)
    module = MODELS["tied"]
    floats = initialised(module)
    with pytest.raises(ValueError, match=r"'atention' matches no layer; .* block_0\.qkv"):
        quantize_model(module, floats, {"atention": INT4}, TOKENS)
    kernel = floats["params"]["block_1"]["up"]["kernel"]
    floats["params"]["block_1"]["up"]["kernel"] = kernel.at[3, 4].set(jnp.nan)
    with pytest.raises(ValueError, match=r"in block_1\.up: .* \(3, 4\)"):
        quantize_model(module, floats, INT4, TOKENS)


def test_missing_kernels_raise():
    layer, x = QuantizedDense(N, INT4), jnp.ones((2, K))
    with pytest.raises(ValueError, match="has no kernel in the collection 'quantized'"):
        layer.apply({"params": layer.init(KEY, x)["params"]}, x)
    module = Transformer(lifted=("params",))
    model, variables, _ = quantize_model(module, initialised(module), INT4, TOKENS)
    with pytest.raises(ValueError, match=r"blocks\.qkv has no kernel .* add 'quantized': 0 to var"):
        model.apply(variables, TOKENS)
