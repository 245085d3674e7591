"""Flax layers with permuted rows: products, lookups and checkpoints."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers import Oracle, assert_within, dequantize, dequantized

from jaxlowbit import Format, QuantizedArray, check_layout_version, linen, quantize
from jaxlowbit import nnx as jl_nnx
from jaxlowbit._core.columns import take_columns
from jaxlowbit._flax.linen_variables import variables_of

K, N = 96, 150
FORMAT = Format(bits=4, group_size=32, zero="integer")
NAMES = ("packed", "scale", "zero", "permutation", "version")
TOKENS = jnp.array([[0, 1, 63], [64, 149, -1]])


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def permuted(*lead: int, shards: tuple[int, int] = (1, 1)) -> QuantizedArray:
    """An array (*lead, K, N) with permuted rows; the permutation is not an involution."""
    order = np.argsort(random(*lead, shards[0], K // shards[0], seed=1)).reshape(*lead, K)
    array = quantize(random(*lead, K, N), FORMAT, shards=shards, permutation=order)
    assert array.permutation is not None
    return array


def put(layer: Any, array: QuantizedArray) -> Any:
    """The layer with the arrays of `array`."""
    for name in ("packed", "scale", "zero", "version"):
        getattr(layer, name).set_value(getattr(array, name))
    layer.permutation = jl_nnx.QuantizedVariable(array.permutation)
    return layer


def collection(array: QuantizedArray) -> dict[str, Any]:
    return {"quantized": variables_of(array)}


def linear(shards: tuple[int, int] = (1, 1)) -> jl_nnx.QuantizedLinear:
    return jl_nnx.QuantizedLinear(
        K, N, format=FORMAT, shards=shards, use_bias=False, rngs=nnx.Rngs(0)
    )


def embed() -> jl_nnx.QuantizedEmbed:
    return jl_nnx.QuantizedEmbed(N, K, format=FORMAT, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("shards", [(1, 1), (2, 1), (3, 5)], ids=str)
def test_columns_have_their_rows_in_place(shards):
    array = permuted(shards=shards)
    found = jax.jit(lambda q, at: take_columns(q, at, jnp.dtype("float32")))(array, TOKENS)
    np.testing.assert_array_equal(found, dequantized(array).T[TOKENS])


@pytest.mark.parametrize("shards", [(1, 1), (2, 1)], ids=str)
def test_products(shards):
    array, x = permuted(shards=shards), random(5, K)
    oracle = Oracle.of(x, dequantize(array))
    layer = put(linear(shards), array)
    got = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert_within(got, oracle.exact, oracle.bound(jnp.dtype("float32")))
    dense: Any = linen.QuantizedDense(N, FORMAT, shards, use_bias=False)
    got = jax.jit(dense.apply)(collection(array), x)
    assert_within(got, oracle.exact, oracle.bound(jnp.dtype("float32")))


def test_lookups():
    array = permuted()
    expected = dequantized(array).T[TOKENS]
    np.testing.assert_array_equal(put(embed(), array)(TOKENS), expected)
    table: Any = linen.QuantizedEmbed(N, K, FORMAT)
    np.testing.assert_array_equal(table.apply(collection(array), TOKENS), expected)


def test_stacks():
    array, x = permuted(3), random(3, 5, K)
    layer = nnx.vmap(lambda key: linear(), in_axes=0)(jnp.arange(3))
    got = nnx.vmap(lambda layer, x: layer(x))(put(layer, array), x)
    np.testing.assert_allclose(got, x @ dequantized(array), atol=1e-4)


def test_nnx_state_through_orbax(tmp_path):
    layer = put(linear(), permuted())
    assert {*nnx.state(layer, jl_nnx.QuantizedVariable)} == {*NAMES}
    assert not nnx.state(layer, nnx.Param)
    abstract = nnx.eval_shape(lambda: put(linear(), permuted()))
    again = put(linear(), permuted(shards=(1, 1)))
    again.permutation.set_value(jnp.arange(K, dtype=jnp.int32))
    assert not np.array_equal(again(random(5, K)), layer(random(5, K)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", nnx.state(layer))
        checkpointer.wait_until_finished()
        for restored in (abstract, again):
            nnx.update(restored, checkpointer.restore(tmp_path / "layer", nnx.state(restored)))
            check_layout_version(restored)
            np.testing.assert_array_equal(restored(random(5, K)), layer(random(5, K)))


def test_linen_variables_through_orbax(tmp_path):
    dense: Any = linen.QuantizedDense(N, FORMAT, use_bias=False)
    variables = collection(permuted())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", variables)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "layer", jax.eval_shape(lambda: variables))
    x = random(5, K)
    np.testing.assert_array_equal(dense.apply(restored, x), dense.apply(variables, x))


def test_an_invalid_permutation_raises():
    layer = put(linear(), permuted())
    layer.permutation.set_value(jnp.zeros(K, jnp.int32))
    with pytest.raises(ValueError, match=r"permutation has 0 at \(1,\) again"):
        layer(random(5, K))
