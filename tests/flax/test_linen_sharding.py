"""Sharding boxes of quantized Linen variables, and collectives of their products."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.linen.spmd import logical_to_mesh_sharding
from helpers import initial
from jax.sharding import AxisType
from meshes import REDUCE, assert_close, collectives, make_mesh

from jaxlowbit import INT4, Format, quantize
from jaxlowbit.linen import (
    QuantizedDense,
    QuantizedDenseGeneral,
    QuantizedEmbed,
    quantize_model,
)

P = jax.P
FOUR = Format(4, 64, "integer")
KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
RULES = (("embed", None), ("mlp", "b"))


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def logical(*names, init=initial):
    return nn.with_logical_partitioning(init, names)


def partitioned(*names, init=initial):
    return nn.with_partitioning(init, names)


class Mlp(nn.Module):
    """Shards columns of the first matrix and rows of the second."""

    hidden: int = 512
    partitioned: Any = logical
    names: tuple[Any, Any] = ("embed", "mlp")

    @nn.compact
    def __call__(self, x, _=None):
        embed, mlp = self.names
        bias = self.partitioned(mlp, init=initial)
        init = self.partitioned(embed, mlp)
        x = nn.Dense(self.hidden, kernel_init=init, bias_init=bias, name="up")(x)
        x = nn.gelu(x)
        init = self.partitioned(mlp, embed)
        return nn.Dense(256, use_bias=False, kernel_init=init, name="down")(x), None


def specs(variables):
    return nn.get_partition_spec(variables)["quantized"]


@pytest.mark.parametrize("box", [logical, partitioned])
@pytest.mark.parametrize("abstract", [False, True])
def test_arrays_have_the_names_of_the_kernel(box, abstract):
    module = Mlp(partitioned=box)
    init = jax.eval_shape(module.init, KEY, X) if abstract else module.init(KEY, X)
    model: Any
    variables: Any
    model, variables, _ = quantize_model(module, init, {"": FOUR}, X)
    groups = P("mlp", "embed", None)
    up = {"packed": P("mlp", "embed", None), "scale": groups, "zero": groups, "version": P()}
    assert specs(variables)["up"] == up
    assert specs(variables)["down"]["packed"] == P("embed", "mlp", None)
    assert nn.get_partition_spec(variables)["params"] == {"up": {"bias": P("mlp")}}
    if not abstract:
        plain = model.apply(nn.unbox(variables), X)[0]
        np.testing.assert_array_equal(model.apply(variables, X)[0], plain)


def test_layers_name_their_arrays():
    layer: Any
    for layer, x, packed in (
        (QuantizedDense(128, FOUR, kernel_init=logical("embed", "mlp")), X, ("mlp", "embed")),
        (
            QuantizedDenseGeneral((4, 64), FOUR, kernel_init=logical("embed", "heads", None)),
            X,
            ("heads", "embed"),
        ),
        (
            QuantizedEmbed(128, 256, FOUR, embedding_init=logical("tokens", "embed")),
            jnp.arange(3),
            ("tokens", "embed"),
        ),
    ):
        variables = layer.init(KEY, x)
        assert specs(variables)["packed"] == P(*packed, None)
        layer.apply(variables, x)


def test_scanned_layers_gain_the_axis_of_the_stack():
    scan: Any = nn.scan(
        Mlp,
        variable_axes={"params": 0, "quantized": 0},
        split_rngs={"params": True},
        length=3,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    module = scan()
    model, variables, _ = quantize_model(module, module.init(KEY, X, None), {"": FOUR}, X, None)
    assert specs(variables)["up"]["packed"] == P("layers", "mlp", "embed", None)
    assert specs(variables)["up"]["version"] == P("layers")
    assert model.apply(variables, X, None)[0].shape == X.shape


@pytest.mark.parametrize(
    ("hidden", "inside"),
    [(200, True), (512, False)],
    ids=["padded parts in set_mesh", "whole atoms without it"],
)
@pytest.mark.ways("inside")
def test_models_on_an_auto_mesh(hidden, inside):
    shards: Any = {"up": (1, 4), "down": (4, 1)} if hidden == 200 else (1, 1)
    module = Mlp(hidden)
    floats = module.init(KEY, X)
    model, variables, _ = quantize_model(module, floats, {"": FOUR}, X, shards=shards)
    want = model.apply(variables, X)[0]
    mesh = make_mesh(AxisType.Auto)
    x = jax.device_put(X, jax.NamedSharding(mesh, P("a")))
    logical_specs = nn.get_partition_spec(variables)
    if inside:
        with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
            _, placed, _ = quantize_model(module, floats, {"": FOUR}, X, shards=shards)
            assert placed["quantized"]["up"]["packed"].value.sharding.spec == P("b", None, None)
    shardings = logical_to_mesh_sharding(logical_specs, mesh, RULES)
    placed = jax.device_put(nn.unbox(variables), shardings)
    assert placed["quantized"]["up"]["packed"].sharding.spec == P("b", None, None)
    assert placed["quantized"]["down"]["scale"].sharding.spec == P(None, "b", None)
    assert collectives(lambda v, x: model.apply(v, x)[0], placed, x) == [REDUCE]
    assert_close(jax.jit(model.apply)(placed, x)[0], want)


def test_models_on_an_explicit_mesh():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = partitioned(None, "b")
            return nn.Dense(256, use_bias=False, kernel_init=init, name="layer")(x)

    floats: Any = Model().init(KEY, X)
    model, variables, _ = quantize_model(Model(), floats, FOUR, X)
    want = model.apply(variables, X)
    mesh = make_mesh(AxisType.Explicit)
    shardings = nn.get_sharding(floats, mesh)["params"]["layer"]["kernel"]
    box = floats["params"]["layer"]["kernel"]
    floats = {
        "params": {"layer": {"kernel": box.replace(value=jax.device_put(box.value, shardings))}}
    }
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("a", None))
        model, variables, _ = quantize_model(Model(), floats, FOUR, x)
        packed = variables["quantized"]["layer"]["packed"]
        assert packed.names == ("b", None, None)
        assert packed.value.sharding.spec == P("b", None, None)
        assert collectives(model.apply, variables, x) == []
        got = jax.jit(model.apply)(variables, x)
    assert got.sharding.spec == P("a", "b")
    assert_close(got, want)


def test_shards_that_cut_atoms_raise():
    module = Mlp(200)
    floats = module.init(KEY, X)
    message = r"in up: .*n=200 in 4 parts .*quantize with shards="
    mesh = jax.set_mesh(make_mesh(AxisType.Auto))
    with mesh, nn.logical_axis_rules(RULES), pytest.raises(ValueError, match=message):
        quantize_model(module, floats, {"": FOUR}, X)


def test_layers_inside_shard_map():
    mesh = make_mesh(AxisType.Auto)
    layer = QuantizedDense(200, FOUR, (1, 4), kernel_init=partitioned(None, "b"), use_bias=False)
    variables = layer.init(KEY, X)
    f = jax.shard_map(
        layer.apply,
        mesh=mesh,
        in_specs=(nn.get_partition_spec(variables), P("a")),
        out_specs=P("a", "b"),
    )
    assert_close(jax.jit(f)(nn.unbox(variables), X), layer.apply(variables, X))


def test_shards():
    layer = QuantizedDense(200, FOUR, (2, 4), use_bias=False)
    x = X[:, :200]
    variables: Any = layer.init(KEY, x)
    floats: Any = nn.Dense(200).init(KEY, x)["params"]
    kernel = quantize(floats["kernel"], FOUR, shards=(2, 4))
    np.testing.assert_array_equal(variables["quantized"]["packed"], kernel.packed)
    got: Any = layer.apply(variables, x)
    np.testing.assert_allclose(got, x @ kernel.dequantize(), atol=1e-4)
    module = Mlp()
    model, _, _ = quantize_model(
        module, module.init(KEY, X), {"": INT4}, X, shards={"up": (1, 8), "down": (4, 1)}
    )
    shards = {path: packing.shards for path, packing in model.packings}
    assert shards == {("up",): (1, 8), ("down",): (4, 1)}
