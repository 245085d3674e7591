"""Sharding metadata of quantized Flax layers, and collectives of their products."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import AxisType
from meshes import REDUCE, assert_close, collectives, make_mesh
from pairwise import pairwise

from jaxlowbit import INT4, Format, quantize
from jaxlowbit.nnx import (
    QuantizedEinsum,
    QuantizedEmbed,
    QuantizedLinear,
    QuantizedLinearGeneral,
    quantize_model,
)

P = jax.P
FOUR = Format(4, 64, "integer")
LECUN = nnx.initializers.lecun_normal()
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.fixture(params=KINDS)
def mesh(request):
    with jax.default_device(jax.devices("cpu")[0]):
        yield make_mesh(KINDS[request.param])


@contextlib.contextmanager
def unplaced():
    """Variables get metadata, but stay on one device."""
    with nnx.use_eager_sharding(False):
        yield


def specs(layer: nnx.Module) -> dict[str, Any]:
    found = nnx.get_partition_spec(nnx.state(layer))
    return {str(path[-1]): leaf.get_value() for path, leaf in nnx.to_flat_state(found)}


class Mlp(nnx.Module):
    """Shards columns of the first matrix and rows of the second, by logical names."""

    def __init__(self, width: int, hidden: int, rules: Any = ()):
        rngs, options = nnx.Rngs(0), {"sharding_rules": rules} if rules else {}

        def linear(k: int, n: int, *names: str) -> nnx.Linear:
            init = nnx.with_partitioning(LECUN, names, **options)
            return nnx.Linear(k, n, use_bias=False, kernel_init=init, rngs=rngs)

        self.up = linear(width, hidden, "embed", "mlp")
        self.down = linear(hidden, width, "mlp", "embed")

    def __call__(self, x: Any, spec: Any = None) -> Any:
        return self.down(jax.nn.gelu(self.up(x)), out_sharding=spec)


RULES = (("embed", None), ("mlp", "b"))
X = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)


# --- metadata ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "shards", "groups"),
    [
        (FOUR, (1, 1), "embed"),
        (INT4, (1, 1), None),  # a shard of k might end inside a group of 128
        (INT4, (2, 1), "embed"),
        (Format(8, -1), (2, 1), None),
    ],
    ids=str,
)
def test_arrays_have_the_names_of_the_kernel(format, shards, groups):
    with unplaced():
        linear = nnx.Linear(
            512, 256, kernel_init=nnx.with_partitioning(LECUN, ("embed", "mlp")), rngs=nnx.Rngs(0)
        )
        layer = QuantizedLinear.from_linear(linear, format, shards)
        expected = {"packed": P("mlp", "embed", None), "scale": P("mlp", groups, None)}
        expected |= {"version": P(), "bias": P()}
        if format.zero != "none":
            expected["zero"] = expected["scale"]
        assert specs(layer) == expected
        again = QuantizedLinear(
            512,
            256,
            format=format,
            shards=shards,
            kernel_metadata={"out_sharding": ("embed", "mlp")},
            rngs=nnx.Rngs(0),
        )
        assert specs(again) == expected


@pytest.mark.parametrize("kind", ["general", "einsum", "embed"])
def test_metadata_of_a_layer_may_be_set_like_in_its_initializer(kind):
    layer: Any
    layer, arguments, names = {
        "general": (QuantizedLinearGeneral, ((2, 64), (4, 32)), ("embed", None, "mlp", None)),
        "einsum": (QuantizedEinsum, ("bk,khd->bhd", (128, 4, 32), (4, 32)), ("embed", "mlp", None)),
        "embed": (QuantizedEmbed, (128, 64), ("mlp", "embed")),
    }[kind]
    options: Any = {"format": FOUR} | ({"axis": (-2, -1)} if kind == "general" else {})
    weight = "embedding" if kind == "embed" else "kernel"
    said = {f"{weight}_metadata": {"out_sharding": names}}
    initialised = {f"{weight}_init": nnx.with_partitioning(LECUN, names)}
    if kind != "embed":
        said["bias_metadata"] = {"out_sharding": ("mlp", None)}
        zeros = nnx.with_partitioning(nnx.initializers.zeros_init(), ("mlp", None))
        initialised["bias_init"] = zeros
    with unplaced():
        expected = specs(layer(*arguments, **options, **said, rngs=nnx.Rngs(0)))
        assert expected["packed"] == P("mlp", "embed", None)
        assert specs(layer(*arguments, **options, **initialised, rngs=nnx.Rngs(0))) == expected


def test_rules_of_the_variable_and_of_the_context():
    with unplaced():
        ruled, plain = Mlp(256, 512, RULES), Mlp(256, 512)
    for model in (ruled, plain):
        quantize_model(model, FOUR)
    with logical_axis_rules(RULES):
        for model in (ruled, plain):
            assert specs(model.up)["packed"] == P("b", None, None)
            assert specs(model.down)["scale"] == P(None, "b", None)
    assert specs(ruled.up)["packed"] == P("b", None, None)
    assert specs(plain.up)["packed"] == P("mlp", "embed", None)


def test_stacked_layers_gain_and_lose_the_axis_of_the_stack():
    with unplaced():

        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def create(key):
            init = nnx.with_partitioning(LECUN, ("embed", "mlp"))
            return nnx.Linear(256, 256, use_bias=False, kernel_init=init, rngs=nnx.Rngs(key))

        stack: Any = create(jax.random.split(jax.random.key(0), 3))
        stack = QuantizedLinear.from_linear(stack, FOUR)
    assert specs(stack)["packed"] == P("layers", "mlp", "embed", None)

    @nnx.scan(
        in_axes=(nnx.Carry, 0),
        out_axes=nnx.Carry,
        transform_metadata={nnx.PARTITION_NAME: "layers"},
    )
    def apply(x, layer):
        return layer(x)

    for _ in range(2):
        assert apply(jnp.asarray(X), stack).shape == X.shape
        assert specs(stack)["packed"] == P("layers", "mlp", "embed", None)


def test_kernels_of_several_axes_are_divided_by_the_first():
    with unplaced():
        query = nnx.LinearGeneral(
            256,
            (4, 64),
            kernel_metadata={"out_sharding": ("embed", "heads", None)},
            rngs=nnx.Rngs(0),
        )
        out = nnx.LinearGeneral(
            (4, 64),
            256,
            axis=(-2, -1),
            kernel_metadata={"out_sharding": ("heads", None, "embed")},
            rngs=nnx.Rngs(0),
        )
    init = nnx.with_partitioning(LECUN, ("embed", "heads", None))
    layer = QuantizedLinearGeneral(256, (4, 64), format=FOUR, kernel_init=init, rngs=nnx.Rngs(0))
    assert specs(layer)["packed"] == P("heads", "embed", None)
    layer = QuantizedLinearGeneral.from_linear_general(query, FOUR)
    assert specs(layer)["packed"] == P("heads", "embed", None)
    layer = QuantizedLinearGeneral.from_linear_general(out, FOUR)
    assert specs(layer)["packed"] == P("embed", "heads", None)
    with unplaced():
        init = nnx.with_partitioning(LECUN, ("heads", "embed", None))
        einsum = nnx.Einsum("td,ndh->tnh", (4, 256, 64), kernel_init=init, rngs=nnx.Rngs(0))
        init = nnx.with_partitioning(LECUN, ("tokens", "embed"))
        embed = nnx.Embed(256, 128, embedding_init=init, rngs=nnx.Rngs(0))
    layer = QuantizedEinsum.from_einsum(einsum, FOUR)
    assert specs(layer)["packed"] == P("heads", "embed", None)
    layer = QuantizedEmbed.from_embed(embed, FOUR)
    assert specs(layer)["packed"] == P("tokens", "embed", None)


# --- models on a mesh ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "inside", "mesh"),  # unpadded and padded shards, with and without `set_mesh`
    pairwise((512, 200), (True, False), KINDS),
    indirect=["mesh"],
)
@pytest.mark.slow
def test_models_on_a_mesh(hidden, inside, mesh):
    shards: Any = {"up": (1, 4), "down": (4, 1)} if hidden == 200 else (1, 1)
    with unplaced():
        plain = Mlp(256, hidden, RULES)
        quantize_model(plain, FOUR, shards=shards)
        want = plain(jnp.asarray(X))
    spec = P("a", None) if AxisType.Explicit in mesh.axis_types else None
    with jax.set_mesh(mesh):
        model = Mlp(256, hidden, RULES)
        x = jax.device_put(X, P("a", None))
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        report = quantize_model(model, FOUR, shards=shards)
    assert all(0 < layer.error < 0.2 for layer in report.layers if layer.error is not None)
    for layer in (model.up, model.down):
        for name, expected in specs(layer).items():
            assert getattr(layer, name)[...].sharding.spec == expected, name
    with jax.set_mesh(mesh):
        graph, state = nnx.split(model)

        def f(state, x):
            return nnx.merge(graph, state)(x, spec)

        assert collectives(f, state, x) == [REDUCE]
        assert_close(jax.jit(f)(state, x), want)


def test_named_shardings_place_a_model(mesh):
    with unplaced():
        model = Mlp(256, 512, RULES)
        quantize_model(model, FOUR)
    want = model(jnp.asarray(X))
    graph, state = nnx.split(model)
    state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
    spec = P(None, None) if AxisType.Explicit in mesh.axis_types else None

    def f(state, x):
        return nnx.merge(graph, state)(x, spec)

    x = jax.device_put(X, jax.NamedSharding(mesh, P()))
    assert collectives(f, state, x) == [REDUCE]
    assert_close(jax.jit(f)(state, x), want)


def test_shards_that_cut_atoms_raise(mesh):
    with jax.set_mesh(mesh):
        model = Mlp(256, 200, RULES)
        with pytest.raises(ValueError, match=r"in up: .*n=200 in 4 parts .*quantize with shards="):
            quantize_model(model, FOUR)


def test_abstract_models_are_restored_in_parts():
    mesh = make_mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(lambda: Mlp(256, 512, RULES))
        quantize_model(model, FOUR)
        state = nnx.state(model)
    assert specs(model.down)["scale"] == P(None, "b", None)
    shardings = nnx.get_named_sharding(state, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)


# --- jax.shard_map -------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [(1, 1), (1, 4)], ids=str)
def test_layers_inside_shard_map(shards):
    mesh = make_mesh(AxisType.Auto)
    n = 256 if shards == (1, 1) else 200
    with unplaced():
        layer = QuantizedLinear(
            256,
            n,
            format=FOUR,
            shards=shards,
            kernel_metadata={"out_sharding": (None, "b")},
            bias_init=nnx.initializers.normal(),
            bias_metadata={"out_sharding": ("b",)},
            rngs=nnx.Rngs(0),
        )
    want = layer(jnp.asarray(X))
    graph, state = nnx.split(layer)

    def local(state, x):
        layer = nnx.merge(graph, state)
        assert layer.kernel.shape == (256, n // 4)
        return layer(x)

    f = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(nnx.get_partition_spec(state), P("a")),
        out_specs=P("a", "b"),
    )
    assert_close(jax.jit(f)(state, X), want)


@pytest.mark.parametrize("k", [256, 200])
def test_layers_with_sharded_inputs_inside_shard_map(k):
    mesh = make_mesh(AxisType.Auto)
    with unplaced():
        layer = QuantizedLinear(
            k,
            128,
            format=FOUR,
            shards=(4, 1),
            use_bias=False,
            kernel_metadata={"out_sharding": ("b", None)},
            rngs=nnx.Rngs(0),
        )
    x = jnp.asarray(X[:, :k])
    graph, state = nnx.split(layer)
    f = jax.shard_map(
        lambda state, x: jax.lax.psum(nnx.merge(graph, state)(x), "b"),
        mesh=mesh,
        in_specs=(nnx.get_partition_spec(state), P(None, "b")),
        out_specs=P(),
    )
    assert_close(jax.jit(f)(state, x), layer(x))


def test_layers_with_words_of_another_size_raise_outside_shard_map():
    layer = QuantizedLinear(256, 256, format=FOUR, rngs=nnx.Rngs(0))
    layer.packed.set_value(layer.packed[...][:2])
    with pytest.raises(ValueError, match=r"packed is uint32\(2, 4, 512\), but the other fields"):
        layer(jnp.asarray(X))


# --- shards --------------------------------------------------------------------------------------


def test_shards_of_layers_and_of_models():
    rngs = nnx.Rngs(0)
    linear = nnx.Linear(200, 200, rngs=rngs)
    layer = QuantizedLinear.from_linear(linear, FOUR, (2, 4))
    kernel = quantize(linear.kernel[...], FOUR, shards=(2, 4))
    jax.tree.map(np.testing.assert_array_equal, layer.kernel, kernel)
    assert layer.kernel.shards == (2, 4)

    def model() -> nnx.Sequential:
        return nnx.Sequential(*(nnx.Linear(200, 200, rngs=rngs) for _ in range(3)))

    for shards, expected in (
        ((1, 4), [(1, 4)] * 3),
        ({r"\.0$": (2, 1), r"\.[01]$": (1, 8)}, [(2, 1), (1, 8), (1, 1)]),
    ):
        sequence: Any = model()
        quantize_model(sequence, FOUR, shards=shards, quantizer="absmax")
        assert [layer.shards for layer in sequence.layers] == expected
    wrong: Any = (
        ((3, 1), ValueError, r"in layers\.0: .*cuts k=200 into 3 parts"),
        ({"up": (1, 8)}, ValueError, r"'up' matches no layer; .* layers\.0"),
        (
            {"0": 8},
            TypeError,
            r"\('0', 8\) is no rule; .* with shards of k and n, such as \(1, 8\)",
        ),
    )
    for shards, error, message in wrong:
        with pytest.raises(error, match=message):
            quantize_model(model(), FOUR, shards=shards)
