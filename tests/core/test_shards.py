"""Sharded quantization: of integers, and of weights with a sharding in their type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from meshes import make_mesh

import jaxlowbit
from jaxlowbit import Format, QuantizedArray

P = jax.P
FOUR = Format(4, 64, "integer")
quantize = jax.jit(jaxlowbit.quantize, static_argnums=1, static_argnames="shards")


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize(
    ("n", "shards", "format", "groups"),
    [
        (256, (1, 1), FOUR, P("b", "a", None)),
        (200, (2, 4), FOUR, P("b", "a", None)),
        (256, (1, 1), Format(8, -1), P("b", None, None)),
    ],
    ids=str,
)
def test_quantized_on_an_explicit_mesh(n, shards, format, groups, jit):
    weight = np.random.default_rng(0).normal(size=(256, n)).astype(np.float32)
    want = quantize(weight, format, shards=shards)
    mesh = make_mesh(AxisType.Explicit)
    x = jax.device_put(weight, jax.NamedSharding(mesh, P("a", "b")))
    got = (quantize if jit else jaxlowbit.quantize)(x, format, shards=shards)
    assert jax.typeof(got.packed).sharding.spec == P("b", "a", None)
    assert jax.typeof(got.scale).sharding.spec == groups
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_quantized_on_an_explicit_mesh_in_whole_parts():
    mesh = make_mesh(AxisType.Explicit)
    x = jax.device_put(jnp.ones((128, 200)), jax.NamedSharding(mesh, P(None, "b")))
    with pytest.raises(ValueError, match=r"n=200 in 4 parts .*quantize with shards="):
        jaxlowbit.quantize(x, FOUR)


@pytest.mark.parametrize("shards", [(4, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("format", [FOUR, Format(8, -1, "integer")], ids=str)
def test_parts_of_integers_are_packed_like_matrices(format, shards):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**format.bits, (200, 200), np.uint8)
    groups = 1 if format.group_size == -1 else shards[0] * -(-200 // shards[0] // 64)
    scale = rng.uniform(0.5, 1, (groups, 200)).astype(np.float32)
    zero = rng.integers(0, 2**format.bits, (groups, 200), np.uint8)
    array = QuantizedArray.from_integers(values, scale, zero, format=format, shards=shards)
    assert (array.shape, array.shards) == ((200, 200), shards)

    def cut(x, i, j):
        rows = x if len(x) == 1 else np.split(x, shards[0])[i]
        return np.split(rows, shards[1], axis=1)[j]

    parts = [
        [
            QuantizedArray.from_integers(
                *(cut(x, i, j) for x in (values, scale, zero)), format=format
            ).dequantize()
            for j in range(shards[1])
        ]
        for i in range(shards[0])
    ]
    np.testing.assert_array_equal(array.dequantize(), np.block(parts))
    with pytest.raises(ValueError, match=r"from_integers: shards=\(3, 1\) cuts k=200 into 3"):
        QuantizedArray.from_integers(values, scale, zero, format=format, shards=(3, 1))
