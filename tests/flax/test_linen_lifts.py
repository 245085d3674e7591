"""Linen's transformations around quantized layers, and weights computed from parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util
from helpers import dequantized

from jaxlowbit import Format, QuantizedArray
from jaxlowbit.linen import QuantizedDense, quantize_model

WIDTH = 56  # not a multiple of 64
KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).standard_normal((3, WIDTH), np.float32))
FORMAT = Format(8, 32)
ALIKE = Format(8, 48), Format(8, 32)  # their words and scales have equal shapes
AXES: Any = {"params": 0, "quantized": 0}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return jnp.tanh(nn.Dense(WIDTH, name="dense")(x)), None


class JittedMethod(nn.Module):
    @nn.jit
    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(WIDTH, name="dense")(x), None


JittedBlock = nn.jit(Block)


class Model(nn.Module):
    """Calls `run` with the module and its inputs."""

    run: Any

    @nn.compact
    def __call__(self, x):
        return self.run(self, x)


def scanned(block: Any, split: bool = True, **options: Any) -> Any:
    scan: Any = nn.scan(block, split_rngs={"params": split}, length=3, **options)
    return scan(name="r")


def pair(block: Any) -> Any:
    return lambda _, x: block(name="r1")(block(name="r0")(x)[0])[0]


LIFTS = {
    "jit": pair(JittedBlock),
    "jit of a method": pair(JittedMethod),
    "jit of a layer": lambda _, x: nn.jit(nn.Dense)(WIDTH, name="r")(x),
    "remat": pair(nn.remat(Block)),
    "remat of a layer": lambda _, x: nn.remat(nn.Dense)(WIDTH, name="r")(x),
    "scan": lambda _, x: scanned(Block, variable_axes=AXES)(x, None)[0],
    "scan of jit": lambda _, x: scanned(JittedBlock, variable_axes=AXES)(x, None)[0],
    "scan of remat": lambda _, x: scanned(nn.remat(Block), variable_axes=AXES)(x, None)[0],
    "scan of one layer": lambda _, x: scanned(
        Block, split=False, variable_broadcast=["params", "quantized"]
    )(x, None)[0],
    "remat_scan": lambda _, x: nn.remat_scan(nn.Dense, lengths=(2, 3))(WIDTH, name="r")(x),
    "vmap": lambda _, x: nn.vmap(Block, variable_axes=AXES, split_rngs={"params": True})(name="r")(
        x[:, None]
    )[0],
    "a map of other variables": lambda _, x: nn.WeightNorm(
        nn.Dense(WIDTH, name="r"), variable_filter={"bias"}
    )(x),
}


def leaves(tree: Any) -> dict[tuple[str, ...], Any]:
    return traverse_util.flatten_dict(tree)


def twin(model: Any, variables: Any, floats: Any) -> Any:
    """The float variables with the dequantized weights."""
    params, stored = leaves(floats["params"]), leaves(variables["quantized"])
    for path, format in model.formats:
        k, n = params[*path, "kernel"].shape[-2:]
        arrays: Any = {x: stored.get((*path, x)) for x in ("packed", "scale", "zero", "version")}
        array = QuantizedArray(**arrays, index=None, format=format, k=k, n=n)
        params[*path, "kernel"] = dequantized(array)
    return {**floats, "params": traverse_util.unflatten_dict(params)}


@pytest.mark.parametrize("name", LIFTS)
def test_layers_are_found_and_match_the_twin(name):
    if "jit" in name:  # flax traces the layers of `nn.jit` once
        jax.clear_caches()
    module: Any = Model(LIFTS[name])
    floats, rng = jax.eval_shape(module.init, KEY, X), np.random.default_rng(0)
    floats = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) / 7, a.dtype), floats)
    module.apply(floats, X)  # `nn.jit` caches the trace with floats
    model, variables, report = quantize_model(module, floats, FORMAT, X)
    expected = [path[:-1] for path in leaves(floats["params"]) if path[-1] == "kernel"]
    assert [layer.path for layer in report.layers] == [".".join(path) for path in expected]
    assert {path[-1] for path in leaves(variables["params"])} == {"bias"} | (
        {"r/bias/scale"} if name == "a map of other variables" else set()
    )
    want = module.apply(twin(model, variables, floats), X)
    for apply in (model.apply, jax.jit(model.apply)):
        np.testing.assert_allclose(apply(variables, X), want, atol=1e-4)


def test_blocks_of_one_trace_may_have_different_formats():
    module: Any = Model(pair(JittedBlock))
    floats = module.init(KEY, X)
    formats: Any = dict(zip(("r0", "r1"), ALIKE, strict=True))
    for rules in (formats, {"r0": formats["r1"], "r1": formats["r0"]}, {"r1": FORMAT}):
        model, variables, report = quantize_model(module, floats, rules, X)
        found = {layer.path[:2]: layer.format for layer in report.layers if layer.format}
        assert found == rules
        want = module.apply(twin(model, variables, floats), X)
        np.testing.assert_allclose(model.apply(variables, X), want, atol=1e-4)


def test_models_of_one_trace_may_have_different_formats():
    module: Any = Model(pair(JittedBlock))
    floats = module.init(KEY, X)
    quantized = []
    for format in ALIKE:
        jax.clear_caches()
        quantized.append(quantize_model(module, floats, format, X))
    for model, variables, _ in (*quantized, *quantized):
        want = module.apply(twin(model, variables, floats), X)
        np.testing.assert_allclose(model.apply(variables, X), want, atol=1e-4)
    np.testing.assert_array_equal(module.apply(floats, X), jax.jit(module.apply)(floats, X))


def test_blocks_in_jit_are_traced_once():
    traced = []

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x):
            traced.append(x)
            return nn.Dense(WIDTH)(x)

    block = nn.jit(Counted)
    module: Any = Model(lambda _, x: block(name="r")(x))
    model, variables, _ = quantize_model(module, module.init(KEY, X), FORMAT, X)
    model.apply(variables, X)
    traced.clear()
    model.apply(variables, X)
    assert not traced


def test_changed_variables_are_returned_without_more():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(WIDTH, name="dense")(x)
            return nn.BatchNorm(use_running_average=False, name="norm")(x)

    module: Any = Normed()
    floats, mutable = module.init(KEY, X), ["batch_stats"]
    model, variables, _ = quantize_model(module, floats, FORMAT, X, mutable=mutable)
    out, changed = model.apply(variables, X, mutable=mutable)
    assert set(changed) == {"batch_stats"}
    again, everything = model.apply(variables, X, mutable=True)
    np.testing.assert_array_equal(again, out)
    assert jax.tree.structure(everything) == jax.tree.structure(variables)


def test_quantized_layers_of_the_module_keep_their_variables():
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH, name="float")(QuantizedDense(WIDTH, FORMAT, name="own")(x))

    module: Any = Mixed()
    floats = module.init(KEY, X)
    model, variables, _ = quantize_model(module, floats, FORMAT, X)
    assert set(variables["quantized"]) == {"float", "own"}
    want = module.apply(twin(model, variables, floats), X)
    np.testing.assert_allclose(model.apply(variables, X), want, atol=1e-4)


# --- weights computed from parameters ------------------------------------------------------------


def doubled(variables: Any) -> Any:
    return jax.tree.map(lambda a: 2 * a, variables)


def transposed(variables: Any) -> Any:
    return jax.tree.map(jnp.transpose, variables)


def mapped(function: Any) -> Any:
    return nn.map_variables(nn.Dense, "params", function, init=True)


COMPUTED = {
    "WeightNorm": lambda _, x: nn.WeightNorm(nn.Dense(WIDTH, name="r"))(x),
    "SpectralNorm": lambda _, x: nn.SpectralNorm(nn.Dense(WIDTH, name="r"))(x, update_stats=False),
    "map_variables": lambda _, x: mapped(doubled)(WIDTH, name="r")(x),
    "a square that is transposed": lambda _, x: mapped(transposed)(WIDTH, name="r")(x),
    "map_variables of a function": lambda _, x: nn.map_variables(
        lambda layer, x: layer(x), "params", doubled, init=True
    )(nn.Dense(WIDTH, name="r"), x),
    "inside of scan": lambda _, x: scanned(
        nn.map_variables(Block, "params", doubled, init=True), variable_axes=AXES
    )(x, None)[0],
    "inside of jit": lambda _, x: nn.jit(mapped(doubled))(WIDTH, name="r")(x),
    "a stack along another axis": lambda _, x: scanned(
        Block, variable_axes={"params": 1, "quantized": 1}
    )(x, None)[0],
    "a map over another axis": lambda _, x: nn.vmap(
        Block, variable_axes={"params": 1, "quantized": 1}, split_rngs={"params": True}
    )(name="r")(x[:2, None])[0],
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_weights_raise_unless_kept_in_floats(name):
    if "jit" in name:
        jax.clear_caches()

    def run(model, x):
        return nn.Dense(WIDTH, use_bias=False, name="plain")(x), COMPUTED[name](model, x)

    module: Any = Model(run)
    floats = module.init(KEY, X)
    _, before = module.apply(floats, X)
    with pytest.raises(ValueError, match=r"'r.*' computes its factor.*Keep"):
        quantize_model(module, floats, {"": FORMAT}, X)
    model, variables, report = quantize_model(module, floats, {"plain": FORMAT, "r": None}, X)
    assert [layer.path for layer in report.layers if layer.format] == ["plain"]
    np.testing.assert_array_equal(model.apply(variables, X)[1], before)


def test_a_weight_computed_in_one_of_two_calls_raises():
    class Twice(nn.Module):
        def setup(self):
            self.layer = nn.Dense(WIDTH)

        def __call__(self, x):
            norm = nn.map_variables(lambda layer, x: layer(x), "params", doubled, init=True)
            return self.layer(x) + norm(self.layer, x)

    module = Twice()
    with pytest.raises(ValueError, match="'layer' computes its factor"):
        quantize_model(module, module.init(KEY, X), FORMAT, X)


def test_a_model_without_layers_raises():
    module = nn.Sequential([nn.LayerNorm(), nn.relu])
    for rules in (FORMAT, {"": FORMAT}, {}):
        with pytest.raises(ValueError, match=r"calls none of nn\.Dense, .* pass arguments"):
            quantize_model(module, module.init(KEY, X), rules, X)
