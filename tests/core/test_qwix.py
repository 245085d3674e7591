"""`QuantizedArray.from_qarray` and `.to_qarray`."""

import functools
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dequantize, dequantized

import jaxlowbit
from jaxlowbit import Format, QuantizedArray

qwix: Any = pytest.importorskip("qwix", reason="qwix is not installed")

K, N = 192, 70
# Jitted, with the quantizer that compiles fastest: no test here depends on the scales.
rounded = jax.jit(
    functools.partial(jaxlowbit.quantize, quantizer="absmax"),
    static_argnums=1,
    static_argnames="shards",
)


def weight(*lead) -> jax.Array:
    values = np.random.default_rng(0).normal(size=(*lead, K, N)) + 0.25
    return jnp.asarray(values.astype(np.float32))


def value(array) -> np.ndarray:
    """The dequantized value of a QArray, in float64."""

    def spread(x):
        x = np.asarray(x).astype(np.float64)
        for axis, size in enumerate(array.qvalue.shape):
            x = np.repeat(x, size // x.shape[axis], axis=axis)
        return x

    zero = 0 if array.zero_point is None else spread(array.zero_point)
    return (np.asarray(array.qvalue).astype(np.float64) - zero) * spread(array.scale)


# Tile kinds and widths are independent, so they vary together.
@pytest.mark.parametrize(
    ("qtype", "tiles", "group_size"),
    [
        ("int4", {}, -1),
        ("int4", {0: 32}, 32),
        ("int3", {0: 96}, 96),
        ("int8", {0: K}, -1),
        ("int2", {0: 32}, 32),
        ("int6", {0: 32}, 32),
    ],
)
def test_symmetric(qtype, tiles, group_size):
    array = qwix.quantize(weight(), qtype, channelwise_axes=[1], tiled_axes=tiles)
    packed = QuantizedArray.from_qarray(array)
    assert packed.format == Format(int(qtype[3:]), group_size)
    np.testing.assert_array_equal(dequantize(packed).value, value(array))


@pytest.mark.parametrize("qtype", [jnp.int4, jnp.int8])
@pytest.mark.parametrize("tiles", [{}, {0: 48}])
def test_zero_points(qtype, tiles):
    array = qwix.quantize(
        weight(), qtype, channelwise_axes=[1], tiled_axes=tiles, calibration_method="minmax"
    )
    assert array.zero_point is not None
    packed = QuantizedArray.from_qarray(array)
    assert packed.format.zero == "integer"
    np.testing.assert_array_equal(dequantize(packed).value, value(array))


def test_unsigned_integers_without_a_zero_point():
    values = jnp.asarray(np.random.default_rng(0).integers(0, 16, (K, N)), jnp.uint4)
    array = qwix.QArray(values, jnp.full((2, N), 0.5))
    np.testing.assert_array_equal(dequantize(QuantizedArray.from_qarray(array)).value, value(array))


def test_one_scale_for_the_whole_matrix_and_a_stack():
    array = qwix.quantize(weight(3), jnp.int8, channelwise_axes=[0])
    assert array.scale.shape == (3, 1, 1)
    packed = QuantizedArray.from_qarray(array)
    assert packed.shape == (3, K, N)
    np.testing.assert_array_equal(dequantize(packed).value, value(array))


def test_products_agree():
    array = qwix.quantize(weight(), jnp.int4, channelwise_axes=[1], tiled_axes={0: 64})
    lhs = jax.random.normal(jax.random.key(0), (5, K))
    got = jax.jit(lambda x, q: x @ q)(lhs, QuantizedArray.from_qarray(array))
    np.testing.assert_allclose(got, lhs @ qwix.dequantize(array), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("bits", "zero", "group_size"),  # every pair of zero and size
    [
        (2, "none", -1),
        (3, "integer", 64),
        (4, "none", 256),
        (4, "integer", -1),
        (5, "integer", 256),
        (8, "none", 64),
    ],
)
def test_round_trip(bits, zero, group_size):
    array = rounded(weight(2), Format(bits, group_size, zero))
    other = array.to_qarray()
    assert other.qvalue.dtype == (jnp.int4 if bits <= 4 else jnp.int8)
    np.testing.assert_array_equal(value(other[1]), dequantize(array[1]).value)
    np.testing.assert_array_equal(qwix.dequantize(other[1]), dequantized(array[1]))
    again = QuantizedArray.from_qarray(other)
    np.testing.assert_array_equal(again.packed, array.packed)
    np.testing.assert_array_equal(dequantized(again), dequantized(array))


@pytest.mark.parametrize(("group_size", "shards"), [(32, (2, 1)), (48, (2, 5)), (-1, (1, 5))])
def test_padded_shards_come_without_their_padding(group_size, shards):
    array = rounded(weight(), Format(4, group_size, "integer"), shards=shards)
    assert array.padded_shape != (K, N)
    np.testing.assert_array_equal(qwix.dequantize(array.to_qarray()), dequantized(array))


@pytest.mark.parametrize(("group_size", "shards"), [(-1, 1), (-1, 2), (256, 1)])
def test_permuted_rows_of_one_group_are_put_back(group_size, shards):
    order = np.argsort(np.random.default_rng(0).normal(size=(3, shards, K // shards)))
    array = rounded(
        weight(3), Format(4, group_size), shards=(shards, 1), permutation=order.reshape(3, K)
    )
    np.testing.assert_array_equal(value(array.to_qarray()), dequantize(array).value)
    np.testing.assert_array_equal(value(array.select(1).to_qarray()), dequantize(array[1]).value)


def test_views_and_jit():
    stack = jaxlowbit.quantize(weight(3), Format(4, 32))
    found = jax.jit(lambda q, i: q.select(i).to_qarray())(stack, 2)
    np.testing.assert_array_equal(value(found), dequantize(stack[2]).value)
    back = jax.jit(QuantizedArray.from_qarray)(found)
    np.testing.assert_array_equal(back.dequantize(), stack[2].dequantize())


def refuses(message, error: type[Exception] = ValueError):
    return pytest.raises(error, match=rf"^(from|to)_qarray: .*{message}.*\.$")


@pytest.mark.parametrize("qtype", ["nf4", "float8_e4m3fn", "mxfp4"])
def test_raises_for_other_qtypes(qtype):
    array = qwix.quantize(weight(), qtype, channelwise_axes=[1], tiled_axes={0: 32})
    with refuses(f"qtype is {qtype}, but only integers"):
        QuantizedArray.from_qarray(array)


def test_raises_for_tiles_along_n():
    array = qwix.quantize(weight(), jnp.int4, tiled_axes={1: 35})
    with refuses(r"scale has shape \(1, 2\), but it must broadcast to"):
        QuantizedArray.from_qarray(array)


def test_raises_for_small_tiles():
    array = qwix.quantize(weight(), jnp.int4, channelwise_axes=[1], tiled_axes={0: 8})
    with refuses("have 8 of k=192 elements, but a group is a multiple of 16"):
        QuantizedArray.from_qarray(array)


def test_raises_for_vectors_and_floats():
    with refuses(r"qvalue has shape \(70,\), but a matrix"):
        QuantizedArray.from_qarray(qwix.quantize(weight()[0], jnp.int8))
    with refuses("is .*Array.*, but it must be a qwix.QArray", TypeError):
        QuantizedArray.from_qarray(weight())


def test_raises_for_arrays_that_a_qarray_cannot_represent():
    with refuses("has a float zero, but a QArray has integer zero points"):
        jaxlowbit.quantize(weight(), Format(4, 32, "float")).to_qarray()
    with refuses("k=192 leaves the last group of 128 cut"):
        jaxlowbit.quantize(weight(), Format(4, 128)).to_qarray()
    with refuses("the rows of a group of 64 are permuted, but the tiles of a QArray are of"):
        order = np.arange(K)[::-1]
        jaxlowbit.quantize(weight(), Format(4, 64), permutation=order).to_qarray()


def test_without_qwix(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", types.ModuleType("qwix"))
    with refuses("qwix is not installed; install it", ImportError):
        jaxlowbit.quantize(weight(), Format(4, 64)).to_qarray()
