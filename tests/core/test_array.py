"""Quantized arrays passed as arrays: conversion to floats, products, and errors with advice."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

import jaxlowbit.linen  # noqa: F401 (registers the arrays with Flax)
from jaxlowbit import INT4, INT8, Format, QuantizedArray, quantize, quantized_matmuls

K, N = 128, 64
FORMAT = Format(4, 32, "integer")


@pytest.fixture(scope="module")
def weight():
    return jax.random.normal(jax.random.key(0), (K, N))


@pytest.fixture(scope="module")
def q(weight):
    return quantize(weight, INT4)


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(1), (3, K))


# --- floats --------------------------------------------------------------------------------------


def test_repr_is_a_line(q):
    assert repr(q) == "QuantizedArray((128, 64), int4-g128, float32, 0.00 MB)"
    assert str(q) == f"{q!r}: x @ q multiplies by it, q.dequantize() gives its floats"
    assert "QuantizedArray((2, 128, 64), int8, bfloat16" in repr(
        quantize(jnp.ones((2, K, N), jnp.bfloat16), "int8")
    )
    assert repr(jax.eval_shape(lambda: q)) == repr(q)
    for leaf in (0, None, jax.P("model")):  # in_axes and shardings contain such leaves
        assert "int4-g128" in repr(jax.tree.map(lambda _, leaf=leaf: leaf, q))


@pytest.mark.parametrize("convert", [np.asarray, np.array, jnp.asarray, jnp.array])
def test_conversions_are_the_floats(convert, q):
    np.testing.assert_array_equal(convert(q), q.dequantize())
    assert convert(q, dtype="float16").dtype == np.float16
    np.testing.assert_array_equal(convert([q, q])[1], q.dequantize())


def test_numpy_functions_get_the_floats(q, x, tmp_path):
    expected, host = x @ q.dequantize(), np.asarray(x)
    for product in (np.dot(host, q), np.einsum("ab,bc->ac", host, q)):
        np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-4)
    jnp.save(tmp_path / "floats.npy", q)
    np.testing.assert_array_equal(np.load(tmp_path / "floats.npy"), q.dequantize())


def test_products_from_the_left_stay_products(q, x):
    expected = x @ q
    for lhs in (x, np.asarray(x)):
        np.testing.assert_array_equal(lhs @ q, expected)
        np.testing.assert_array_equal(jax.jit(lambda lhs: lhs @ q)(lhs), expected)
        assert "quantized_matmul" in str(jax.make_jaxpr(lambda lhs: lhs @ q)(lhs))
    np.testing.assert_array_equal(np.matmul(np.asarray(x), q), expected)


def test_equality_matches_the_floats(q, weight):
    assert (q == q.dequantize()).all() and (q == quantize(weight, INT4)).all()
    assert not (q == weight).all() and (q != weight).any()
    assert (q == 0).shape == (K, N)
    assert q != None and q != "int4" and q not in (None, "int4")  # noqa: E711
    assert {q: 1}[q] == 1


# --- sentences -----------------------------------------------------------------------------------

OPERATIONS: Any = {
    "q @ x": lambda q, x: q @ x.T,
    "* or /": lambda q, x: q * 2,
    "2 * q": lambda q, x: 2 * q,
    "x[:1].T * q": lambda q, x: x[:1].T * q,
    "np.multiply": lambda q, x: np.asarray(x[:1].T) * q,
    "np.add": lambda q, x: np.add(q, 1),
    "+ or -": lambda q, x: q + q,
    "-q": lambda q, x: -q,
    "q > 0": lambda q, x: q > 0,
    "float": lambda q, x: float(q),
    "jit of asarray": lambda q, x: jax.jit(jnp.asarray)(q),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_other_operations_name_the_way(name, q, x):
    line = re.escape(repr(q))
    with pytest.raises(TypeError, match=rf"^QuantizedArray: .*{line}.* x @ q .* q\.dequantize\(\)"):
        OPERATIONS[name](q, x)


@pytest.mark.parametrize("name", ["T", "mT", "astype", "reshape", "sum", "transpose", "at"])
def test_other_attributes_name_the_way(name, q):
    assert not hasattr(q, name)
    message = rf"^QuantizedArray: there is no \.{name} .*q\.dequantize\(\)\.{name}; for a transp"
    with pytest.raises(AttributeError, match=message):
        getattr(q, name)
    with pytest.raises(AttributeError, match=r"^'QuantizedArray' object has no attribute 'bits'$"):
        _ = q.bits


@pytest.mark.parametrize(
    "call",
    [
        lambda q, x: jnp.dot(x, q),
        lambda q, x: jnp.matmul(x, q),
        lambda q, x: jnp.einsum("ab,bc->ac", x, q),
        lambda q, x: jnp.sum(q),
    ],
)
def test_functions_of_jax_numpy_quote_the_way(call, q, x):
    """They raise their own error; in some versions of JAX its text includes the array's repr."""
    with pytest.raises(TypeError, match="QuantizedArray"):
        call(q, x)


def test_a_key_beyond_the_leading_axes_names_the_way(q):
    with pytest.raises(ValueError, match=r"index 0 goes beyond .* or use dequantize\(\)"):
        q[0]


@pytest.mark.parametrize("jit", [False, True])
def test_a_tree_that_was_cast_raises(jit, q, x):
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), q)
    message = r"^QuantizedArray: packed is bfloat16, but packed words are uint32; a tree with it w"
    for use in (
        lambda q, x: x @ q,
        lambda q, x: q.dequantize(),
        lambda q, x: quantized_matmuls(x, [q]),
    ):
        with pytest.raises(ValueError, match=message):
            (jax.jit(use) if jit else use)(cast, x)


# --- flax.serialization --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda w: quantize(w, INT8),
        lambda w: quantize(w.astype(jnp.bfloat16), FORMAT, permutation=jnp.arange(K)[::-1]),
        lambda w: quantize(jnp.stack([w, w]), Format(3, 32, "float"), shards=(1, 2)),
    ],
)
def test_flax_stores_and_restores(make, weight):
    array, other = make(weight), make(2 * weight)
    tree = {"params": {"kernel": array}, "bias": jnp.ones(N)}
    stored = serialization.to_bytes(tree)
    found = serialization.from_bytes({"params": {"kernel": other}, "bias": jnp.zeros(N)}, stored)
    kernel = found["params"]["kernel"]
    assert isinstance(kernel, QuantizedArray)
    assert jax.tree.structure(kernel) == jax.tree.structure(array)
    jax.tree.map(np.testing.assert_array_equal, kernel, array)


def test_flax_restores_no_other_format(q, weight):
    state = serialization.to_state_dict(q)
    assert set(state) == {"packed", "scale", "version"}
    with pytest.raises(ValueError, match=r"^from_state_dict: .* is to be restored from .*; pass a"):
        serialization.from_state_dict(quantize(weight, FORMAT), state)
    with pytest.raises(ValueError, match="QuantizedArray: packed is uint32"):
        serialization.from_state_dict(quantize(weight, INT8), state)
